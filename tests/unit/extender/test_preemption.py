"""Judging victims of many nodes: leases and bindings run in between."""

import anyio
import anyio.lowlevel

from agent.extender.eviction import victims_needed
from agent.extender.fleet import BoundPod, Fleet, LedgerNode
from agent.extender.free_capacity import PodClaim
from agent.extender.pod_demand import PodDemand, pod_demand
from agent.model.demand import VGPU
from agent.model.modes import Mode
from agent.model.node_inventory import GpuEntry, NodeInventory
from agent.model.pod import Container
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
