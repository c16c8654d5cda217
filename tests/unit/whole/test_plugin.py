"""Whole GPUs as they are listed, preferred and handed out."""

from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, cast

import anyio
import pytest
import structlog.testing

from agent._proto import v1beta1
from agent.holdings.record import View
from agent.injection.inject import Injector
from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.tasks import Cell
from agent.kubelet.podresources import PodResourcesUnavailable
from agent.kubelet.wire import PreferenceRequest, Reason, Refused
from agent.model.gpu import Gpu
from agent.model.holding import Holding, Record, Source
from agent.model.modes import Assignment, GpuMode, Mode, Offering
from agent.model.pod import Pod
from agent.settings import Injection, Settings
from agent.whole.wing import RESOURCE, SHARED_RESOURCE, PgpuPlugin

PGPU = GpuMode(Mode.PGPU)


def _gpu(number: int) -> Gpu:
    bus = f"0000:{number:02x}:00.0"
    return Gpu(f"GPU-{number}", number, number, bus, "NVIDIA H200", 2**37, (9, 0), numa_node=number // 2)


def _snapshot(*states: GpuState) -> Snapshot:
    return Snapshot(problem=None, gpus=states, by_uuid={state.uuid: state for state in states})


class Parts:
    """A plugin over cells that a test publishes."""

    def __init__(self, count: int = 4, mode: GpuMode = PGPU, **options: Any) -> None:
        self.states = [GpuState(_gpu(number)) for number in range(count)]
        self.inventory: Cell[Snapshot] = Cell(_snapshot(*self.states))
        self.modes: Cell[Assignment] = Cell(Assignment({state.uuid: mode for state in self.states}))
        self.cell: Cell[Record | None] = Cell(None)
        self.truth: Record | None = Record((), ())  # None: the kubelet does not answer
        self.looks = 0
        self.began = 0.0  # when the last reading began
        self.over: set[str] = set()
        self.pods: list[Pod] = []
        self.asked: list[list[str]] = []
        injector = Injector(Settings(injection=Injection(strategy="envvar")))
        self.plugin = PgpuPlugin(self.inventory, self.modes, cast("Any", self), injector, **options)

    async def look(self, deadline: float = 1.0) -> Record:
        self.looks += 1
        began = self.began = monotonic()
        if self.truth is None:
            raise PodResourcesUnavailable("no answer")
        return replace(self.truth, began=began)

    def view(self) -> View:
        return View({each.uid: each for each in self.pods}, complete=True)

    async def confirm(self, holdings: Sequence[Holding]) -> Record:
        """The API server is asked for these holders: `over` are."""
        assert self.truth is not None
        self.asked.append([each.pod for each in holdings])
        left = tuple(each for each in self.truth.holdings if each.pod not in self.over)
        self.truth = replace(self.truth, holdings=left)
        return replace(self.truth, began=self.began)

    async def refresh(self) -> None:
        """The record is read by its timer, or at a pod's end; the plugin follows."""
        self.cell.publish(await self.look())
        self.plugin.refresh()

    def fall_ill(self, number: int, cause: str = "Xid 79: it fell off the bus") -> None:
        self.states[number] = replace(self.states[number], blocked=cause)
        self.inventory.publish(_snapshot(*self.states))

    def set_mode(self, number: int, mode: GpuMode) -> None:
        self.modes.publish(Assignment({**self.modes.value.gpus, f"GPU-{number}": mode}))

    def hold(self, *ids: str, resource: str = RESOURCE) -> None:
        self.truth = Record((Holding("ns", "p", "c", resource, ids),), (("ns", "p", "c"),))
        self.cell.publish(replace(self.truth, began=monotonic()))

    @property
    def held(self) -> tuple[Holding, ...]:
        assert self.truth is not None
        return self.truth.holdings

    async def prefer(self, available: Sequence[str], size: int, must: Sequence[str] = ()) -> list[str]:
        """The preferred IDs, in order."""
        return sorted(await self.plugin.prefer(PreferenceRequest(tuple(available), tuple(must), size)))

    def listed(self) -> list[tuple[str, str, list[int]]]:
        """ID, health and NUMA nodes of the list as it is now."""
        self.plugin.refresh()
        devices = v1beta1.ListAndWatchResponse.parse(self.plugin.lists.value).devices
        return [
            (one.id, one.health, [node.id for node in one.topology.nodes] if one.topology else [])
            for one in devices
        ]

    async def allocate(self, *ids: str) -> str:
        """The value of NVIDIA_VISIBLE_DEVICES."""
        return (await self.plugin.allocate(ids)).environment["NVIDIA_VISIBLE_DEVICES"]

    async def refusal(self, *ids: str) -> Refused:
        before = self.plugin.lists.version
        with pytest.raises(Refused) as refused:
            await self.plugin.allocate(ids)
        assert self.plugin.lists.version == before
        return refused.value

    async def held_by(self, device_id: str) -> tuple[str, str]:
        """Pod and container of which the log says that they hold a refused ID; the refusal names neither."""
        with structlog.testing.capture_logs() as events:
            refusal = str(await self.refusal(device_id))
        assert f"device ID {device_id} of {RESOURCE} is held by another container" in refusal
        (event,) = [each for each in events if each["event"] == "held_device_offered"]
        assert event["pod"] not in refusal
        return event["pod"], event["container"]


def test_the_list_is_right_before_anything_runs() -> None:
    assert Parts(2).listed() == [("GPU-0", "Healthy", [0]), ("GPU-1", "Healthy", [0])]
    assert Parts(0).plugin.lists.value == b""


def test_a_sick_gpu_stays_listed_and_the_others_are_not_touched() -> None:
    parts = Parts(4)
    parts.fall_ill(2)
    assert [health for _, health, _ in parts.listed()] == ["Healthy", "Healthy", "Unhealthy", "Healthy"]
    assert parts.plugin.figures(parts.modes.value) == (4, 3)


@pytest.mark.parametrize("mode", [GpuMode(), GpuMode(Mode.MPS), GpuMode(Mode.VGPU)])
def test_gpus_of_other_modes_are_not_listed(mode: GpuMode) -> None:
    parts = Parts(2)
    parts.set_mode(0, mode)
    assert [one for one, _, _ in parts.listed()] == ["GPU-1"]


def test_what_is_held_of_a_draining_gpu_stays_listed_as_unhealthy() -> None:
    parts = Parts(3)
    for number in (0, 1):
        parts.set_mode(number, GpuMode(Mode.PGPU, Offering.CLOSED))
    parts.hold("GPU-0")
    assert [(one, health) for one, health, _ in parts.listed()] == [
        ("GPU-0", "Unhealthy"),
        ("GPU-2", "Healthy"),
    ]
    parts.hold("GPU-0", resource="nvidia.com/other")  # another resource's record is none of ours
    assert [one for one, _, _ in parts.listed()] == ["GPU-2"]


async def test_changes_are_published_once_each_and_only_if_the_kubelet_would_notice() -> None:
    parts = Parts(2)
    async with anyio.create_task_group() as group:
        group.start_soon(parts.plugin.run)
        await anyio.wait_all_tasks_blocked()
        parts.fall_ill(0, "one cause")
        await anyio.wait_all_tasks_blocked()
        assert parts.plugin.lists.version == 1
        parts.fall_ill(0, "another cause")
        parts.hold("GPU-1")
        await anyio.wait_all_tasks_blocked()
        assert parts.plugin.lists.version == 1
        parts.set_mode(1, GpuMode())
        await anyio.wait_all_tasks_blocked()
        assert parts.plugin.lists.version == 2
        group.cancel_scope.cancel()


async def test_gpus_are_handed_out_as_asked() -> None:
    parts = Parts(4)
    assert await parts.allocate("GPU-2", "GPU-0") == "GPU-2,GPU-0"
    assert "stands twice" in str(await parts.refusal("GPU-1", "GPU-1"))


@pytest.mark.parametrize(
    ("device_id", "told"),
    [
        ("GPU-9", "device ID GPU-9 names no GPU of this node; the kubelet's list is out of date"),
        ("GPU-0::c5", "device ID GPU-0::c5 belongs to another resource than nvidia.com/gpu"),
        ("GPU-0::sm1", "belongs to another resource"),
        (
            "GPU-0::zz1",
            "does not end in a unit that this agent offers; nvidia.com/gpu is asked for by GPU UUID",
        ),
        ("", "is empty or longer than 63 characters"),
        ("x" * 5000, "is empty or longer than 63 characters"),
        ("GPU-0::r0", "GPU GPU-0 (index 0) is not offered as nvidia.com/gpu now"),
    ],
)
async def test_what_is_not_ours_is_refused(device_id: str, told: str) -> None:
    refusal = await Parts(2).refusal("GPU-1", device_id)
    assert told in str(refusal)
    assert refusal.reason is Reason.INVALID
    assert len(str(refusal)) < 300


async def test_a_sick_gpu_is_refused_with_its_cause() -> None:
    parts = Parts(2)
    parts.fall_ill(1)
    assert str(await parts.refusal("GPU-0", "GPU-1")) == (
        "GPU GPU-1 (index 1) is unhealthy: Xid 79: it fell off the bus; "
        "it is handed out again when it has recovered"
    )
    assert await parts.allocate("GPU-0") == "GPU-0"


async def test_a_gpu_of_another_mode_is_refused_with_the_reason() -> None:
    parts = Parts(2)
    parts.set_mode(0, GpuMode(Mode.MPS))
    assert "is not offered as nvidia.com/gpu now: it is in mode mps" in str(await parts.refusal("GPU-0"))
    parts.set_mode(0, GpuMode(reason="MIG is on"))
    assert str(await parts.refusal("GPU-0")).endswith("now: MIG is on")


async def test_a_closing_gpu_honours_what_was_being_admitted() -> None:
    parts = Parts(1)
    parts.set_mode(0, GpuMode(Mode.PGPU, Offering.CLOSING))
    assert await parts.allocate("GPU-0") == "GPU-0"


async def test_what_has_left_the_list_is_neither_preferred_nor_granted() -> None:
    """A kubelet that has taken in the shorter list ends by a nil pointer when it is given such a device."""
    parts, closed = Parts(2, replace(PGPU, replicas=3)), GpuMode(Mode.PGPU, Offering.CLOSED, replicas=3)
    mine, *others = (f"GPU-0::r{number}" for number in range(3))
    parts.hold(mine)
    parts.set_mode(0, closed)
    assert [name for name, *_ in parts.listed() if name.startswith("GPU-0")] == [mine]
    expected = f"device ID {others[0]} of nvidia.com/gpu is not offered any more"
    assert str(await parts.refusal(others[0])).startswith(expected)
    assert await parts.prefer([*others, "GPU-1::r0"], 1) == ["GPU-1::r0"]
    assert await parts.prefer([mine, *others, "GPU-1::r0"], 1) == ["GPU-1::r0"]
    for available in (others, [mine, *others]):
        with pytest.raises(Refused, match="is not offered any more: its GPU changes its mode"):
            await parts.prefer(available, 1)
    # A later container of the pod has what its init container had.
    parts.truth = Record(
        (Holding("ns", "p", "c", RESOURCE, (mine,), source=Source.CHECKPOINT),), (("ns", "p", "d"),)
    )
    parts.cell.publish(replace(parts.truth, began=monotonic()))
    assert await parts.allocate(mine) == "GPU-0"


@pytest.mark.parametrize("mode", [GpuMode(), GpuMode(Mode.VGPU), replace(PGPU, replicas=2)])
async def test_a_gpu_that_has_left_altogether_is_not_preferred(mode: GpuMode) -> None:
    """The kubelet chose it by the list that it had: another one is free."""
    parts = Parts(2)
    parts.set_mode(0, mode)
    assert await parts.prefer(["GPU-0", "GPU-1"], 1) == ["GPU-1"]


@pytest.mark.parametrize("by", ["illness", "closing"])
async def test_a_gpu_that_is_well_is_preferred_to_one_that_is_not_any_more(by: str) -> None:
    """It was when the kubelet chose, and the kubelet was slow to say who holds what."""
    parts = Parts(2)
    parts.hold("GPU-0", "GPU-1")
    look = parts.look

    async def meanwhile(deadline: float = 1.0) -> Record:
        parts.truth = Record((), ())
        if by == "illness":
            parts.fall_ill(0)
        else:
            parts.set_mode(0, GpuMode(Mode.PGPU, Offering.CLOSING))
        return await look(deadline)

    parts.look = meanwhile  # type: ignore[method-assign]
    assert await parts.prefer(["GPU-0", "GPU-1"], 1) == ["GPU-1"]
    assert set(await parts.prefer(["GPU-0", "GPU-1"], 2)) == {"GPU-0", "GPU-1"}


async def test_a_gpu_that_leaves_the_list_while_the_kubelet_is_asked_is_not_granted() -> None:
    parts = Parts(2)
    parts.hold("GPU-1")
    look = parts.look

    async def closes(deadline: float = 1.0) -> Record:
        parts.truth = Record((), ())
        parts.set_mode(1, GpuMode(Mode.PGPU, Offering.CLOSED))
        return await look(deadline)

    parts.look = closes  # type: ignore[method-assign]
    assert "is not offered any more" in str(await parts.refusal("GPU-1"))


@pytest.mark.parametrize(
    ("available", "must", "size", "wanted"),
    [
        (("GPU-3", "GPU-1"), (), 2, {"GPU-1", "GPU-3"}),
        (("GPU-3", "GPU-1", "GPU-0"), ("GPU-3",), 1, {"GPU-3"}),
        (("GPU-0",), (), 0, set[str]()),
        (("GPU-0",), (), 5, {"GPU-0"}),
        ((), (), 1, set[str]()),
    ],
)
async def test_preference_keeps_to_size_and_must_include(
    available: Sequence[str], must: Sequence[str], size: int, wanted: set[str]
) -> None:
    chosen = await Parts(4).plugin.prefer(PreferenceRequest(tuple(available), tuple(must), size))
    assert set(chosen) == wanted
    assert len(chosen) == len(wanted)


async def test_time_slices_spread_over_the_least_shared_gpus() -> None:
    parts = Parts(2, GpuMode(Mode.PGPU, replicas=3))
    assert len(parts.listed()) == 6
    free = ("GPU-0::r1", "GPU-0::r2", "GPU-1::r0", "GPU-1::r1", "GPU-1::r2")
    chosen = await parts.plugin.prefer(PreferenceRequest(free, (), 2))
    assert chosen == ["GPU-1::r0", "GPU-0::r1"]
    assert await parts.allocate("GPU-1::r0", "GPU-1::r2") == "GPU-1"
    assert "is not offered" in str(await parts.refusal("GPU-1"))


async def test_more_than_one_slice_may_be_refused() -> None:
    parts = Parts(1, GpuMode(Mode.PGPU, replicas=3), refuse_more_than_one=True)
    assert await parts.allocate("GPU-0::r0") == "GPU-0"
    assert "ask for 1" in str(await parts.refusal("GPU-0::r0", "GPU-0::r1"))


def test_renamed_slices_have_a_resource_of_their_own() -> None:
    sliced = GpuMode(Mode.PGPU, replicas=2)
    whole = Parts(2, replicas=False)
    whole.set_mode(0, sliced)
    assert [one for one, _, _ in whole.listed()] == ["GPU-1"]
    shared = Parts(2, resource=SHARED_RESOURCE, whole=False)
    shared.set_mode(0, sliced)
    assert [one for one, _, _ in shared.listed()] == ["GPU-0::r0", "GPU-0::r1"]


async def test_held_units_are_never_handed_out_again() -> None:
    parts = Parts(4)
    everything = tuple(state.uuid for state in parts.states)
    parts.hold("GPU-0", "GPU-1")
    assert await parts.prefer(everything, 2) == ["GPU-2", "GPU-3"]
    with pytest.raises(Refused, match=r"device ID GPU-0 of nvidia.com/gpu is held by another container"):
        await parts.prefer(everything, 3)
    assert await parts.held_by("GPU-1") == ("ns/p", "c")
    # What was handed out a moment ago is looked up, too, though the record at hand is older than that.
    assert await parts.allocate("GPU-2") == "GPU-2"
    parts.truth = Record((*parts.held, Holding("ns", "q", "c", RESOURCE, ("GPU-2",))), ())
    for _ in range(2):
        assert await parts.held_by("GPU-2") == ("ns/q", "c")
    assert await parts.prefer(everything, 1) == ["GPU-3"]


async def test_lists_stay_as_they_were_while_nobody_can_say_who_holds_what() -> None:
    parts = Parts(2)
    parts.hold("GPU-0")
    for number in range(2):
        parts.set_mode(number, GpuMode(Mode.PGPU, Offering.CLOSED))
    assert parts.listed() == [("GPU-0", "Unhealthy", [0])]
    parts.cell.publish(None)
    assert parts.listed() == [("GPU-0", "Unhealthy", [0])]
