"""Who holds what, by GPU, and the watch that keeps it at hand."""

import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import anyio
import pytest

from agent.holdings import holdings as holdings_module
from agent.holdings.holdings import HoldingsWatch
from agent.holdings.record import Entries
from agent.kubelet.podresources import PodResourcesUnavailable
from agent.model.holding import Holding, Record
from agent.model.modes import DeviceId, Mode, parse
from agent.modes.withholding import strangers_by_gpu
from tests.component.kubelet_room.parts import eventually
from tests.unit.holdings.record_node import Node
from tests.virtual_time import in_virtual_time

A, B = "GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000012"


def _held(*ids: str, pod: str = "p", resource: str = "r") -> Holding:
    return Holding("ns", pod, "c", resource, ids)


def _listed(*holdings: Holding) -> Record:
    return Record(holdings, ())


@pytest.mark.parametrize(
    ("device_id", "mode", "replica"),
    [
        (A, Mode.PGPU, False),
        (f"{A}::r3", Mode.PGPU, True),
        (f"{A}::c17", Mode.VGPU, False),
        (f"{A}::m42", Mode.VGPU, False),
        (f"{A}::sc1", Mode.MPS, False),
        (f"{A}::sm0", Mode.MPS, False),
    ],
)
def test_a_device_id_tells_gpu_and_mode(device_id: str, mode: Mode, replica: bool) -> None:
    holding = _held(device_id)
    ((gpu, (holder,)),) = _listed(holding).by_gpu.items()
    assert (gpu, holder.mode, holder.replica, holder.holding, holder.pod) == (
        A,
        mode,
        replica,
        holding,
        "ns/p",
    )


def test_many_units_are_one_holder_and_each_gpu_has_its_own() -> None:
    cores = _held(*(f"{A}::c{n}" for n in range(100)), *(f"{B}::c{n}" for n in range(5)))
    memory = _held(*(f"{A}::m{n}" for n in range(564)), resource="m")
    whole = _held(B, pod="q")
    found = _listed(cores, memory, whole).by_gpu
    assert [holder.holding for holder in found[A]] == [cores, memory]
    assert [(holder.mode, holder.pod) for holder in found[B]] == [(Mode.VGPU, "ns/p"), (Mode.PGPU, "ns/q")]


def test_whole_gpus_are_told_apart_by_all_their_digits() -> None:
    found = _listed(_held(A, B)).by_gpu
    assert set(found) == {A, B}


def test_devices_of_others_are_passed_over() -> None:
    assert _listed(_held("", f"{A}::0", f"{A}::x1", "x" * 64), _held()).by_gpu == {}


@pytest.mark.parametrize(
    ("text", "resource", "gpu"),
    [
        (f"{A}::3", "nvidia.com/gpu", A),
        (f"{A}::0", "nvidia.com/gpu.shared", A),
        (f"{A}/3/0", "nvidia.com/mig-1g.10gb", A),
        (f"{B}::x1", "example.com/anything", B),
        ("1", "nvidia.com/gpu", B),
        ("1", "nvidia.com/gpu.shared", B),
        # These are this agent's own, of no GPU of this node, or of something else.
        (A, "nvidia.com/gpu", None),
        (f"{A}::c3", "tencent.com/vcuda-core", None),
        (f"{A}9::3", "nvidia.com/gpu", None),
        ("7", "nvidia.com/gpu", None),
        ("1", "rdma/hca", None),
        ("MIG-1c2d1e5a-0000-4000-8000-000000000001", "nvidia.com/gpu", None),
    ],
)
def test_ids_that_nobody_can_read_are_of_the_gpu_that_they_name(
    text: str, resource: str, gpu: str | None
) -> None:
    held = _held("mlx5_0", text, resource=resource)
    expected = {gpu: (held, text)} if gpu else {}
    assert strangers_by_gpu(_listed(held), {0: A, 1: B}) == expected


def test_ids_are_taken_apart_once_while_their_holding_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pod's end makes another record, of which a node with fractions has thousands of IDs."""
    taken: list[str] = []

    def counted(text: str) -> DeviceId:
        taken.append(text)
        return parse(text)

    for module in ("agent.model.holding", "agent.modes.withholding"):
        monkeypatch.setattr(f"{module}.parse", counted)
    held = _held(*(f"{A}::c{n}" for n in range(3)), resource="tencent.com/vcuda-core")
    for record in (_listed(held), _listed(held, _held(B, resource="other"))):
        assert strangers_by_gpu(record, {0: A, 1: B}) == {}
        assert A in record.by_gpu
    assert taken == [*held.ids, B]


class Lister:
    """PodResources that answer as scripted."""

    def __init__(self, *answers: Record | str) -> None:
        self.answers = list(answers)
        self.asked: list[float] = []  # when

    def keeping_connection(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def list(self, deadline: float = 2.0) -> Record:
        self.asked.append(anyio.current_time())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, str):
            raise PodResourcesUnavailable(answer)
        return answer


class Slowly(Lister):
    """One that answers each question after so many seconds, and refuses where that is `math.inf`."""

    def __init__(self, *seconds: float) -> None:
        super().__init__(_listed(_held(A)))
        self.seconds = list(seconds)

    async def list(self, deadline: float = 2.0) -> Record:
        seconds = self.seconds.pop(0)
        await anyio.sleep(min(seconds, deadline))
        if seconds > deadline:
            raise PodResourcesUnavailable("no answer")
        return await super().list()


async def test_a_holder_without_a_uid_may_be_any_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = HoldingsWatch(Lister(_listed(_held(A), _held(B, pod="q"))))  # type: ignore[arg-type]
    await watch.refresh()
    assert watch.gpus_by_pod() == {}
    assert watch.nameless_gpus() == frozenset({A, B})

    async def entries() -> Entries:
        return {("uid-p", "c", "r"): frozenset({A})}

    monkeypatch.setattr(watch, "_entries", entries)
    await watch.refresh()
    assert watch.gpus_by_pod() == {"uid-p": frozenset({A})}
    assert watch.nameless_gpus() == frozenset({B})


async def test_the_watch_publishes_changes_and_tells_outages_once(
    monkeypatch: pytest.MonkeyPatch, logs: Any
) -> None:
    monkeypatch.setattr(holdings_module, "REFRESH_SECONDS", 0.001)
    monkeypatch.setattr(holdings_module, "RETRY_SECONDS", 0.001)
    one, two = _listed(_held(A)), _listed(_held(B))
    lister = Lister(one, one, "it is down", "it is down", two)
    watch = HoldingsWatch(lister)  # type: ignore[arg-type]
    assert watch.problem == "PodResources has not been read yet"
    seen: list[Record | None] = []
    async with anyio.create_task_group() as group:
        group.start_soon(watch.run)
        while watch.cell.value != two:
            await watch.cell.wait_change(watch.cell.version)
            seen.append(watch.cell.value)
        await eventually(lambda: watch.problem is None)
        group.cancel_scope.cancel()
    assert seen == [one, None, two]
    assert [event["event"] for event in logs] == [
        "pod_resources_readable",
        "pod_resources_unavailable",
        "pod_resources_readable",
    ]


@in_virtual_time
async def test_a_kubelet_that_has_not_answered_yet_or_was_slow_is_waited_for_longer() -> None:
    """Nothing on the node is taken over before an answer; one who falls silent is reported within 2 s."""
    watch = HoldingsWatch(Slowly(8, 8, 8, 0.1, math.inf, math.inf))  # type: ignore[arg-type]
    waited = []
    for _ in range(6):
        began = anyio.current_time()
        found = await watch.refresh()
        waited.append((found is not None, round(anyio.current_time() - began)))
    assert waited == [(False, 2), (True, 8), (True, 8), (True, 0), (False, 2), (False, 2)]


@in_virtual_time
async def test_a_question_without_an_answer_says_nothing_against_one_that_was_put_later() -> None:
    watch = HoldingsWatch(Slowly(9, 0))  # type: ignore[arg-type]
    found: list[Record | None] = []

    async def refresh() -> None:
        found.append(await watch.refresh())

    async with anyio.create_task_group() as group:
        group.start_soon(refresh)
        await anyio.sleep(1)
        await refresh()
    assert [each is not None for each in found] == [True, True]
    assert watch.problem is None
    assert watch.cell.value is not None


@in_virtual_time
async def test_a_question_without_an_answer_does_not_undo_a_later_one_without() -> None:
    watch = HoldingsWatch(Slowly(99, 0, math.inf))  # type: ignore[arg-type]
    watch._patience = 15
    async with anyio.create_task_group() as group:
        group.start_soon(watch.refresh)
        await anyio.sleep(1)
        assert await watch.refresh() is not None
        assert await watch.refresh() is None
    assert watch.problem == "no answer"
    assert watch.cell.value is None


@in_virtual_time
async def test_a_reading_that_was_under_way_answers_no_question_that_came_after_it_began() -> None:
    watch = HoldingsWatch(Slowly(1, 9))  # type: ignore[arg-type]
    async with anyio.create_task_group() as group:
        group.start_soon(watch.look)
        await anyio.sleep(0.5)
        assert await watch.refresh() is None
    assert watch.problem == "no answer"


@in_virtual_time
async def test_an_allocation_is_seen_soon_and_one_during_the_wait_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holdings_module, "REFRESH_SECONDS", 1e6)
    monkeypatch.setattr(holdings_module, "SOON_SECONDS", 0.05)
    none, two = _listed(), _listed(_held(A), _held(B))
    lister = Lister(none, two)
    watch = HoldingsWatch(lister)  # type: ignore[arg-type]
    async with anyio.create_task_group() as group:
        group.start_soon(watch.run)
        with anyio.fail_after(5):
            await watch.cell.wait_for(lambda found: found == none)
            watch.allocated()
            await anyio.sleep(0.01)
            watch.allocated()  # within the wait: one read, after the last
            last = anyio.current_time()
            await watch.cell.wait_for(lambda found: found == two)
        group.cancel_scope.cancel()
    assert len(lister.asked) == 2
    assert lister.asked[-1] - last == pytest.approx(0.05)


@in_virtual_time
async def test_a_crowd_of_allocations_does_not_wear_out_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings_module, "REFRESH_SECONDS", 1e6)
    monkeypatch.setattr(holdings_module, "SOON_SECONDS", 0.05)
    monkeypatch.setattr(holdings_module, "BURST_SECONDS", 0.08)
    lister = Lister(_listed())
    watch = HoldingsWatch(lister)  # type: ignore[arg-type]
    async with anyio.create_task_group() as group:
        group.start_soon(watch.run)
        for _ in range(100):
            watch.allocated()
            await anyio.sleep(0.002)
        await anyio.sleep(0.15)
        group.cancel_scope.cancel()
    pauses = [after - before for before, after in zip(lister.asked, lister.asked[1:], strict=False)]
    assert len(pauses) >= 2
    assert min(pauses) == pytest.approx(0.08)


@in_virtual_time
async def test_an_outage_does_not_last_until_the_next_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings_module, "REFRESH_SECONDS", 1e6)
    monkeypatch.setattr(holdings_module, "SOON_SECONDS", 0.01)
    monkeypatch.setattr(holdings_module, "RETRY_SECONDS", 0.02)
    one = _listed(_held(A))
    lister = Lister(_listed(), "the kubelet restarts", "the kubelet restarts", one)
    watch = HoldingsWatch(lister)  # type: ignore[arg-type]
    async with anyio.create_task_group() as group:
        group.start_soon(watch.run)
        with anyio.fail_after(5):
            await watch.cell.wait_for(lambda found: found == _listed())
            watch.allocated()
            await watch.cell.wait_for(lambda found: found == one)
        group.cancel_scope.cancel()
    assert watch.problem is None


async def test_what_only_a_call_has_read_is_followed_by_a_publication() -> None:
    """A pod that came and went between two readings by the timer: a call has seen it, and counts it still."""
    before, between = _listed(_held(A)), _listed(_held(A), _held(B))
    watch = HoldingsWatch(Lister(before, before, between, before))  # type: ignore[arg-type]
    await watch.refresh()
    await watch.refresh()
    version = watch.cell.version
    assert await watch.look() == between
    assert (watch.cell.value, watch.cell.version) == (before, version)
    await watch.refresh()
    assert (watch.cell.value, watch.cell.version) == (before, version + 1)
    await watch.refresh()
    assert watch.cell.version == version + 1


async def test_an_instance_that_is_gone_is_its_gpus_still(tmp_path: Path) -> None:
    """Processes are looked for by GPU: of nothing else the driver could ever say that none has stayed."""
    node = Node(tmp_path)
    node.watch.instances = lambda: {"MIG-1": A, "MIG-2": B}
    node.kubelet.records(("u", "main", "MIG-1"))
    node.kubelet.pods = {"train-0": {"main": "MIG-1"}, "train-1": {"main": "MIG-2"}}  # not written down yet
    for _ in range(2):
        await node.held()
        assert node.watch.gpus_by_pod() == {"u": {A}}
        assert node.watch.nameless_gpus() == {B}
        node.watch.instances = dict
