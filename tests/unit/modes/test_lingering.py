"""Processes that outlive their pod's end: their GPU is in no mode until they have gone."""

import threading
from collections.abc import Collection, Iterable, Mapping

import anyio
import pytest

from agent.kit.tasks import Cell
from agent.model.cgroup import ContainerRef
from agent.model.modes import Mode
from agent.model.node_inventory import Entry
from agent.modes.withholding import LOOK_SECONDS, MOST_LEFT, UNREAD, Departed, Lingering
from agent.nvml.event_watch import MOST_STUCK, WorkerThread
from agent.nvml.port import GpuProcess, NvmlHung
from agent.nvml.sweep import ProcessSweep
from tests.pace import scaled
from tests.unit.modes.nodes import Announcements, Kubelet, gpu, switching
from tests.virtual_time import in_virtual_time

FIRST, OTHER = gpu(0), gpu(1)
HANGS_SECONDS = min(scaled(0.1), 1.0)


class Host:
    """Holders by the record, processes by the driver, and whose these are by their cgroups."""

    def __init__(self) -> None:
        self.kubelet = Kubelet()
        self.held: dict[str, frozenset[str]] = {}
        self.pids: dict[str, dict[int, str]] = {FIRST.uuid: {}, OTHER.uuid: {}}  # UID of the pod; empty: none
        self.readable = True
        self.sick: set[str] = set()  # GPUs that cannot be read
        self.looks = 0
        self.known: frozenset[str] | None = None  # pods; None: not known yet
        self.gpus: Cell[Collection[str]] = Cell((FIRST.uuid, OTHER.uuid))
        self.static: set[str] = set()  # UIDs that may be those of pods whose UIDs nobody says
        departed = Departed(
            lambda: self.gpus.value,
            self.pods,
            lambda: self.known,
            may_live=lambda uid: self.static & {uid},
            appeared=self.gpus,
        )
        self.lingering = Lingering(
            lambda: dict(self.held), self.processes, self.owners, self.kubelet.cell, departed
        )

    async def processes(self, gpus: Collection[str]) -> Mapping[str, Collection[int]]:
        self.looks += 1
        await anyio.lowlevel.checkpoint()
        return {gpu: tuple(self.pids[gpu]) for gpu in gpus if self.readable and gpu not in self.sick}

    def owners(self, pids: Iterable[int]) -> Mapping[int, ContainerRef | None]:
        every = {pid: uid for found in self.pids.values() for pid, uid in found.items()}
        return {pid: ContainerRef(every[pid], "") if every[pid] else None for pid in pids}

    def pods(self, pids: Iterable[int]) -> Mapping[int, str]:
        return {pid: owner.pod_uid for pid, owner in self.owners(pids).items() if owner}

    def start(self, pod: str, gpu: str) -> None:
        self.held[f"uid-{pod}"] = frozenset({gpu})
        self.kubelet.hold(pod, "nvidia.com/gpu", gpu)

    def end(self, pod: str) -> None:
        del self.held[f"uid-{pod}"]
        self.kubelet.end(pod)


async def test_those_of_before_are_looked_for_until_each_gpu_was_read() -> None:
    host = Host()
    host.known = frozenset()
    host.pids[FIRST.uuid] = {7: "uid-departed"}
    host.sick = {FIRST.uuid}
    for _ in range(50):  # the record may change that often in a second
        await host.lingering.look()
        assert host.lingering.found == {FIRST.uuid: UNREAD}
        assert host.lingering.unsettled == {FIRST.uuid}
    host.known = None  # for a moment: a pod is listed before the watch shows it
    await host.lingering.look()
    assert host.lingering.found == {FIRST.uuid: UNREAD}
    host.sick = set()
    await host.lingering.look()
    assert not host.lingering.found  # nobody can say whose they are
    host.known = frozenset()
    await host.lingering.look()
    assert "7 of pod uid-departed" in host.lingering.found[FIRST.uuid]
    assert [*host.lingering.found] == [FIRST.uuid]
    asked = host.looks
    host.pids[OTHER.uuid] = {8: "uid-later"}  # once is enough
    await host.lingering.look()
    assert ([*host.lingering.found], host.looks) == ([FIRST.uuid], asked + 1)


async def test_a_gpu_about_which_all_calls_hang_is_withheld_alone() -> None:
    """By an agent that has just started, though its calls about that GPU have taken the threads of one."""
    host, gate, calls = Host(), threading.Event(), WorkerThread("calls", deadline=HANGS_SECONDS)
    host.known = frozenset()
    host.pids[OTHER.uuid] = {7: "uid-departed"}

    class Driver:
        def processes(self, uuid: str) -> tuple[GpuProcess, ...]:
            if uuid == FIRST.uuid:
                gate.wait(30)
            return tuple(GpuProcess(pid, None) for pid in host.pids[uuid])

    for _ in range(MOST_STUCK):
        with pytest.raises(NvmlHung):
            await calls.run(lambda _: gate.wait(30), FIRST.uuid)
    host.lingering._processes = ProcessSweep(Driver(), calls).pids  # type: ignore[arg-type]
    await host.lingering.look()
    assert host.lingering.found[FIRST.uuid] == UNREAD
    assert "7 of pod uid-departed" in host.lingering.found[OTHER.uuid]
    host.pids[OTHER.uuid] = {}
    await host.lingering.look()
    assert host.lingering.found == {FIRST.uuid: UNREAD}
    gate.set()
    with anyio.fail_after(5):
        while calls.stuck:
            await anyio.sleep(0.01)
    await host.lingering.look()
    assert not host.lingering.found
    calls.close()


@pytest.mark.usefixtures("inline")
def test_a_gpu_that_is_found_late_is_looked_at_like_those_of_the_start() -> None:
    @in_virtual_time
    async def run() -> None:
        host = Host()
        host.known = frozenset({"uid-monitor"})
        host.gpus.publish((FIRST.uuid,))
        host.pids[OTHER.uuid] = {7: "uid-departed", 8: "uid-monitor"}
        async with anyio.create_task_group() as group:
            group.start_soon(host.lingering.run)
            await anyio.sleep(60)
            assert not host.lingering.found
            looks = host.looks
            host.gpus.publish((FIRST.uuid, OTHER.uuid))
            await anyio.sleep(LOOK_SECONDS / 10)
            assert [*host.lingering.found] == [OTHER.uuid]
            assert "7 of pod uid-departed" in host.lingering.found[OTHER.uuid]
            assert host.looks == looks + 2
            host.pids[OTHER.uuid] = {8: "uid-monitor"}
            await anyio.sleep(2 * LOOK_SECONDS)
            assert not host.lingering.found
            looks = host.looks
            host.gpus.publish((FIRST.uuid, OTHER.uuid))
            await anyio.sleep(600)
            assert host.looks == looks
            group.cancel_scope.cancel()

    run()


async def test_a_process_that_may_be_a_static_pods_is_judged_once_that_is_said() -> None:
    host = Host()
    host.known, host.static = frozenset(), {"a" * 32, "b" * 32}
    host.pids = {FIRST.uuid: {7: "a" * 32, 8: "uid-departed"}, OTHER.uuid: {9: "b" * 32}}
    await host.lingering.look()
    assert [*host.lingering.found] == [FIRST.uuid]
    host.pids[FIRST.uuid] = {7: "a" * 32}
    await host.lingering.look()
    assert not host.lingering.found
    looks = host.looks
    await host.lingering.look()
    assert host.looks == looks
    host.static.clear()  # the kubelet lists it no more, or its mirror has come
    host.known = frozenset({"b" * 32})
    await host.lingering.look()
    assert [*host.lingering.found] == [FIRST.uuid]
    assert f"7 of pod {'a' * 32}" in host.lingering.found[FIRST.uuid]


async def test_of_pods_whose_processes_have_gone_nothing_is_remembered() -> None:
    host = Host()
    host.known, host.static = frozenset(), {"a" * 32, "b" * 32}
    host.pids = {FIRST.uuid: {7: "a" * 32, 8: "b" * 32, 9: "uid-departed"}, OTHER.uuid: {}}
    lingering = host.lingering
    await lingering.look()
    assert lingering._may_be.keys() == {"a" * 32, "b" * 32}
    host.static.clear()
    await lingering.look()
    assert f"7 of pod {'a' * 32}" in lingering.found[FIRST.uuid]
    host.static = {"c" * 32}
    host.pids[FIRST.uuid] = {8: "b" * 32}
    await lingering.look()
    await lingering.look()
    assert lingering._recalled == lingering._may_be.keys() == {"b" * 32}
    host.static = {"b" * 32}  # a kubelet that has just started lists it again
    await lingering.look()
    assert not lingering.found
    host.static, host.pids[FIRST.uuid] = set(), {}
    await lingering.look()
    await lingering.look()
    assert not lingering._recalled
    assert not lingering._may_be


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("switches", [False, True])
def test_a_process_that_stays_keeps_its_gpu(switches: bool) -> None:
    @in_virtual_time
    async def run() -> None:
        host = Host()
        async with (
            anyio.create_task_group() as group,
            switching(FIRST, OTHER, kubelet=host.kubelet, first=Mode.PGPU, lingering=host.lingering) as node,
        ):
            group.start_soon(host.lingering.run)
            await node.reach("pgpu", "pgpu")
            host.start("hangs", FIRST.uuid)
            host.pids[FIRST.uuid] = {7: "uid-hangs", 8: ""}
            host.pids[OTHER.uuid] = {9: "", 10: "uid-monitor"}  # of others: nothing follows
            if switches:
                node.want(Mode.VGPU)
                await node.reach("pgpu-", "vgpu")
            await anyio.sleep(1)
            host.end("hangs")
            await node.reach("pgpu-", "vgpu" if switches else "pgpu")
            await anyio.sleep(60)
            message = node.switcher.state.value.message
            assert "its process is still on the GPU: 7 of pod uid-hangs" in message
            assert node.modes()[0] == "pgpu-"
            host.pids[FIRST.uuid] = {8: ""}
            await node.reach(*(["vgpu"] if switches else ["pgpu"]) * 2)
            assert not host.lingering.unsettled
            looks = host.looks
            await anyio.sleep(600)
            assert host.looks == looks  # and nobody is asked about it any more
            group.cancel_scope.cancel()

    run()


@pytest.mark.usefixtures("inline")
def test_a_pod_that_holds_its_gpu_again_has_not_ended() -> None:
    @in_virtual_time
    async def run() -> None:
        host = Host()
        async with (
            anyio.create_task_group() as group,
            switching(FIRST, kubelet=host.kubelet, first=Mode.VGPU, lingering=host.lingering) as node,
        ):
            group.start_soon(host.lingering.run)
            await node.reach("vgpu")
            for pod in ("forced", "other"):
                host.start(pod, FIRST.uuid)
            host.pids[FIRST.uuid] = {7: "uid-forced", 8: "uid-other"}
            await anyio.sleep(1)
            host.end("forced")
            await node.reach("vgpu-")
            host.end("other")
            await anyio.sleep(5)
            host.start("forced", FIRST.uuid)  # the kubelet lists it on
            await anyio.sleep(5)
            message = node.switcher.state.value.message
            assert "8 of pod uid-other" in message
            assert "uid-forced" not in message
            host.start("other", FIRST.uuid)
            await node.reach("vgpu")
            assert not host.lingering.unsettled
            assert not host.lingering.found
            group.cancel_scope.cancel()

    run()


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("waits_for", ["a bound pod", "the kubelet"])
def test_a_gpu_with_a_process_is_closed_whatever_else_is_waited_for(waits_for: str) -> None:
    @in_virtual_time
    async def run() -> None:
        host, record = Host(), Cell(0)
        host.lingering._record = record  # which the agent has from others, too
        async with (
            anyio.create_task_group() as group,
            switching(
                FIRST, OTHER, kubelet=host.kubelet, announce=True, first=Mode.PGPU, lingering=host.lingering
            ) as node,
        ):
            group.start_soon(host.lingering.run)
            await node.reach("pgpu", "pgpu")
            host.start("hangs", FIRST.uuid)
            record.publish(1)
            host.pids[FIRST.uuid] = {7: "uid-hangs"}
            await anyio.sleep(1)
            if waits_for == "the kubelet":
                host.kubelet.cell.publish(None)
                del host.held["uid-hangs"]
            else:
                announcer = node.switcher._announcer
                assert isinstance(announcer, Announcements)
                announcer.served = anyio.Event()
                node.want((Entry(("0",), Mode.PGPU), Entry(("1",), Mode.VGPU)))
                await anyio.sleep(1)
                host.end("hangs")
            record.publish(2)
            await node.reach("pgpu-", "pgpu")
            group.cancel_scope.cancel()

    run()


@pytest.mark.usefixtures("inline")
def test_a_pod_that_no_record_has_shown_keeps_its_gpu_while_its_process_stays() -> None:
    @in_virtual_time
    async def run() -> None:
        host, vanished = Host(), [{"uid-flood"}, {"uid-short"}]
        host.known = frozenset()
        departed = Departed(
            lambda: (FIRST.uuid, OTHER.uuid),
            host.pods,
            lambda: None,
            lambda: vanished.pop() if vanished else (),
        )
        host.lingering._departed = departed
        host.pids[OTHER.uuid] = {7: "uid-short", 8: "uid-monitor"}
        await host.lingering.look()
        assert [*host.lingering.found] == [OTHER.uuid]
        assert "7 of pod uid-short" in host.lingering.found[OTHER.uuid]
        host.pids[OTHER.uuid] = {8: "uid-monitor"}
        await host.lingering.look()
        assert not host.lingering.found
        looks = host.looks
        for _ in range(9):  # many of them cost no more
            await host.lingering.look()
        assert (host.looks, vanished) == (looks, [{"uid-flood"}])
        await anyio.sleep(LOOK_SECONDS)
        await host.lingering.look()
        assert (host.looks, vanished) == (looks + 1, [])

    run()


@pytest.mark.usefixtures("inline")
def test_a_process_that_was_found_is_not_forgotten_while_the_driver_does_not_say() -> None:
    @in_virtual_time
    async def run() -> None:
        host = Host()
        async with (
            anyio.create_task_group() as group,
            switching(FIRST, kubelet=host.kubelet, first=Mode.PGPU, lingering=host.lingering) as node,
        ):
            group.start_soon(host.lingering.run)
            await node.reach("pgpu")
            host.start("hangs", FIRST.uuid)
            host.pids[FIRST.uuid] = {7: "uid-hangs"}
            await anyio.sleep(1)
            host.end("hangs")
            await node.reach("pgpu-")
            host.readable = False
            for _ in range(50):
                await anyio.sleep(LOOK_SECONDS / 2)
                assert list(node.modes()) == ["pgpu-"]
            host.readable, host.pids[FIRST.uuid] = True, {}
            await node.reach("pgpu")
            group.cancel_scope.cancel()

    run()


async def test_ends_during_a_failure_are_not_forgotten_however_often_it_is_looked() -> None:
    """One storm's record changed five times in half a second, while the driver failed for two."""
    host = Host()
    for pod in ("hangs", "gone", "again", "other"):
        host.start(pod, OTHER.uuid if pod == "other" else FIRST.uuid)
    host.pids[FIRST.uuid] = {7: "uid-hangs", 8: "", 9: "uid-again"}
    host.known = frozenset(host.held)
    await host.lingering.look()
    assert not host.lingering.found
    host.sick = {FIRST.uuid}
    for pod in ("hangs", "gone", "again", "other"):
        host.end(pod)
        for _ in range(9):
            await host.lingering.look()
            assert host.lingering.found == {FIRST.uuid: UNREAD}
    assert host.lingering.ended(FIRST.uuid) == {"uid-hangs", "uid-gone", "uid-again"}
    host.start("again", FIRST.uuid)  # a static pod keeps its UID
    await host.lingering.look()
    host.sick = set()
    await host.lingering.look()
    assert "still on the GPU: 7 of pod uid-hangs;" in host.lingering.found[FIRST.uuid]
    assert host.lingering.ended(FIRST.uuid) == {"uid-hangs"}
    del host.pids[FIRST.uuid][7]
    await host.lingering.look()
    assert not host.lingering.found
    assert not host.lingering.unsettled


async def test_a_flood_of_short_pods_costs_bounded_memory_while_a_gpu_cannot_be_read() -> None:
    host = Host()
    host.known, host.sick, numbers = frozenset(), {FIRST.uuid}, iter(range(10 * MOST_LEFT))
    host.lingering._departed = Departed(
        lambda: (FIRST.uuid, OTHER.uuid),
        host.pods,
        lambda: host.known,
        lambda: {f"uid-{next(numbers)}" for _ in range(MOST_LEFT // 2)},
    )
    for _ in range(5):
        host.lingering._swept = -LOOK_SECONDS
        await host.lingering.look()
    assert len(host.lingering.ended(FIRST.uuid)) == MOST_LEFT
    assert not host.lingering.ended(OTHER.uuid)


@pytest.mark.usefixtures("inline")
def test_a_driver_that_does_not_say_keeps_that_gpu_alone_and_is_asked_at_a_steady_pace() -> None:
    @in_virtual_time
    async def run() -> None:
        host = Host()
        host.known = frozenset()
        for pod, one in (("p", FIRST), ("q", OTHER)):
            host.start(pod, one.uuid)
        async with (
            anyio.create_task_group() as group,
            switching(FIRST, OTHER, kubelet=host.kubelet, first=Mode.PGPU, lingering=host.lingering) as node,
        ):
            group.start_soon(host.lingering.run)
            await node.reach("pgpu", "pgpu")
            host.sick = {FIRST.uuid}
            for pod in "pq":
                host.end(pod)
            await node.reach("pgpu-", "pgpu")
            assert UNREAD in node.switcher.state.value.message
            node.want(Mode.VGPU)
            await node.reach("pgpu-", "vgpu")
            looks, reads = host.looks, host.kubelet.reads
            await anyio.sleep(600)
            assert host.looks - looks <= 600 / LOOK_SECONDS + 1
            assert host.kubelet.reads - reads <= 1  # a GPU may be sick for days
            assert list(node.modes()) == ["pgpu-", "vgpu"]
            host.sick = set()
            recovered = anyio.current_time()
            await node.reach("vgpu", "vgpu")
            assert anyio.current_time() - recovered < 2 * LOOK_SECONDS
            looks = host.looks
            await anyio.sleep(600)
            assert host.looks == looks
            group.cancel_scope.cancel()

    run()


@pytest.mark.usefixtures("inline")
def test_a_process_whose_pod_ended_before_the_agent_began_keeps_its_gpu() -> None:
    @in_virtual_time
    async def run() -> None:
        host = Host()
        host.pids[FIRST.uuid] = {7: "uid-forced", 8: ""}
        host.pids[OTHER.uuid] = {9: "", 10: "uid-monitor", 11: "uid-new"}
        async with (
            anyio.create_task_group() as group,
            switching(FIRST, OTHER, kubelet=host.kubelet, first=Mode.PGPU, lingering=host.lingering) as node,
        ):
            group.start_soon(host.lingering.run)
            await node.reach("pgpu", "pgpu")
            await anyio.sleep(60)
            assert not host.lingering.found  # whose they are is not known yet
            host.known = frozenset({"uid-monitor"})
            await node.reach("pgpu-", "pgpu-")
            host.known |= {"uid-new"}  # the watch shows a pod after its first process
            await node.reach("pgpu-", "pgpu")
            await anyio.sleep(60)
            assert "7 of pod uid-forced" in node.switcher.state.value.message
            host.pids[FIRST.uuid] = {8: ""}
            await node.reach("pgpu", "pgpu")
            host.pids[OTHER.uuid][12] = "uid-later"  # of pods that come later nothing follows
            await anyio.sleep(60)
            assert list(node.modes()) == ["pgpu", "pgpu"]
            group.cancel_scope.cancel()

    run()


@pytest.mark.usefixtures("inline")
def test_closing_ends_with_the_grant_though_a_process_has_stayed() -> None:
    @in_virtual_time
    async def run() -> None:
        host = Host()
        async with (
            anyio.create_task_group() as group,
            switching(FIRST, kubelet=host.kubelet, first=Mode.PGPU, lingering=host.lingering) as node,
        ):
            group.start_soon(host.lingering.run)
            await node.reach("pgpu")
            host.start("hangs", FIRST.uuid)
            host.pids[FIRST.uuid] = {7: "uid-hangs"}
            await anyio.sleep(1)
            node.lists.granted = {FIRST.uuid}  # a pod was just served, and rejected by another plugin
            host.end("hangs")
            await anyio.sleep(5)
            node.lists.granted = set()
            await anyio.sleep(600)
            stage = node.switcher._states[FIRST.uuid].stage.value
            group.cancel_scope.cancel()
            assert stage == "draining"

    run()
