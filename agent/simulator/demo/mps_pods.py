"""The act of MPS: pods with unequal caps, and a control daemon that dies and comes back."""

import os
import signal
from collections.abc import Sequence

import anyio
import anyio.to_thread

from agent.app import run as app
from agent.app.agent import Agent
from agent.model.cuda import MEMORY_LIMIT, THREAD_PERCENTAGE
from agent.model.modes import Mode
from agent.model.pod import CORES, MPS
from agent.nvml.port import ComputeMode
from agent.pairing.pairing import SETTLED_SECONDS
from agent.simulator.demo.screen import Screen
from agent.simulator.demo.stage import Stage
from agent.simulator.kubelet import ContainerSpec, PodSpec
from agent.simulator.nvml import SimulatedNvml

SHARES = (("chat", 50, 6), ("embed", 30, 4), ("probe", 5, 1))  # pod, cores, GiB


async def mps_shares(stage: Stage, screen: Screen, number: int) -> None:
    """Clear the node, start the agent in mode mps, share a GPU, and hand all GPUs back."""
    await stage.clear()
    async with stage.api() as (_, access):
        more = {"defaultMode": "mps", **access, **await stage.with_mps()}
        configuration = await anyio.to_thread.run_sync(stage.settings, more)
        screen.act(number, "The agent is back, in mode mps: one supervised MPS daemon per GPU")
        async with app.running(configuration, SimulatedNvml(stage.machine)) as agent:
            act = _Act(stage, screen, agent)
            try:
                await act.play()
            finally:
                with anyio.CancelScope(shield=True):
                    await act.hand_back()
        screen.seen("The GPUs are handed back: no daemon runs, their compute mode is DEFAULT again.")


class _Act:
    def __init__(self, stage: Stage, screen: Screen, agent: Agent) -> None:
        self._stage = stage
        self._screen = screen
        self._agent = agent
        self._count = len(stage.machine.uuids)
        self._nodes = {node: uuid for uuid, node in stage.device_nodes().items()}

    async def play(self) -> None:
        """From the first daemon to the second life of one."""
        stage, screen = self._stage, self._screen
        await self._offers(self._count * CORES)
        modes = {int(stage.machine.gpu(uuid).compute_mode) for uuid in stage.machine.uuids}
        stage.check(modes == {ComputeMode.EXCLUSIVE_PROCESS}, f"the compute modes are {modes}")
        screen.say("(A stand-in plays nvidia-cuda-mps-control here; the tests run NVIDIA's own.)")
        memory = stage.kubelet.api.allocatable.get(MPS.memory)
        screen.seen(
            f"{self._count} daemons serve. The node offers {MPS.core}: {self._count * CORES} and "
            f"{MPS.memory}: {memory} GiB."
        )
        pods = [_pod(*share) for share in SHARES]
        # The daemons came up one by one: until its list has settled, a GPU is chosen after all others.
        await anyio.sleep(SETTLED_SECONDS)
        await stage.run(*pods)
        uuid = self._gpu(pods[0])
        stage.check(all(self._gpu(pod) == uuid for pod in pods), "the pods do not share one GPU")
        self._show(pods)
        screen.say("Caps hold for each CUDA process of a container: MPS knows processes only.")
        await self._daemon_dies(uuid, pods)

    async def _daemon_dies(self, uuid: str, pods: Sequence[PodSpec]) -> None:
        stage, screen = self._stage, self._screen
        index = stage.machine.uuids.index(uuid)
        first = self._pid(uuid)
        stage.check(first is not None, f"GPU {index} has no daemon")
        assert first is not None
        seen: list[int] = []
        with stage.kubelet.observing_node(lambda _, allocatable: seen.append(allocatable.get(MPS.core, 0))):
            os.kill(first, signal.SIGKILL)
            await self._offers((self._count - 1) * CORES)
            screen.seen(f"The daemon of GPU {index} is killed: its units are Unhealthy, nobody new gets any.")
            took = await self._offers(self._count * CORES)
        second = self._pid(uuid)
        stage.check(second not in (None, first), "the daemon has not come back")
        stage.check(min(seen, default=0) == (self._count - 1) * CORES, "other GPUs were touched as well")
        for pod in pods:
            await stage.runs(pod)
        screen.seen(f"It is back {took:.1f} s later, and the units with it. Other GPUs were never touched.")

    async def hand_back(self) -> None:
        """Leave the GPUs as they were."""
        stage = self._stage
        await tear_down(self._agent)
        modes = {int(stage.machine.gpu(uuid).compute_mode) for uuid in stage.machine.uuids}
        stage.check(modes == {ComputeMode.DEFAULT}, f"the compute modes are {modes} afterwards")

    async def _offers(self, cores: int) -> float:
        kubelet = self._stage.kubelet
        return await self._stage.wait(
            lambda: kubelet.api.allocatable.get(MPS.core) == cores,
            lambda: f"the node offers {dict(kubelet.api.allocatable)}, not {cores} of {MPS.core},",
        )

    def _pid(self, uuid: str) -> int | None:
        daemon = self._agent.wings[Mode.MPS].gpu_facts(uuid).get("mps")
        return daemon["pid"] if daemon else None

    def _gpu(self, pod: PodSpec) -> str:
        nodes = self._stage.nodes_of(pod, "main")
        self._stage.check(len(nodes) == 1, f"{pod.name} sees {sorted(nodes)} instead of one GPU")
        return self._nodes[next(iter(nodes))]

    def _show(self, pods: Sequence[PodSpec]) -> None:
        rows = []
        for pod in pods:
            seen = self._stage.kubelet.container(pod, "main").env
            cores, memory = pod.request(MPS.core), pod.request(MPS.memory)
            self._stage.check(seen.get(THREAD_PERCENTAGE) == str(cores), f"{pod.name} sees {seen}")
            self._stage.check(seen.get(MEMORY_LIMIT) == f"0={memory}G", f"{pod.name} sees {seen}")
            index = self._stage.machine.uuids.index(self._gpu(pod))
            rows.append((pod.name, str(index), f"{cores} %", f"{memory} GiB", seen[MEMORY_LIMIT]))
        self._screen.table(("POD", "GPU", "CORES", "MEMORY", MEMORY_LIMIT), rows)


async def tear_down(agent: Agent) -> None:
    """Stop all daemons: they would outlive the agent."""
    async with anyio.create_task_group() as group:
        for state in agent.core.inventory.snapshot.value.gpus:
            for wing in agent.wings.values():
                group.start_soon(wing.give_back, state.gpu)


def _pod(name: str, cores: int, memory: int) -> PodSpec:
    return PodSpec(name, (ContainerSpec("main", {MPS.core: cores, MPS.memory: memory}),))
