"""What the node is told: figures ahead of the kubelet, and the state."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import anyio
import pytest

from agent.kit.cell import Cell
from agent.model.modes import Assignment, GpuMode, Mode, Sale
from agent.modes.state import GpuSwitch, Phase, SwitchState
from agent.node.capacity import Figures, FiguresFailed, NodeFigures
from agent.node.conditions import CONDITION, MODE_LABEL, STATE_ANNOTATION, Reporter, ReportFailed, encode
from agent.node.taint import HoldFailed, SchedulingHold


@dataclass
class OwnNode:
    """The Node object in memory: the kubelet's figures, what was patched, what was told."""

    changes: Cell[object] = field(default_factory=lambda: Cell[object](None))
    status: dict[str, tuple[int, int]] = field(default_factory=dict)
    known: dict[str, str] | None = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    patches: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    conditions: list[tuple[str, ...]] = field(default_factory=list)
    events: list[tuple[str, bool]] = field(default_factory=list)
    refuse: str | None = None
    tainted: bool = False
    log: list[str] = field(default_factory=list)  # in which order things were written

    def held(self) -> bool:
        return self.tainted

    async def hold(self, *, held: bool) -> None:
        if self.refuse:
            raise HoldFailed(self.refuse)
        self.tainted = held
        self.log.append("hold" if held else "release")
        self.changes.publish(object())

    def figures(self, resources: frozenset[str]) -> Figures | None:
        return {name: self.status.get(name, (0, 0)) for name in resources}

    async def patch_resources(self, figures: Figures) -> None:
        if self.refuse:
            raise FiguresFailed(self.refuse)
        self.patches.append(dict(figures))
        self.log.append(f"patch {dict(figures)}")
        self.status |= figures
        self.changes.publish(object())

    def labels(self) -> Mapping[str, str] | None:
        return self.known

    def annotations(self) -> Mapping[str, str]:
        return self.notes

    async def write_metadata(self, labels: Mapping[str, str | None], annotations: Mapping[str, str]) -> None:
        if self.refuse:
            raise ReportFailed(self.refuse)
        assert self.known is not None
        self.known |= {key: value for key, value in labels.items() if value is not None}
        self.notes |= annotations
        self.changes.publish(object())

    async def write_condition(self, *condition: str) -> None:
        self.conditions.append(condition)

    def event(self, reason: str, message: str, warning: bool) -> None:
        self.events.append((reason, warning))


SELLING = Assignment({"GPU-a": GpuMode(Mode.PGPU)})
DRAINING = Assignment({"GPU-a": GpuMode(Mode.PGPU, Sale.CLOSED)})


def lists(assignment: Assignment) -> Figures:
    count = 8 if assignment.of("GPU-a").selling else 0
    return {"nvidia.com/gpu": (count, count)}


async def test_a_bigger_list_is_patched_at_once_and_again_when_a_tick_writes_the_old_figure() -> None:
    node, assignment = OwnNode(), Cell(SELLING)
    figures = NodeFigures(node, lists, assignment, _nobody, SchedulingHold(node))
    async with anyio.create_task_group() as group:
        group.start_soon(figures.run)
        with anyio.fail_after(5):
            while not node.patches:
                await anyio.sleep(0.005)
            node.status["nvidia.com/gpu"] = (0, 0)
            node.changes.publish(object())
            while len(node.patches) < 2:
                await anyio.sleep(0.005)
        group.cancel_scope.cancel()
    assert node.patches == [{"nvidia.com/gpu": (8, 8)}] * 2


async def test_a_shrink_holds_scheduling_until_the_figures_have_followed_the_list() -> None:
    node, assignment = OwnNode(status={"nvidia.com/gpu": (8, 8)}), Cell(SELLING)
    asked: list[set[str]] = [{"a", "b"}, {"b"}, set(), set()]
    kubelet = {"nvidia.com/gpu": 8}

    async def caught() -> set[str]:
        node.log.append("caught?")
        return asked.pop(0)

    async def taken_in() -> Mapping[str, int]:
        return kubelet

    figures = NodeFigures(node, lists, assignment, caught, SchedulingHold(node), taken_in=taken_in)
    async with anyio.create_task_group() as group:
        group.start_soon(figures.run)
        with anyio.fail_after(5):
            await figures.shrink(DRAINING)
            # All that is bound has been served; nothing is said before the list says it.
            assert (asked, node.tainted, node.patches) == ([], True, [])
            assignment.publish(DRAINING)
            figures.settled()
            await anyio.sleep(0.2)
            # The kubelet has not read the list: a tick that knows the old one must find nothing to write.
            assert (node.tainted, node.patches) == (True, [])
            kubelet["nvidia.com/gpu"] = 0
            while node.tainted:
                await anyio.sleep(0.005)
        group.cancel_scope.cancel()
    assert node.log == ["hold", *["caught?"] * 4, "patch {'nvidia.com/gpu': (0, 0)}", "release"]


async def test_a_slow_kubelet_gets_through_all_pods_and_a_stuck_one_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.node.capacity.SHRINK_SECONDS", 0.3)
    node = OwnNode(status={"nvidia.com/gpu": (8, 8)})
    began = anyio.current_time()
    left = {f"pod-{number}": 0.15 * number for number in range(1, 7)}

    async def caught() -> set[str]:
        return {name for name, after in left.items() if anyio.current_time() < began + after}

    figures = NodeFigures(node, lists, Cell(SELLING), caught, SchedulingHold(node))
    await figures.shrink(DRAINING)
    assert await caught() == set()
    left["stuck"] = 60
    with anyio.fail_after(5):
        await figures.shrink(DRAINING)


async def test_a_kubelet_that_answers_slowly_is_asked_less_often() -> None:
    asked: list[float] = []

    async def caught() -> set[str]:
        asked.append(anyio.current_time())
        await anyio.sleep(0.2)
        return {"a"} if len(asked) < 3 else set()

    node = OwnNode(status={"nvidia.com/gpu": (8, 8)})
    with anyio.fail_after(10):
        await NodeFigures(node, lists, Cell(SELLING), caught, SchedulingHold(node)).shrink(DRAINING)
    # Twice the time of an answer between two questions.
    assert min(after - before for before, after in pairwise(asked[:3])) >= 0.59


async def test_more_is_offered_after_scheduling_was_let_go() -> None:
    node, assignment = OwnNode(status={"nvidia.com/gpu": (8, 8), "x/core": (0, 0)}), Cell(SELLING)

    def both(now: Assignment) -> Figures:
        return {**lists(now), "x/core": (0, 0) if now.of("GPU-a").selling else (100, 100)}

    figures = NodeFigures(node, both, assignment, _nobody, SchedulingHold(node))
    async with anyio.create_task_group() as group:
        group.start_soon(figures.run)
        await figures.shrink(DRAINING)
        assignment.publish(DRAINING)
        figures.settled()
        with anyio.fail_after(5):
            while node.status != {"nvidia.com/gpu": (0, 0), "x/core": (100, 100)}:
                await anyio.sleep(0.005)
        group.cancel_scope.cancel()
    # A pod that is tried under the taint goes into its back-off.
    assert node.log == [
        "hold",
        "patch {'nvidia.com/gpu': (0, 0)}",
        "release",
        "patch {'x/core': (100, 100)}",
    ]


async def test_what_the_kubelet_does_not_know_of_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.node.capacity.ARRIVE_SECONDS", 0.1)
    node, assignment = OwnNode(status={"nvidia.com/gpu": (0, 0), "x/core": (8, 8)}), Cell(SELLING)
    kubelet = {"nvidia.com/gpu": 0, "x/core": 0}

    async def taken_in() -> Mapping[str, int]:
        return kubelet

    def both(now: Assignment) -> Figures:
        return {**lists(now), "x/core": (0, 0)}

    figures = NodeFigures(node, both, assignment, _nobody, SchedulingHold(node), taken_in=taken_in)
    async with anyio.create_task_group() as group:
        group.start_soon(figures.run)
        with anyio.fail_after(5):
            while not node.patches:
                await anyio.sleep(0.005)
            # It has dropped us, for one: pods would find nothing.
            assert node.status == {"nvidia.com/gpu": (0, 0), "x/core": (0, 0)}
            kubelet["nvidia.com/gpu"] = 8
            figures.wake()
            while node.status["nvidia.com/gpu"] != (8, 8):
                await anyio.sleep(0.005)
        group.cancel_scope.cancel()


async def test_lists_that_change_again_before_the_kubelet_has_them_hold_nothing_up() -> None:
    node, assignment = OwnNode(status={"nvidia.com/gpu": (8, 8)}), Cell(SELLING)
    kubelet = {"nvidia.com/gpu": 8}

    async def taken_in() -> Mapping[str, int]:
        return kubelet

    figures = NodeFigures(node, lists, assignment, _nobody, SchedulingHold(node), taken_in=taken_in)
    async with anyio.create_task_group() as group:
        group.start_soon(figures.run)
        with anyio.fail_after(5):
            await figures.shrink(DRAINING)
            assignment.publish(DRAINING)
            figures.settled()
            await anyio.sleep(0.1)
            # The kubelet never sees the list in between.
            assignment.publish(SELLING)
            figures.wake()
            while node.tainted:
                await anyio.sleep(0.005)
        group.cancel_scope.cancel()
    assert node.log == ["hold", "release"]


async def test_what_grows_needs_no_hold_and_a_taint_that_was_left_behind_goes() -> None:
    node, assignment = OwnNode(tainted=True), Cell(DRAINING)
    figures = NodeFigures(node, lists, assignment, _nobody, SchedulingHold(node))
    async with anyio.create_task_group() as group:
        group.start_soon(figures.run)
        with anyio.fail_after(5):
            while node.tainted:
                await anyio.sleep(0.005)
            await figures.shrink(SELLING)
        group.cancel_scope.cancel()
    assert node.log == ["release"]


async def test_without_the_right_to_taint_the_figures_go_ahead_of_the_list() -> None:
    node, assignment = OwnNode(status={"nvidia.com/gpu": (8, 8)}), Cell(SELLING)

    class Untainted(SchedulingHold):
        async def take(self) -> bool:
            return False

    figures = NodeFigures(node, lists, assignment, _nobody, Untainted(node))
    await figures.shrink(DRAINING)
    assert node.status == {"nvidia.com/gpu": (0, 0)}
    # Until the list itself has shrunk, the smaller figure is the one that is defended.
    node.status["nvidia.com/gpu"] = (8, 8)
    await figures._patch_differences()
    assert node.status == {"nvidia.com/gpu": (0, 0)}


async def test_a_shrink_without_the_right_to_patch_does_not_hold_anything_up() -> None:
    node = OwnNode(status={"nvidia.com/gpu": (8, 8)}, refuse="nodes/status is forbidden")
    figures = NodeFigures(node, lists, Cell(SELLING), _nobody, SchedulingHold(node))
    with anyio.fail_after(2):
        await figures.shrink(DRAINING)
    assert (figures.failures, figures.hold.failures) == (1, 1)


async def test_a_stopping_agent_says_that_nothing_is_sold_here() -> None:
    node = OwnNode(status={"nvidia.com/gpu": (8, 8)})
    figures = NodeFigures(node, lists, Cell(SELLING), _nobody, SchedulingHold(node))
    await figures.close()
    assert node.log == ["hold", "patch {'nvidia.com/gpu': (8, 0)}", "release"]


STATE = SwitchState(
    Phase.SWITCHING,
    "mps",
    "waiting for 1 pod(s) to end: default/train",
    (
        GpuSwitch(0, "GPU-a", GpuMode(Mode.PGPU, Sale.CLOSED), GpuMode(Mode.MPS), ("default/train",)),
        GpuSwitch(1, "GPU-b", GpuMode(Mode.MPS), GpuMode(Mode.MPS)),
    ),
    "pgpu",
)


def test_the_state_annotation_is_short_and_stable() -> None:
    assert json.loads(encode(STATE)) == {
        "state": "switching",
        "desired": "mps",
        "message": "waiting for 1 pod(s) to end: default/train",
        "gpus": {
            "0": {"active": "pgpu", "desired": "mps", "waitingFor": ["default/train"]},
            "1": {"active": "mps"},
        },
    }
    sixteen = replace(STATE, gpus=tuple(replace(STATE.gpus[0], index=number) for number in range(16)))
    assert len(encode(sixteen)) < 2048


async def test_the_state_is_told_by_label_annotation_condition_and_event() -> None:
    node, state = OwnNode(), Cell(STATE)
    extra: Cell[Mapping[str, str]] = Cell({"cuda-major-version": "13"})
    async with anyio.create_task_group() as group:
        group.start_soon(Reporter(node, state, extra).run)
        with anyio.fail_after(5):
            while not node.conditions:
                await anyio.sleep(0.005)
            assert node.known == {MODE_LABEL: "switching", "cuda-major-version": "13"}
            assert node.notes[STATE_ANNOTATION] == encode(STATE)
            assert node.conditions[0][:4] == (CONDITION, "False", "Switching", STATE.message)
            state.publish(SwitchState(Phase.APPLIED, "mps", "2 GPU(s) mps", (), "mps"))
            while len(node.conditions) < 2:
                await anyio.sleep(0.005)
        group.cancel_scope.cancel()
    assert (node.known or {})[MODE_LABEL] == "mps"
    assert node.conditions[1][1:3] == ("True", "Applied")
    assert node.events == [("ModeSwitching", False), ("ModeApplied", False)]


async def test_an_api_server_that_refuses_is_tried_again_without_a_storm() -> None:
    node, state = OwnNode(refuse="forbidden"), Cell(STATE)
    async with anyio.create_task_group() as group:
        group.start_soon(Reporter(node, state, Cell[Mapping[str, str]]({})).run)
        for number in range(200):
            state.publish(replace(STATE, message=f"waiting, look {number}"))
            await anyio.sleep(0.001)
        group.cancel_scope.cancel()
    assert node.conditions == []
    assert len(node.events) <= 2


async def _nobody() -> frozenset[str]:
    return frozenset()


async def test_annotations_of_other_rooms_are_written_once_each() -> None:
    node, state = OwnNode(), Cell(SwitchState(Phase.APPLIED, "pgpu", ""))
    notes: Cell[Mapping[str, str]] = Cell({"x/inventory": "1"})
    async with anyio.create_task_group() as group:
        group.start_soon(Reporter(node, state, Cell[Mapping[str, str]]({}), notes).run)
        with anyio.fail_after(5):
            while node.notes.get("x/inventory") != "1":
                await anyio.sleep(0.01)
            notes.publish({"x/inventory": "2"})
            while node.notes["x/inventory"] != "2":
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    assert STATE_ANNOTATION in node.notes


async def test_a_node_that_is_made_anew_gets_its_condition_back() -> None:
    node, state = OwnNode(), Cell(SwitchState(Phase.APPLIED, "pgpu", "", (), "pgpu"))
    async with anyio.create_task_group() as group:
        group.start_soon(Reporter(node, state, Cell[Mapping[str, str]]({})).run)
        with anyio.fail_after(10):
            while not node.conditions:
                await anyio.sleep(0.005)
            node.known, node.notes = {}, {}
            node.changes.publish(object())
            while len(node.conditions) < 2:
                await anyio.sleep(0.005)
        group.cancel_scope.cancel()
    assert node.known == {MODE_LABEL: "pgpu"}
    assert node.conditions[1][:3] == (CONDITION, "True", "Applied")
