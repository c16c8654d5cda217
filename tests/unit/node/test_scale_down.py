"""The annotation that keeps cluster-autoscaler away: set while units are held that it does not know."""

import anyio
import pytest

from agent.kit.tasks import Cell
from agent.model.holding import Holding, Record
from agent.model.pod import VGPU
from agent.modes.planner import SwitchState
from agent.node.conditions import (
    SCALE_DOWN,
    SCALE_DOWN_MARK,
    NodeStateWriter,
    holds_unseen,
    scale_down_changes,
)
from tests.unit.node.test_telling import STATE, OwnNode

NOTHING = Record()
WHOLE = Record((Holding("ns", "train", "main", "nvidia.com/gpu", ("GPU-00000001",)),))
SLICE = Record((Holding("ns", "chat", "main", "nvidia.com/gpu.shared", ("GPU-00000001::r0",)),))
SHARE = Record((Holding("ns", "chat", "main", VGPU.core, ("GPU-00000001::c0",)),))
OTHERS = Record((Holding("ns", "chat", "main", "vendor.example/nic", ("nic::0::x::y",)),))
SET = {SCALE_DOWN: "true", SCALE_DOWN_MARK: "true"}
GONE = {SCALE_DOWN: None, SCALE_DOWN_MARK: None}


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
        ({SCALE_DOWN_MARK: "true"}, True, SET),  # taken away by somebody, or half written
        ({SCALE_DOWN: "true"}, True, {}),
        ({SCALE_DOWN: "true"}, False, {}),
        ({SCALE_DOWN: "false"}, True, {}),
    ],
)
def test_a_persons_own_is_left_alone(
    present: dict[str, str], held: bool | None, expected: dict[str, str | None]
) -> None:
    assert scale_down_changes(present, held) == expected


async def test_it_comes_and_goes_with_the_holders() -> None:
    node, record = OwnNode(), Cell[Record | None](None)
    writer = NodeStateWriter(
        node,
        Cell[SwitchState](STATE),
        changes=lambda present: scale_down_changes(present, holds_unseen(record.value)),
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
