"""Processes that no record explains: reported, and with `strict` a reason to offer nothing of their GPU."""

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from structlog.testing import capture_logs

from agent.kit.tasks import Cell
from agent.model.modes import Mode
from agent.modes.planner import STARTING
from agent.modes.switcher import ModeSwitcher, modes_collector
from agent.modes.unexplained import LOOK_SECONDS, MOST_NAMED, STEADY_SECONDS, Unexplained
from agent.modes.withholding import Lingering
from agent.telemetry import definitions as d
from tests.unit.modes.nodes import Kubelet, Node, gpu, switching
from tests.virtual_time import in_virtual_time

pytestmark = pytest.mark.usefixtures("inline")
FIRST, OTHER = gpu(0), gpu(1)
SOON = STEADY_SECONDS + 2 * LOOK_SECONDS
MONITOR, EVERYWHERE = 41, 42


class Host:
    """A record of holders, the processes that the driver lists, and whose these are by their cgroups."""

    def __init__(self, *, strict: bool = False) -> None:
        self.kubelet = Kubelet()
        self.problem: str | None = None
        self.read_ago = 0.0
        self.held: dict[str, frozenset[str]] = {}
        self.nameless: frozenset[str] = frozenset()
        # UIDs of pods by PID, empty for none. GPUs that are not among them cannot be read.
        self.pids: dict[str, dict[int, str]] = {FIRST.uuid: {}, OTHER.uuid: {}}
        self.ours: frozenset[int] = frozenset()
        self.of_the_host = True
        self.lingering = Lingering(self.gpus_by_pod, self.listed, lambda _pids: {}, self.kubelet.cell)
        self.switch = Cell(STARTING)
        self.unexplained = Unexplained(
            cast("Any", self), self.processes, self.owners, self.switch, self.lingering, strict=strict
        )

    @property
    def began(self) -> float:
        return anyio.current_time() - self.read_ago

    def gpus_by_pod(self) -> Mapping[str, frozenset[str]]:
        return dict(self.held)

    def nameless_gpus(self) -> frozenset[str]:
        return self.nameless

    def processes(self) -> Mapping[str, Collection[int]]:
        return {uuid: tuple(found) for uuid, found in self.pids.items()}

    async def listed(self, _gpus: Collection[str]) -> Mapping[str, Collection[int]]:
        return self.processes()

    def owners(self, pids: Iterable[int]) -> Mapping[int, str] | None:
        every = {pid: uid for found in self.pids.values() for pid, uid in found.items()}
        return {pid: every[pid] for pid in pids if pid not in self.ours} if self.of_the_host else None

    def start(self, pod: str, gpu: str) -> None:
        self.held[f"uid-{pod}"] = frozenset({gpu})
        self.kubelet.hold(pod, "nvidia.com/gpu", gpu)

    def end(self, pod: str) -> None:
        del self.held[f"uid-{pod}"]
        self.kubelet.end(pod)

    def metric(self) -> dict[str, float]:
        """The gauge, by the GPU's UUID."""
        switcher = SimpleNamespace(state=self.switch, switches=0)
        series = modes_collector(cast("ModeSwitcher", switcher), self.unexplained)
        return {labels[0]: value for metric, value, labels in series if metric is d.GPU_UNEXPLAINED}


@asynccontextmanager
async def running(host: Host) -> AsyncIterator[Node]:
    """Two GPUs on offer, and the looks at their processes."""
    async with (
        anyio.create_task_group() as group,
        switching(
            FIRST,
            OTHER,
            kubelet=host.kubelet,
            first=Mode.PGPU,
            lingering=host.lingering,
            unexplained=host.unexplained,
            state=host.switch,
        ) as node,
    ):
        await node.reach("pgpu", "pgpu")
        group.start_soon(host.unexplained.run)
        yield node
        group.cancel_scope.cancel()


def told(logs: Sequence[Mapping[str, object]]) -> list[tuple[object, object]]:
    events = ("gpu_used_by_others", "gpu_left_by_others")
    return [(each["event"], each.get("processes")) for each in logs if each["event"] in events]


def test_others_are_reported_once_and_change_nothing() -> None:
    @in_virtual_time
    async def run() -> None:
        host = Host()
        async with running(host) as node:
            host.start("holder", FIRST.uuid)
            host.ours = frozenset({7})
            host.pids[FIRST.uuid] = {7: "", 40: "uid-holder", MONITOR: "", EVERYWHERE: "uid-all"}
            host.pids[OTHER.uuid] = {7: "", EVERYWHERE: "uid-all"}
            version = host.unexplained.withheld.version
            with capture_logs() as logs:
                await anyio.sleep(600)
                assert host.unexplained.withheld.version == version  # nobody is woken in vain
                both = f"{MONITOR} of no pod, {EVERYWHERE} of pod uid-all"
                reported = [("gpu_used_by_others", each) for each in (both, f"{EVERYWHERE} of pod uid-all")]
                assert told(logs) == reported
                assert host.metric() == {FIRST.uuid: 2, OTHER.uuid: 1}
                first, _other = host.unexplained.sentences()
                assert first.startswith(f"GPU 0 ({FIRST.uuid}) is used by 2 process(es)")
                assert both in first
                assert "unexplainedProcesses: report" in first
                assert node.modes() == ["pgpu", "pgpu"]
                host.pids[FIRST.uuid] = {40: "uid-holder"}
                host.pids[OTHER.uuid] = {EVERYWHERE: "uid-all", 43: "uid-all"}
                await anyio.sleep(SOON)
                ended = [("gpu_left_by_others", None), ("gpu_used_by_others", "43 of pod uid-all")]
                assert sorted(told(logs)[2:], key=str) == ended
                assert host.metric() == {FIRST.uuid: 0, OTHER.uuid: 2}

    run()


def test_strict_withholds_a_gpu_until_the_others_have_gone() -> None:
    @in_virtual_time
    async def run() -> None:
        host = Host(strict=True)
        async with running(host) as node:
            host.start("holder", FIRST.uuid)
            host.pids = {FIRST.uuid: {40: "uid-holder", MONITOR: ""}, OTHER.uuid: {EVERYWHERE: "uid-all"}}
            await anyio.sleep(SOON)
            assert node.modes() == ["pgpu-", "off"]  # the holder keeps its GPU
            state = node.switcher.state.value
            assert "processes that no record explains" in state.message
            assert "uid-all" not in state.message  # the Node object is everybody's
            assert "processes that no record explains" in state.gpus[1].active.reason
            assert "no free unit" in host.unexplained.sentences()[0]
            # A request of another mode, and a moment in which nothing can be read, let nobody back.
            node.want(Mode.VGPU)
            del host.pids[OTHER.uuid]
            host.problem = "the kubelet does not answer"
            await anyio.sleep(SOON)
            assert node.modes() == ["pgpu-", "off"]
            assert host.metric() == {}
            host.problem = None
            host.pids[OTHER.uuid] = {}
            await anyio.sleep(2 * LOOK_SECONDS)
            assert node.modes() == ["pgpu-", "vgpu"]
            host.end("holder")
            await anyio.sleep(2 * LOOK_SECONDS)
            assert node.modes() == ["off", "vgpu"]
            host.unexplained.strict = False  # as a reload of the configuration does
            await anyio.sleep(2 * LOOK_SECONDS)
            assert node.modes() == ["vgpu", "vgpu"]
            assert host.metric() == {FIRST.uuid: 2, OTHER.uuid: 0}

    run()


def test_nothing_is_claimed_where_process_ids_are_not_the_hosts() -> None:
    @in_virtual_time
    async def run() -> None:
        host = Host(strict=True)
        host.of_the_host = False
        host.pids = {FIRST.uuid: {MONITOR: ""}, OTHER.uuid: {EVERYWHERE: "uid-all"}}
        async with running(host) as node:
            with capture_logs() as logs:
                await anyio.sleep(SOON)
            assert (told(logs), host.metric(), host.unexplained.sentences()) == ([], {}, [])
            assert node.modes() == ["pgpu", "pgpu"]

    run()


def test_holders_that_the_record_names_late_or_by_no_uid_are_no_others() -> None:
    @in_virtual_time
    async def run() -> None:
        host = Host(strict=True)
        async with running(host) as node:
            with capture_logs() as logs:
                host.pids[FIRST.uuid] = {40: "uid-late"}  # before the record has it
                host.pids[OTHER.uuid] = {44: "uid-nameless"}
                host.nameless = frozenset({OTHER.uuid})
                host.read_ago = 10 * STEADY_SECONDS  # a reading takes long
                await anyio.sleep(9 * STEADY_SECONDS)
                host.start("late", FIRST.uuid)
                host.read_ago = 0
                await anyio.sleep(SOON)
                host.lingering._left[FIRST.uuid] = {"uid-late"}
                host.end("late")
                await anyio.sleep(SOON)
            assert told(logs) == []
            assert host.metric() == {FIRST.uuid: 0, OTHER.uuid: 0}
            assert node.modes() == ["pgpu", "pgpu"]

    run()


def test_gpus_that_nobody_wants_offered_are_anybodys() -> None:
    @in_virtual_time
    async def run() -> None:
        host = Host(strict=True)
        async with running(host) as node:
            host.pids[FIRST.uuid] = {MONITOR: ""}
            await anyio.sleep(SOON)
            assert host.metric() == {FIRST.uuid: 1, OTHER.uuid: 0}
            node.want(Mode.OFF)
            await node.reach("off", "off")
            host.pids[OTHER.uuid] = {MONITOR: ""}
            with capture_logs() as logs:
                await anyio.sleep(SOON)
            assert (told(logs), host.metric()) == ([("gpu_left_by_others", None)], {})

    run()


def test_a_process_that_is_there_for_a_moment_is_passed_over() -> None:
    @in_virtual_time
    async def run() -> None:
        host = Host(strict=True)
        async with running(host) as node:
            with capture_logs() as logs:
                for _ in range(5):
                    host.pids[FIRST.uuid] = {MONITOR: ""}
                    await anyio.sleep(STEADY_SECONDS - 1)
                    host.pids[FIRST.uuid] = {}
                    await anyio.sleep(LOOK_SECONDS)
            assert told(logs) == []
            assert node.modes() == ["pgpu", "pgpu"]

    run()


def test_any_number_of_processes_is_one_line_of_bounded_length() -> None:
    @in_virtual_time
    async def run() -> None:
        host = Host()
        async with running(host):
            with capture_logs() as logs:
                host.pids[FIRST.uuid] = dict.fromkeys(range(100, 100 + MOST_NAMED + 900), "uid-all")
                await anyio.sleep(SOON)
            ((_, processes),) = told(logs)
            assert str(processes).count("uid-all") == MOST_NAMED
            assert str(processes).endswith("and 900 more")

    run()
