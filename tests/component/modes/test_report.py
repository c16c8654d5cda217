"""The report on the Node object when the API server says no for a while."""

from collections.abc import Mapping

import anyio

from agent.kit.tasks import Cell
from agent.modes.planner import Phase, SwitchState
from agent.node.conditions import CONDITION, LONGEST_RETRY_SECONDS, MODE_LABEL, NodeStateWriter
from tests.unit.node.test_telling import OwnNode
from tests.virtual_time import in_virtual_time


@in_virtual_time
async def test_report_is_tried_again() -> None:
    node = OwnNode()
    state = Cell(SwitchState(Phase.SWITCHING, "pgpu", "setting up", (), "none"))
    writer = NodeStateWriter(node, state)
    async with anyio.create_task_group() as group:
        group.start_soon(writer.run)
        await anyio.sleep(5)
        node.refuse = "503 Service Unavailable"
        state.publish(SwitchState(Phase.APPLIED, "pgpu", "8 GPU(s) pgpu", (), "pgpu"))
        await anyio.sleep(600)
        assert (node.known, writer.problem) == ({MODE_LABEL: "switching"}, node.refuse)
        assert 8 <= writer.failures <= 20  # not every second, for ten minutes
        node.refuse = None  # and nothing else happens
        await anyio.sleep(LONGEST_RETRY_SECONDS)
        assert node.known == {MODE_LABEL: "pgpu"}
        assert node.conditions[-1][1:3] == ("True", "Applied")
        patches = writer.patches
        await anyio.sleep(3600)
        assert writer.patches == patches
        group.cancel_scope.cancel()


class CountingNode(OwnNode):
    """Counts comparisons, and fails on a loop without a pause."""

    looks = 0

    def labels(self) -> Mapping[str, str] | None:
        self.looks += 1
        assert self.looks < 1000, "compared again and again without a pause"
        return super().labels()


@in_virtual_time
async def test_a_refused_report_that_is_not_needed_any_more_spins_nowhere() -> None:
    node = CountingNode()
    before = SwitchState(Phase.SWITCHING, "pgpu", "setting up", (), "none")
    state = Cell(before)
    writer = NodeStateWriter(node, state)
    async with anyio.create_task_group() as group:
        group.start_soon(writer.run)
        await anyio.sleep(5)
        node.refuse = "503 Service Unavailable"
        state.publish(SwitchState(Phase.APPLIED, "pgpu", "8 GPU(s) pgpu", (), "pgpu"))
        await anyio.sleep(1.5)
        assert writer.problem == node.refuse
        state.publish(before)  # what stands there is right again
        await anyio.sleep(60)
        assert not writer.problem
        assert node.looks < 20
        node.known, node.refuse = None, None  # and a node that is not known is waited for
        state.publish(SwitchState(Phase.APPLIED, "pgpu", "8 GPU(s) pgpu", (), "pgpu"))
        await anyio.sleep(60)
        assert node.looks < 20
        group.cancel_scope.cancel()


@in_virtual_time
async def test_an_older_write_that_is_carried_out_late_does_not_stay() -> None:
    node = OwnNode()
    state = Cell(SwitchState(Phase.APPLIED, "pgpu", "8 GPU(s) pgpu", (), "pgpu"))
    async with anyio.create_task_group() as group:
        group.start_soon(NodeStateWriter(node, state).run)
        await anyio.sleep(5)
        since = node.conditions[-1][4]
        # Of a time before: the answer to this write was never seen.
        node.conditions.append((CONDITION, "False", "Switching", "setting up", "2026-01-01T00:00:00Z"))
        node.changes.publish(object())
        await anyio.sleep(5)
        assert node.conditions[-1][1:4] == ("True", "Applied", "8 GPU(s) pgpu")
        count = len(node.conditions)
        # A next agent finds all as it should be, and the condition keeps the time of its last change.
        group.start_soon(NodeStateWriter(node, state).run)
        await anyio.sleep(5)
        assert len(node.conditions) == count
        state.publish(SwitchState(Phase.APPLIED, "pgpu", "7 GPU(s) pgpu", (), "pgpu"))
        await anyio.sleep(5)
        assert node.conditions[-1][3:] == ("7 GPU(s) pgpu", node.conditions[count - 1][4])
        assert since <= node.conditions[-1][4]
        group.cancel_scope.cancel()
