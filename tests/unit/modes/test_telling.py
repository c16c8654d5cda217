"""What the node is told: figures ahead of the kubelet, and the state."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import anyio

from agent.kit.cell import Cell
from agent.model.modes import Assignment, GpuMode, Mode
from agent.modes.figures import Figures, FiguresFailed, NodeFigures
from agent.modes.report import CONDITION, MODE_LABEL, STATE_ANNOTATION, Reporter, ReportFailed, encode
from agent.modes.state import GpuSwitch, Phase, SwitchState


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

    def figures(self, resources: frozenset[str]) -> Figures | None:
        return {name: self.status.get(name, (0, 0)) for name in resources}

    async def patch_resources(self, figures: Figures) -> None:
        if self.refuse:
            raise FiguresFailed(self.refuse)
        self.patches.append(dict(figures))
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
DRAINING = Assignment({"GPU-a": GpuMode(Mode.PGPU, selling=False)})


def lists(assignment: Assignment) -> Figures:
    count = 8 if assignment.of("GPU-a").selling else 0
    return {"nvidia.com/gpu": (count, count)}


async def test_a_bigger_list_is_patched_at_once_and_again_when_a_tick_writes_the_old_figure() -> None:
    node, assignment = OwnNode(), Cell(SELLING)
    figures = NodeFigures(node, lists, assignment, _nobody)
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


async def test_a_shrink_is_patched_first_and_waits_for_pods_that_are_caught_between() -> None:
    node, assignment = OwnNode(status={"nvidia.com/gpu": (8, 8)}), Cell(SELLING)
    asked: list[bool] = [True, True, False]

    async def caught() -> bool:
        return asked.pop(0)

    figures = NodeFigures(node, lists, assignment, caught)
    await figures.shrink(DRAINING)
    assert node.status == {"nvidia.com/gpu": (0, 0)}
    assert asked == []
    # Until the list itself has shrunk, the smaller figure is the one that is defended.
    node.status["nvidia.com/gpu"] = (8, 8)
    await figures._patch_differences()
    assert node.status == {"nvidia.com/gpu": (0, 0)}


async def test_while_pods_wait_for_what_is_going_a_shrink_waits_for_the_kubelets_tick() -> None:
    node, assignment = OwnNode(status={"nvidia.com/gpu": (8, 8)}), Cell(SELLING)
    asked: list[frozenset[str]] = []

    async def demand(resources: frozenset[str]) -> bool:
        asked.append(resources)
        return True

    figures = NodeFigures(node, lists, assignment, _nobody, demand)
    done = anyio.Event()

    async def shrink() -> None:
        await figures.shrink(DRAINING)
        done.set()

    async with anyio.create_task_group() as group:
        group.start_soon(shrink)
        await anyio.sleep(0.6)
        assert not done.is_set()
        # Until then everything is offered as before; a capacity that is wrong makes the tick be seen.
        assert node.status["nvidia.com/gpu"] == (9, 8)
        await figures._patch_differences()
        assert node.status["nvidia.com/gpu"] == (9, 8)
        node.status["nvidia.com/gpu"] = (8, 8)
        node.changes.publish(object())
        with anyio.fail_after(5):
            await done.wait()
    assert asked == [{"nvidia.com/gpu"}]
    assert node.status == {"nvidia.com/gpu": (0, 0)}


async def test_a_shrink_without_the_right_to_patch_does_not_hold_anything_up() -> None:
    node = OwnNode(status={"nvidia.com/gpu": (8, 8)}, refuse="nodes/status is forbidden")
    figures = NodeFigures(node, lists, Cell(SELLING), _nobody)
    with anyio.fail_after(2):
        await figures.shrink(DRAINING)
    assert figures.failures == 1


async def test_a_stopping_agent_says_that_nothing_is_sold_here() -> None:
    node = OwnNode(status={"nvidia.com/gpu": (8, 8)})
    figures = NodeFigures(node, lists, Cell(SELLING), _nobody)
    await figures.close()
    assert node.status == {"nvidia.com/gpu": (8, 0)}


STATE = SwitchState(
    Phase.SWITCHING,
    "mps",
    "waiting for 1 pod(s) to end: default/train",
    (
        GpuSwitch(0, "GPU-a", GpuMode(Mode.PGPU, selling=False), GpuMode(Mode.MPS), ("default/train",)),
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


async def _nobody() -> bool:
    return False


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
