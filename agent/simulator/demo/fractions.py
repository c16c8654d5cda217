"""The act of vGPU: pods share GPUs, and one of them fits the node's totals but no single GPU."""

import anyio.to_thread

from agent.app import run as app
from agent.model.pod import CORES, VGPU
from agent.simulator.demo.screen import Screen
from agent.simulator.demo.stage import Stage
from agent.simulator.kubelet import ContainerSpec, Phase, PodSpec
from agent.simulator.nvml import SimulatedNvml

LARGE, SMALL, TOO_LARGE = 60, 30, 50  # cores of the act's pods


async def fractions(stage: Stage, screen: Screen, number: int) -> None:
    """Clear the node, start the agent in mode vgpu, and share the GPUs."""
    await stage.clear()
    async with stage.api() as (_, access):
        configuration = await anyio.to_thread.run_sync(stage.settings, {"defaultMode": "vgpu", **access})
        screen.act(number, "The agent is back, in mode vgpu: pods share GPUs")
        async with app.running(configuration, SimulatedNvml(stage.machine)):
            await _Act(stage, screen).play()


class _Act:
    def __init__(self, stage: Stage, screen: Screen) -> None:
        self._stage = stage
        self._screen = screen
        self._count = len(stage.machine.uuids)
        self._blocks = VGPU.blocks(stage.machine.gpu(stage.machine.uuids[0]).memory_total)
        self._nodes = {node: uuid for uuid, node in stage.device_nodes().items()}

    async def play(self) -> None:
        """From the first list to the refusal."""
        stage, screen = self._stage, self._screen
        await self._offered()
        screen.seen(
            f"The node offers {VGPU.core}: {self._count * CORES} (1 % of a GPU each) and "
            f"{VGPU.memory}: {self._count * self._blocks} (256 MiB each)."
        )
        models = [self._pod(f"model-{n}", LARGE, self._blocks // 2) for n in range(self._count)]
        await stage.run(*models)
        used = {self._gpu(pod) for pod in models}
        stage.check(len(used) == self._count, "two of the models share a GPU that has room for one")
        screen.seen(f"{self._count} models ask for {_demand_of(models[0])} each: one lands on every GPU.")
        helper = self._pod("helper", SMALL, self._blocks // 4)
        await stage.run(helper)
        gpu = self._gpu(helper)
        neighbour = next(pod for pod in models if self._gpu(pod) == gpu)
        index = stage.machine.uuids.index(gpu)
        screen.seen(f"helper asks for {_demand_of(helper)}: it joins {neighbour.name} on GPU {index}.")
        screen.seen(
            "Core and memory of every pod lie on one GPU; each sees the device node of that GPU alone."
        )
        self._show([*models, helper])
        if self._count > 2:  # else the node's totals do not suffice either
            await self._refused()
        screen.say("(On a node a library keeps each container to its memory; here nothing runs CUDA.)")

    async def _offered(self) -> None:
        kubelet = self._stage.kubelet
        wanted = {VGPU.core: self._count * CORES, VGPU.memory: self._count * self._blocks}
        await self._stage.wait(
            lambda: all(
                kubelet.known_devices(resource) == kubelet.api.allocatable.get(resource) == count
                for resource, count in wanted.items()
            ),
            lambda: f"the node offers {dict(kubelet.api.allocatable)}, not {wanted},",
        )

    async def _refused(self) -> None:
        stage, screen = self._stage, self._screen
        late = self._pod("late-model", TOO_LARGE, self._blocks // 4)
        stage.kubelet.create_pod(late)
        state = stage.kubelet.pod(late)
        await stage.wait(lambda: state.phase is Phase.FAILED, lambda: f"pod {late.name} is {state.phase}")
        stage.check("do not fit on any single GPU" in state.message, f"it was refused for: {state.message}")
        free = self._count * (CORES - LARGE) - SMALL
        screen.seen(
            f"late-model asks for {_demand_of(late)}. The node has {free} cores free, no GPU has {TOO_LARGE}:"
        )
        reason = state.message[state.message.index("the largest free share") :]
        for line in f"refused: {reason.partition(', which')[0]}.".replace("; ", ";\n").splitlines():
            screen.say(f"  {line}")
        await stage.kubelet.delete_pod(late, stage.patience)

    def _pod(self, name: str, cores: int, blocks: int) -> PodSpec:
        return PodSpec(name, (ContainerSpec("main", {VGPU.core: cores, VGPU.memory: blocks}),))

    def _gpu(self, pod: PodSpec) -> str:
        """The one GPU that a pod sees. Raises NotAsTold."""
        nodes = self._stage.nodes_of(pod, "main")
        self._stage.check(len(nodes) == 1, f"{pod.name} sees {sorted(nodes)} instead of one GPU")
        return self._nodes[next(iter(nodes))]

    def _show(self, pods: list[PodSpec]) -> None:
        rows = []
        for index, uuid in enumerate(self._stage.machine.uuids):
            here = [pod for pod in pods if self._gpu(pod) == uuid]
            cores, blocks = (sum(pod.request(each) for pod in here) for each in (VGPU.core, VGPU.memory))
            self._stage.check(cores <= CORES and blocks <= self._blocks, f"GPU {uuid} is oversold")
            held = ", ".join(pod.name for pod in here) or "free"
            rows.append((str(index), f"{cores} of {CORES}", f"{blocks} of {self._blocks}", held))
        self._screen.table(("GPU", "CORES", "MEMORY BLOCKS", "HELD BY"), rows)


def _demand_of(pod: PodSpec) -> str:
    return f"{pod.request(VGPU.core)} cores and {pod.request(VGPU.memory)} blocks"
