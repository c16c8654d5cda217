"""A small storm: faults that a seed chooses, on one node, on the embedded kubelet and on the real cluster.

Time is real here, so that a seed gives the same events and not the same history. `tests/storm` has the
storms in virtual time, with far more of everything.
"""

import random
from collections import Counter
from collections.abc import Awaitable, Callable

import anyio
from grpclib.exceptions import GRPCError, StreamTerminatedError

from agent.model.modes import MODE_OF_UNIT, parse
from agent.model.pod import VGPU
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.scenarios.health import QUIET
from tests.scenarios.mode_node import GPUS, ModeNode, mode_node
from tests.scenarios.rig import GPU, Rig
from tests.storm.pods import random_pod

MOST_PODS = 10
WORDS = ("pgpu", "vgpu", "halves", "no-such-layout")
LAYOUTS = {"layouts": {"halves": [{"gpus": ["0-3"], "mode": "pgpu"}, {"gpus": ["rest"], "mode": "vgpu"}]}}
XIDS = (13, 31, 43, 48, 63, 94)
PAUSES = (0.0, 0.05, 0.3, 1.0, 2.0)
LOOK_EVERY = 5  # events
CALM_SECONDS = 90.0
KUBELET_SECONDS = 30.0
RESOURCES = (GPU, VGPU.core, VGPU.memory)
Restart = Callable[[float], Awaitable[None]]


class SmallStorm:
    """One storm on one node."""

    def __init__(self, node: ModeNode, seed: int, restart_kubelet: Restart) -> None:
        self.node = node
        self._restart = restart_kubelet
        self.rig = node.rig
        self.rng = random.Random(seed)
        self.history: list[str] = []
        self._made = 0
        self._pods: list[PodSpec] = []
        self._gone: list[PodSpec] = []
        acts: dict[Callable[[], Awaitable[str]], int] = {
            self._create: 40,
            self._delete: 25,
            self._label: 8,
            self._xid: 5,
            self._kill: 3,
            self._terminate: 3,
            self._restart_kubelet: 2,
        }
        self._acts, self._weights = list(acts), list(acts.values())

    async def rage(self, seconds: float) -> None:
        """Let events come for so long."""
        end = anyio.current_time() + seconds
        while anyio.current_time() < end:
            act = self.rng.choices(self._acts, self._weights)[0]
            self.history.append(await act())
            await anyio.sleep(self.rng.choice(PAUSES))
            if len(self.history) % LOOK_EVERY == 0:
                await self.look()

    async def look(self) -> None:
        """A unit has one holder, and a GPU is held in one mode."""
        assert self.rig.agent_running(), self._told("the agent has ended")
        # Pods are asked for one after another: of two that seem to share a unit the first may have ended.
        if await self._shared() and (fault := await self._shared()):
            raise AssertionError(self._told(fault))

    async def _shared(self) -> str:
        """The fault, in words; empty: there is none."""
        owners: dict[str, str] = {}
        modes: dict[str, Counter[str]] = {}
        for pod in self._pods:
            for container in pod.containers:
                for resource in RESOURCES:
                    if resource in container.limits:
                        ids = await self.rig.held_ids(pod, container.name, resource)
                        for each in ids:
                            owner = owners.setdefault(each, pod.name)
                            if owner != pod.name:
                                return f"{each}: {owner} and {pod.name}"
                            device = parse(each)
                            modes.setdefault(device.gpu, Counter())[MODE_OF_UNIT[device.unit].value] += 1
        mixed = {gpu: dict(found) for gpu, found in modes.items() if len(found) > 1}
        return f"held in several modes: {mixed}" if mixed else ""

    async def calm(self) -> None:
        """Once faults have stopped the node is as asked for: mode, figures, no taint, and a pod runs."""
        for pod in self._pods:
            await self.rig.ask_to_delete(pod)
        for pod in (*self._pods, *self._gone):
            await self._deleted(pod)
        await self.node.want("vgpu")
        await self.node.applied("vgpu", CALM_SECONDS)
        await self.node.offers("vgpu", GPUS, CALM_SECONDS)
        with anyio.fail_after(10):
            while (await self.rig.node()).taints:
                await anyio.sleep(0.1)
        probe = PodSpec("probe", (ContainerSpec("main", {VGPU.core: 100 * GPUS}),))
        await self.rig.create_pod(probe)
        await self.rig.wait_phase(probe, Phase.RUNNING, 60.0)
        await self.rig.delete_pod(probe)

    def _told(self, problem: str) -> str:
        return f"{problem}; events so far: {self.history}"

    async def _deleted(self, pod: PodSpec) -> None:
        with anyio.fail_after(60):
            while pod.name in await self.rig.all_pods():
                await anyio.sleep(0.2)

    # Events

    async def _create(self) -> str:
        if len(self._pods) >= MOST_PODS:
            return await self._delete()
        self._made += 1
        pod = random_pod(self.rng, f"storm-{self._made}")
        await self.rig.create_pod(pod)
        self._pods.append(pod)
        return f"create {pod.name} {[dict(each.limits) for each in pod.containers]}"

    async def _delete(self) -> str:
        if not self._pods:
            return "delete nothing"
        pod = self._pods.pop(self.rng.randrange(len(self._pods)))
        self._gone.append(pod)
        await self.rig.ask_to_delete(pod)
        return f"delete {pod.name}"

    async def _label(self) -> str:
        word = self.rng.choice(WORDS)
        await self.node.want(word)
        return f"label {word}"

    async def _xid(self) -> str:
        slot, number = self.rng.randrange(GPUS), self.rng.choice(XIDS)
        self.rig.machine.xid(slot, number)
        return f"xid {number} on {slot}"

    async def _kill(self) -> str:
        await self.rig.kill_agent()
        await anyio.sleep(self.rng.choice((0.0, 0.5, 2.0)))
        await self.node.start()
        return "kill the agent"

    async def _terminate(self) -> str:
        code = await self.rig.stop_agent(12.0)
        assert code == 0, self._told(f"the agent ended with {code} after SIGTERM")
        await self.node.start()
        return "terminate the agent"

    async def _restart_kubelet(self) -> str:
        await self._restart(self.rng.choice((0.0, 1.0)))
        with anyio.fail_after(KUBELET_SECONDS):
            while not await self._answers():
                await anyio.sleep(0.1)
        return "restart the kubelet"

    async def _answers(self) -> bool:
        try:
            await self.rig.known_devices()
        except (OSError, GRPCError, StreamTerminatedError):
            return False
        return True


async def storm(rig: Rig, restart_kubelet: Restart, seed: int, seconds: float) -> int:
    """A storm of so many seconds, and the calm after it; how many events there were.

    `restart_kubelet` returns once its process runs again, after so many seconds without one: the rigs' own
    waits for as many devices as before, which are others by then.
    """
    async with mode_node(rig, **QUIET, **LAYOUTS) as node:
        await node.want("vgpu")
        await node.applied("vgpu")
        made = SmallStorm(node, seed, restart_kubelet)
        await made.rage(seconds)
        await made.calm()
        print(f"seed {seed}: {len(made.history)} events in {seconds:g} s")
        return len(made.history)
