"""The annotation that keeps cluster-autoscaler away: set while units are held that it does not know."""

import anyio
import pytest

from agent.kit.cell import Cell
from agent.model.demand import VGPU
from agent.model.holding import Holding, Record
from agent.modes.planner import SwitchState
from agent.node.conditions import NodeStateWriter
from agent.node.scale_down import ANNOTATION, MARK, holds_unseen, wanted
from tests.unit.node.test_telling import STATE, OwnNode

NOTHING = Record()
WHOLE = Record((Holding("ns", "train", "main", "nvidia.com/gpu", ("GPU-00000001",)),))
SLICE = Record((Holding("ns", "chat", "main", "nvidia.com/gpu.shared", ("GPU-00000001::r0",)),))
SHARE = Record((Holding("ns", "chat", "main", VGPU.core, ("GPU-00000001::c0",)),))
OTHERS = Record((Holding("ns", "chat", "main", "vendor.example/nic", ("nic::0::x::y",)),))
SET = {ANNOTATION: "true", MARK: "true"}
GONE = {ANNOTATION: None, MARK: None}


@pytest.mark.parametrize(
    ("record", "held"),
    [(None, None), (NOTHING, False), (WHOLE, False), (SLICE, True), (SHARE, True), (OTHERS, False)],
    ids=["unknown", "nothing", "whole", "slice", "share", "another's"],
)
def test_units_that_it_does_not_know(record: Record | None, held: bool | None) -> None:
    assert holds_unseen(record) is held


@pytest.mark.parametrize(
    ("present", "held", "expected"),
    [
        ({}, True, SET),
        ({}, False, {}),
        ({}, None, {}),
        (SET, True, SET),
        (SET, False, GONE),
        (SET, None, {}),
        ({MARK: "true"}, True, SET),  # taken away by somebody, or half written
        ({ANNOTATION: "true"}, True, {}),
        ({ANNOTATION: "true"}, False, {}),
        ({ANNOTATION: "false"}, True, {}),
    ],
)
def test_a_persons_own_is_left_alone(
    present: dict[str, str], held: bool | None, expected: dict[str, str | None]
) -> None:
    assert wanted(present, held) == expected


async def test_it_comes_and_goes_with_the_holders() -> None:
    node, record = OwnNode(), Cell[Record | None](None)
    writer = NodeStateWriter(
        node,
        Cell[SwitchState](STATE),
        changes=lambda present: wanted(present, holds_unseen(record.value)),
        wake_on=(record,),
    )
    async with anyio.create_task_group() as group:
        group.start_soon(writer.run)
        for now, there in ((SHARE, True), (None, True), (WHOLE, False), (SLICE, True), (NOTHING, False)):
            record.publish(now)
            with anyio.fail_after(10):
                while (SET.items() <= node.notes.items()) is not there:
                    await anyio.sleep(0.01)
        assert not node.notes.keys() & SET.keys()
        group.cancel_scope.cancel()
