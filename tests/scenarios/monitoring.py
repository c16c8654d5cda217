"""Series of each container in a scrape, in the three modes side by side.

Containers here run no CUDA: their processes are entered into the machine's process lists by PID, and the
agent finds out by itself whose they are.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import anyio
from prometheus_client.parser import text_string_to_metric_families

from agent.pairing.pairing import SETTLED_SECONDS
from agent.simulator.kubelet.pod_specs import PodSpec
from agent.simulator.state import ProcessKind
from tests.pace import scaled
from tests.scenarios.mode_node import ModeNode, mode_node
from tests.scenarios.modes import LAYOUTS
from tests.scenarios.rig import Rig

GIB = 1 << 30
MODES = ("pgpu", "vgpu", "mps")
SEEN_SECONDS = 20.0  # the kubelet's records are read every 5 s
Figures = dict[str, Mapping[str, tuple[float, str]]]  # pod -> metric -> value, attribution


@contextlib.asynccontextmanager
async def mixed(rig: Rig) -> AsyncIterator[ModeNode]:
    """Three GPUs offered whole, three in fractions, two as MPS shares."""
    async with mode_node(rig, layouts=LAYOUTS) as node:
        await node.want("mixed")
        await node.applied("mixed")
        for mode, gpus in (("pgpu", 3), ("vgpu", 3), ("mps", 2)):
            await node.offers(mode, gpus)
        # GPUs whose lists have just grown are avoided: the next pod would not go to the first one's.
        await anyio.sleep(SETTLED_SECONDS)
        yield node


@dataclass
class Work:
    """Processes at work on the GPUs of pods; `run` keeps their samples fresh, as a driver would."""

    node: ModeNode
    shares: dict[int, int] = field(default_factory=dict)  # PID -> percent
    turns: dict[int, set[int]] = field(default_factory=dict)  # GPU -> PIDs that share its time

    async def start(self, pod: PodSpec, mode: str, memory_mib: int, percent: int) -> int:
        """A process of the pod's container uses the pod's GPU; its PID."""
        rig = self.node.rig
        pid = await rig.container_pid(pod, "main")
        kind = ProcessKind.MPS if mode == "mps" else ProcessKind.COMPUTE
        gpu = await self.node.index_of(pod)
        rig.machine.processes.start(gpu, pid, kind, memory_mib)
        if kind is ProcessKind.COMPUTE:
            self.turns.setdefault(gpu, set()).add(pid)
        self.shares[pid] = percent
        return pid

    async def run(self) -> None:
        """Sample all of them, for ever."""
        while True:
            processes = self.node.rig.machine.processes
            for pids in self.turns.values():
                processes.take_turns({pid: self.shares[pid] for pid in pids})
            for pid in self.shares.keys() - {pid for pids in self.turns.values() for pid in pids}:
                processes.work(pid, self.shares[pid])
            await anyio.sleep(0.25)


async def figures(node: ModeNode) -> Figures:
    """All series of containers in a scrape, by pod."""
    _, text = await node.get("/metrics")
    found: dict[str, dict[str, tuple[float, str]]] = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("gpu_agent_container_"):
            for sample in family.samples:
                labels = sample.labels
                assert labels["namespace"] == "default"
                assert labels["container"] == "main"
                of_pod = found.setdefault(labels["pod"], {"mode": (0.0, labels["mode"])})
                name = sample.name.removeprefix("gpu_agent_container_")
                assert name not in of_pod, f"two samples of {name} for {labels}"
                of_pod[name] = (sample.value, labels.get("attribution", labels["gpu"]))
    return dict(found)


async def told(node: ModeNode, expected: Mapping[str, Mapping[str, tuple[float, str]]]) -> Figures:
    """Wait until a scrape shows at least this."""
    seen: Figures = {}
    with anyio.move_on_after(scaled(SEEN_SECONDS)):
        while True:
            seen = await figures(node)
            if all(expected[pod].items() <= seen.get(pod, {}).items() for pod in expected):
                return seen
            await anyio.sleep(0.3)
    raise TimeoutError(f"expected {expected}; a scrape showed {seen}")


async def test_each_container_sees_its_own_figures(rig: Rig) -> None:
    async with mixed(rig) as node, anyio.create_task_group() as group:
        pods = {mode: await node.run(mode, f"{mode}-a", f"{mode}-b") for mode in MODES}
        # Two fractions lie on one GPU, so that the GPU's own figures would be wrong for both.
        for mode in ("vgpu", "mps"):
            assert len({await node.index_of(pod) for pod in pods[mode]}) == 1
        work = Work(node)
        expected = {}
        for number, (mode, pair) in enumerate(pods.items()):
            for position, pod in enumerate(pair):
                memory, percent = 500 + 100 * number + 1000 * position, 11 + number + 20 * position
                await work.start(pod, mode, memory, percent)
                expected[pod.name] = {
                    "mode": (0.0, mode),
                    "memory_used_bytes": (float(memory << 20), "measured"),
                    # Of two that take turns on a GPU the sum is measured.
                    "utilization_ratio": ((21 + number) / 100, "estimated")
                    if mode == "vgpu"
                    else (percent / 100, "measured"),
                    "processes": (1.0, rig.gpu_uuids()[await node.index_of(pod)]),
                }
        group.start_soon(work.run)
        # A process of the host is nobody's.
        rig.machine.processes.start(await node.index_of(pods["vgpu"][0]), 1, memory_mib=4000)
        seen = await told(node, expected)
        total = rig.machine.gpu(0).memory_total
        for name, bytes_given, share in (
            ("pgpu-a", total, 1.0),
            ("vgpu-b", 50 * GIB / 4, 0.2),
            ("mps-b", 4 * GIB, 0.2),
        ):
            assert seen[name]["memory_limit_bytes"][0] == bytes_given
            assert seen[name]["core_limit_ratio"][0] == share
        group.cancel_scope.cancel()


async def test_figures_exist_before_the_first_cuda_call(rig: Rig) -> None:
    async with mixed(rig) as node:
        pods = {mode: (await node.run(mode, f"{mode}-idle"))[0] for mode in MODES}
        seen = await told(
            node,
            {
                pod.name: {
                    "mode": (0.0, mode),
                    "memory_used_bytes": (0.0, "measured"),
                    "utilization_ratio": (0.0, "measured"),
                }
                for mode, pod in pods.items()
            },
        )
        assert all(found["memory_limit_bytes"][0] > 0 for found in seen.values())
        assert all(found["core_limit_ratio"][0] > 0 for found in seen.values())


async def test_figures_vanish_with_the_pod(rig: Rig) -> None:
    async with mixed(rig) as node:
        pods = {mode: (await node.run(mode, f"{mode}-short"))[0] for mode in MODES}
        work = Work(node)
        pids = {mode: await work.start(pod, mode, 300, 10) for mode, pod in pods.items()}
        await told(
            node, {pod.name: {"memory_used_bytes": (float(300 << 20), "measured")} for pod in pods.values()}
        )
        for mode in ("vgpu", "mps"):
            rig.machine.processes.stop(pids[mode])
            await node.end(pods[mode])
        with anyio.fail_after(SEEN_SECONDS):
            while set(await figures(node)) != {"pgpu-short"}:
                await anyio.sleep(0.3)
        rig.machine.processes.stop(pids["pgpu"])
        await told(node, {"pgpu-short": {"memory_used_bytes": (0.0, "measured")}})


ALL = (
    test_each_container_sees_its_own_figures,
    test_figures_exist_before_the_first_cuda_call,
    test_figures_vanish_with_the_pod,
)
