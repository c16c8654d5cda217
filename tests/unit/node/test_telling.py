"""The mode on the Node object: label, annotation, condition, events."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import anyio
import pytest

from agent.cluster import node as cluster_node
from agent.cluster.api import ApiError
from agent.cluster.node import Amounts, NodeCondition
from agent.kit.tasks import Cell
from agent.model.modes import GpuMode, Mode, Offering
from agent.modes.planner import GpuSwitch, Phase, SwitchState
from agent.node.conditions import CONDITION, MODE_LABEL, STATE_ANNOTATION, NodeStateWriter, encode


@dataclass
class OwnNode(cluster_node.OwnNode):
    """The Node object in memory, as far as it is reported on."""

    published: Cell[object] = field(default_factory=lambda: Cell[object](None))
    known: dict[str, str] | None = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    conditions: list[tuple[str, ...]] = field(default_factory=list)
    said: list[tuple[str, bool]] = field(default_factory=list)
    refuse: str | None = None
    bare: bool = False  # it has lost its conditions

    @property
    def changes(self) -> Cell[object]:
        return self.published

    def tainted(self, key: str) -> bool | None:
        return False

    async def write_taint(self, key: str, effect: str, *, present: bool) -> None:
        raise ApiError("not a test of the taint")

    def amounts(self, resources: frozenset[str]) -> Amounts | None:
        return None

    async def write_amounts(self, amounts: Amounts) -> None:
        raise ApiError("not a test of the status")

    async def seen(self) -> None: ...

    def labels(self) -> Mapping[str, str] | None:
        return self.known

    def annotations(self) -> Mapping[str, str]:
        return self.notes

    async def write_metadata(
        self, labels: Mapping[str, str | None], annotations: Mapping[str, str | None]
    ) -> None:
        if self.refuse:
            raise ApiError(self.refuse)
        assert self.known is not None
        known = self.known | dict(labels)
        self.known = {key: value for key, value in known.items() if value is not None}
        notes = self.notes | dict(annotations)
        self.notes = {key: value for key, value in notes.items() if value is not None}
        self.changes.publish(object())

    def condition(self, kind: str) -> NodeCondition | None:
        return NodeCondition(*self.conditions[-1]) if self.conditions and not self.bare else None

    async def write_condition(self, *condition: str) -> None:
        if self.refuse:
            raise ApiError(self.refuse)
        self.conditions.append(condition)
        self.bare = False

    def event(self, reason: str, message: str, warning: bool) -> None:
        self.said.append((reason, warning))


STATE = SwitchState(
    Phase.SWITCHING,
    "mps",
    "waiting for 1 pod(s) to end: default/train",
    (
        GpuSwitch(0, "GPU-a", GpuMode(Mode.PGPU, Offering.CLOSED), GpuMode(Mode.MPS), ("default/train",)),
        GpuSwitch(1, "GPU-b", GpuMode(Mode.MPS), GpuMode(Mode.MPS)),
    ),
    "pgpu",
)


def test_the_state_annotation_is_short_and_stable() -> None:
    assert json.loads(encode(STATE)) == {
        "state": "switching",
        "desired": "mps",
        "message": "waiting for 1 pod(s) to end",
        "gpus": {
            "0": {"active": "pgpu", "desired": "mps", "waitingFor": 1},
            "1": {"active": "mps"},
        },
    }
    sixteen = replace(STATE, gpus=tuple(replace(STATE.gpus[0], index=number) for number in range(16)))
    assert len(encode(sixteen)) < 2048


@pytest.mark.parametrize(
    ("sentence", "shown"),
    [
        (
            "waiting for 7 pod(s) to end: a/b-0, c/d.e and 5 more; 3 x held",
            "waiting for 7 pod(s) to end; 3 x held",
        ),
        (
            "whenBusy is refuse and GPUs are in use by a/b, c/d; end these pods or set whenBusy: drain",
            "whenBusy is refuse and GPUs are in use by 2 pods; end these pods or set whenBusy: drain",
        ),
        (
            "a/b holds it as 3 of nvidia.com/gpu, which is no",
            "1 pod holds it as 3 of nvidia.com/gpu, which is no",
        ),
        ("label gpu-node-agent.io/mode: /run/x is no folder", None),
    ],
)
def test_what_everybody_may_read_of_a_node_counts_pods_and_names_none(
    sentence: str, shown: str | None
) -> None:
    first = replace(STATE.gpus[0], problem=sentence, waiting_for=("a/b", "c/d", "e/f"))
    found = json.loads(encode(replace(STATE, message=sentence, gpus=(first,))))
    assert found["message"] == (shown or sentence)
    assert found["gpus"]["0"]["reason"] == (shown or sentence)[:120]
    assert found["gpus"]["0"]["waitingFor"] == 3


def test_a_name_is_taken_out_before_a_sentence_is_cut() -> None:
    """The rest of a name that was cut would look like none."""
    for start in range(60):
        text = "w" * start + " waiting for 9 pod(s): " + ", ".join(["secret/" + "x" * 59] * 9)
        assert "sec" not in encode(replace(STATE, message=text, gpus=(replace(STATE.gpus[0], problem=text),)))


async def test_the_state_is_told_by_label_annotation_condition_and_event() -> None:
    node, state = OwnNode(), Cell(STATE)
    async with anyio.create_task_group() as group:
        group.start_soon(NodeStateWriter(node, state, labels=lambda *_: {"cuda-major-version": "13"}).run)
        with anyio.fail_after(5):
            while not node.conditions:
                await anyio.sleep(0.005)
            assert node.known == {MODE_LABEL: "switching", "cuda-major-version": "13"}
            assert node.notes[STATE_ANNOTATION] == encode(STATE)
            assert node.conditions[0][:4] == (CONDITION, "False", "Switching", "waiting for 1 pod(s) to end")
            state.publish(SwitchState(Phase.APPLIED, "mps", "2 GPU(s) mps", (), "mps"))
            while len(node.conditions) < 2:
                await anyio.sleep(0.005)
        group.cancel_scope.cancel()
    assert (node.known or {})[MODE_LABEL] == "mps"
    assert node.conditions[1][1:3] == ("True", "Applied")
    assert node.said == [("ModeSwitching", False), ("ModeApplied", False)]


async def test_an_api_server_that_refuses_is_tried_again_without_a_storm() -> None:
    node, state = OwnNode(refuse="forbidden"), Cell(STATE)
    async with anyio.create_task_group() as group:
        group.start_soon(NodeStateWriter(node, state).run)
        for number in range(200):
            state.publish(replace(STATE, message=f"waiting, look {number}"))
            await anyio.sleep(0.001)
        group.cancel_scope.cancel()
    assert node.conditions == []
    assert len(node.said) <= 2


async def test_annotations_of_other_rooms_are_written_once_each() -> None:
    node, state = OwnNode(), Cell(SwitchState(Phase.APPLIED, "pgpu", ""))
    notes: Cell[Mapping[str, str]] = Cell({"x/inventory": "1"})
    async with anyio.create_task_group() as group:
        group.start_soon(NodeStateWriter(node, state, annotations=notes).run)
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
        group.start_soon(NodeStateWriter(node, state).run)
        with anyio.fail_after(10):
            while not node.conditions:
                await anyio.sleep(0.005)
            node.known, node.notes, node.bare = {}, {}, True
            node.changes.publish(object())
            while len(node.conditions) < 2:
                await anyio.sleep(0.005)
        group.cancel_scope.cancel()
    assert node.known == {MODE_LABEL: "pgpu"}
    assert node.conditions[1][:3] == (CONDITION, "True", "Applied")
