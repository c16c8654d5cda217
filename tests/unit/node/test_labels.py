"""GPU labels beside GPU Feature Discovery, which may come to a node and leave it at any time."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio

from agent.inventory.snapshot import Snapshot
from agent.kit.cell import Cell
from agent.model.modes import Assignment
from agent.modes.switch_state import Phase, SwitchState
from agent.node.conditions import MODE_LABEL, NodeStateWriter
from agent.node.labels import GFD_MARK, labels_of
from tests.unit.modes.nodes import gpu, snapshot_of
from tests.unit.node.test_telling import OwnNode
from tests.virtual_time import in_virtual_time

PRODUCT = "nvidia.com/gpu.product"
GFD = {GFD_MARK: "1790000000", PRODUCT: "NVIDIA-H200-SHARED", "nvidia.com/gpu.count": "1"}
APPLIED = SwitchState(Phase.APPLIED, "pgpu", "2 GPU(s) pgpu", (), "pgpu")


@dataclass
class Node(OwnNode):
    """Keeps what was written."""

    written: list[Mapping[str, str | None]] = field(default_factory=list)

    async def write_metadata(
        self, labels: Mapping[str, str | None], annotations: Mapping[str, str | None]
    ) -> None:
        await super().write_metadata(labels, annotations)
        self.written.append(labels)

    def put(self, labels: Mapping[str, str]) -> None:
        """Somebody else writes labels."""
        self.known = {**(self.known or {}), **labels}
        self.changes.publish(object())


def writer(node: Node, state: Cell[SwitchState], snapshot: Cell[Snapshot]) -> NodeStateWriter:
    return NodeStateWriter(
        node,
        state,
        labels=lambda present: labels_of(snapshot.value, Assignment(), present),
        wake_on=(snapshot,),
    )


@in_virtual_time
async def test_labels_of_gfd_are_reconsidered_when_they_appear() -> None:
    node, state, snapshot = Node(), Cell(APPLIED), Cell(snapshot_of(gpu(0), gpu(1)))
    async with anyio.create_task_group() as group:
        group.start_soon(writer(node, state, snapshot).run)
        await anyio.sleep(5)
        assert node.known is not None
        assert (node.known[PRODUCT], node.known["nvidia.com/gpu.count"]) == ("NVIDIA-H200", "2")
        before = len(node.written)
        # In the second in which the writer leaves the API server alone, with something to write at its end.
        state.publish(SwitchState(Phase.SWITCHING, "vgpu", "setting up", (), "pgpu"))
        await anyio.sleep(0.5)
        node.put(GFD)
        state.publish(SwitchState(Phase.APPLIED, "vgpu", "2 GPU(s) vgpu", (), "vgpu"))
        snapshot.publish(snapshot_of(gpu(0), gpu(1), gpu(2)))  # a third GPU: the count would differ, too
        await anyio.sleep(600)
        assert {key: node.known[key] for key in GFD} == GFD
        assert node.known[MODE_LABEL] == "vgpu"
        assert all(set(labels) <= {MODE_LABEL} for labels in node.written[before:])
        # GPU Feature Discovery leaves and takes its labels along.
        node.known = {key: value for key, value in node.known.items() if key not in GFD}
        node.changes.publish(object())
        await anyio.sleep(5)
        assert (node.known[PRODUCT], node.known["nvidia.com/gpu.count"]) == ("NVIDIA-H200", "3")
        group.cancel_scope.cancel()


@in_virtual_time
async def test_labels_come_with_a_driver_that_comes_late_and_stay_when_it_goes() -> None:
    node, state, snapshot = Node(), Cell(APPLIED), Cell(Snapshot())
    async with anyio.create_task_group() as group:
        group.start_soon(writer(node, state, snapshot).run)
        await anyio.sleep(5)
        assert node.known == {MODE_LABEL: "pgpu"}
        snapshot.publish(snapshot_of(gpu(0)))
        await anyio.sleep(5)
        assert (node.known or {})[PRODUCT] == "NVIDIA-H200"
        snapshot.publish(Snapshot(problem="the driver is being replaced"))
        await anyio.sleep(5)
        assert (node.known or {})[PRODUCT] == "NVIDIA-H200"
        group.cancel_scope.cancel()
