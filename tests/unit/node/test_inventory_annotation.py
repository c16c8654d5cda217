"""The inventory of a node's GPUs for schedulers, and when it is written."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from agent.extender.free_capacity import free_capacity
from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.tasks import Cell, Supervisor
from agent.model.gpu import Topology
from agent.model.holding import Growth, Place
from agent.model.modes import Assignment, GpuMode, Mode, Offering
from agent.model.node_inventory import INVENTORY, decode, encode
from agent.modes.resources import ResourceSet
from agent.node import annotations as inventory_annotation
from agent.node.annotations import ahead, follow_inventory, inventory_of
from tests.unit.modes.nodes import gpu, snapshot_of
from tests.unit.node.test_telling import OwnNode


def modes(*given: GpuMode) -> Assignment:
    return Assignment({f"GPU-{index:08x}": mode for index, mode in enumerate(given)})


def test_mode_capacity_draining_and_slices_are_told() -> None:
    assignment = modes(GpuMode(Mode.VGPU, Offering.CLOSED), GpuMode(Mode.MPS), GpuMode(Mode.PGPU, replicas=4))
    found = inventory_of(snapshot_of(gpu(0), gpu(1), gpu(2)), assignment)
    assert [(one.mode, one.offered, one.replicas, one.clients) for one in found.gpus] == [
        (Mode.VGPU, False, 1, 0),
        (Mode.MPS, True, 1, 48),
        (Mode.PGPU, True, 4, 0),
    ]
    assert [one.blocks for one in found.gpus] == [561, 139, 0]


def test_a_lower_ceiling_of_clients_counts() -> None:
    found = inventory_of(snapshot_of(gpu(0)), modes(GpuMode(Mode.MPS)), most_clients=5)
    assert found.gpus[0].clients == 5


def test_a_lost_gpu_does_not_hide_the_one_that_has_its_index_now() -> None:
    snapshot = snapshot_of(gpu(0), replace(gpu(1), index=0))
    lost = GpuState(snapshot.gpus[0].gpu, blocked="it is lost")
    found = inventory_of(replace(snapshot, gpus=(lost, snapshot.gpus[1])), modes())
    assert [one.uuid for one in found.gpus] == ["GPU-00000001"]


def test_links_are_told_by_pair() -> None:
    snapshot = snapshot_of(gpu(0), gpu(1), gpu(2))
    names = [state.uuid for state in snapshot.gpus]
    topology = Topology.of(names, {(names[0], names[1]): 50, (names[1], names[2]): 110})
    assert inventory_of(replace(snapshot, topology=topology), modes()).links == (50, 0, 110)


async def test_it_is_published_on_change_only() -> None:
    inventory, assignment = Cell(Snapshot()), Cell(modes(GpuMode(Mode.VGPU)))
    notes: Cell[Mapping[str, str]] = Cell({})
    grown: Cell[Mapping[Place, Growth]] = Cell({})
    async with anyio.create_task_group() as group:
        group.start_soon(follow_inventory, inventory, assignment, None, notes, grown)
        await anyio.wait_all_tasks_blocked()
        assert notes.value == {}
        inventory.publish(snapshot_of(gpu(0)))
        await anyio.wait_all_tasks_blocked()
        assert decode(notes.value[INVENTORY]).gpus[0].mode is Mode.VGPU
        inventory.publish(replace(snapshot_of(gpu(0)), generation=9))
        await anyio.wait_all_tasks_blocked()
        assert notes.version == 1
        assignment.publish(modes(GpuMode(Mode.MPS)))
        await anyio.wait_all_tasks_blocked()
        assert decode(notes.value[INVENTORY]).gpus[0].mode is Mode.MPS
        group.cancel_scope.cancel()


class Node(OwnNode):
    """One whose API server may not answer."""

    mute = False

    async def write_metadata(
        self, labels: Mapping[str, str | None], annotations: Mapping[str, str | None]
    ) -> None:
        if self.mute:
            await anyio.sleep_forever()
        await super().write_metadata(labels, annotations)


async def test_it_is_written_ahead_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory_annotation, "AHEAD_SECONDS", 0.05)
    node = Node()
    write = ahead(node, Cell(snapshot_of(gpu(0))), Cell(modes(GpuMode(Mode.VGPU))), None, Cell({}))
    for node.refuse, node.mute in (("503", False), (None, True)):
        with anyio.fail_after(5):
            await write()  # units are offered all the same
        assert node.notes == {}
    node.mute = False
    await write()
    assert decode(node.notes[INVENTORY]).gpus[0].mode is Mode.VGPU
    node.notes[INVENTORY] = "what stood there before a restart"
    await write()
    assert node.notes[INVENTORY] == "what stood there before a restart"


async def test_no_resource_appears_before_it_is_written() -> None:
    seen: list[str] = []

    class Plugin:
        resource = "tencent.com/vcuda-core"

        def refresh(self) -> None:
            seen.append("refreshed")

        async def run(self) -> None:
            await anyio.sleep_forever()

    class Served:
        def __init__(self, plugin: Any) -> None:
            self.plugin = plugin

        async def run(self) -> None:
            seen.append("registered")
            await anyio.sleep_forever()

    async def written() -> None:
        await anyio.lowlevel.checkpoint()
        seen.append("written")

    made = [Plugin()]
    plugins: Any = {Mode.VGPU: lambda: made}
    endpoint_of: Any = Served
    async with anyio.create_task_group() as group:
        resources = ResourceSet(plugins, [], endpoint_of, Supervisor(), group, before_first=written)
        resources.enable(Mode.VGPU)
        resources.refresh()
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert seen == ["refreshed", "written", "registered"]


def test_schedulers_see_no_units_that_containers_have_grown_by() -> None:
    snapshot = snapshot_of(gpu(0), gpu(1))
    grown = {each.uuid: Growth(3 * 256 << 20, 20) for each in snapshot.gpus[:1]}
    before = inventory_of(snapshot, modes(GpuMode(Mode.VGPU), GpuMode(Mode.VGPU)))
    after = inventory_of(snapshot, modes(GpuMode(Mode.VGPU), GpuMode(Mode.VGPU)), grown=grown)
    assert [one.blocks - other.blocks for one, other in zip(before.gpus, after.gpus, strict=True)] == [3, 0]
    assert [free.cores for free in free_capacity(decode(encode(after)), ()).gpus] == [80, 100]
    assert inventory_of(snapshot, modes(), grown=grown) == inventory_of(snapshot, modes())
