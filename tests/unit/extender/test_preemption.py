"""Judging victims of many nodes: leases and bindings run in between."""

import anyio
import anyio.lowlevel
import pytest

from agent.extender.eviction import victims_needed, would_have_to_go
from agent.extender.fleet import BoundPod, Fleet, LedgerNode
from agent.extender.free_capacity import PodClaim
from agent.extender.pod_demand import WHOLE_GPU, PodDemand, pod_demand
from agent.model.modes import Mode
from agent.model.node_inventory import GpuEntry, NodeInventory
from agent.model.pod import VGPU, Container
from tests.pods import a_pod

NODES, GPUS, PER_GPU = 12, 8, 5


def asks(cores: int, blocks: int) -> PodDemand:
    return pod_demand(a_pod("ns", "p", (Container("main", {VGPU.core: cores, VGPU.memory: blocks}),)))


async def test_others_run_between_nodes_with_many_victims() -> None:
    fleet, victims, small = Fleet(), dict[str, list[str]](), asks(20, 8)
    inventory = NodeInventory(tuple(GpuEntry(f"GPU-{n}", n, Mode.VGPU, 81920) for n in range(GPUS)))
    for node in map(str, range(NODES)):
        fleet.set_node(LedgerNode(node, inventory, {}))
        victims[node] = [f"{node}-{number}" for number in range(GPUS * PER_GPU)]
        for number, uid in enumerate(victims[node]):
            fleet.set_pod(BoundPod(uid, node, PodClaim(small, chosen=((number // PER_GPU,),))))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await anyio.lowlevel.checkpoint()
            turns += 1

    async with anyio.create_task_group() as group:
        group.start_soon(others)
        found = await victims_needed(fleet, asks(100, 8), victims, give_back=True)
        group.cancel_scope.cancel()
    assert {node: len(needed) for node, needed in found.items()} == dict.fromkeys(victims, PER_GPU)
    assert turns >= NODES - 2


@pytest.mark.parametrize("give_back", [True, False])
async def test_on_mig_instances_that_are_whole_gpus_victims_count_by_totals(give_back: bool) -> None:
    def whole(count: int) -> PodDemand:
        return pod_demand(a_pod("ns", "p", (Container("main", {WHOLE_GPU: count}),)))

    fleet = Fleet()
    fleet.set_node(LedgerNode("n", NodeInventory((GpuEntry("GPU-0", 0, Mode.MIG, 81920),)), {WHOLE_GPU: 7}))
    for uid, count in (("a", 4), ("b", 3)):
        fleet.set_pod(BoundPod(uid, "n", PodClaim(whole(count), name=uid)))
    assert await victims_needed(fleet, whole(4), {"n": ["a"]}, give_back=give_back) == {"n": ["a"]}
    assert await victims_needed(fleet, whole(4), {"n": ["b"]}, give_back=give_back) == {}
    assert would_have_to_go(fleet, "n", whole(8)) is None
    assert [one.name for one in would_have_to_go(fleet, "n", whole(4)) or ()] == ["a"]
