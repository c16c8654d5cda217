"""The simulation of a filling cluster: pods of the usual mix arrive one by one, and nobody leaves."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from agent.extender.fleet import Fleet, LedgerNode
from agent.extender.free_capacity import PodClaim
from agent.extender.pod_demand import PodDemand, pod_demand
from agent.model.modes import Mode
from agent.model.node_inventory import GpuEntry, NodeInventory
from agent.model.placement import USUAL, PlacementPolicy
from agent.model.pod import CORES, VGPU, Container
from tests.pods import a_pod

MEMORY_MIB = 80 << 10
BLOCKS = VGPU.blocks(MEMORY_MIB << 20)


@dataclass(frozen=True, slots=True)
class Filled:
    """How a run ended: hundredths of GPUs offered of those that there are, and pods that died or waited."""

    ratio: float
    pods: int
    failures: int
    pending: int


def inventory(gpus: int = 8, mode: Mode = Mode.VGPU) -> NodeInventory:
    """GPUs of 80 GiB, all alike."""
    return NodeInventory(tuple(GpuEntry(f"GPU-{i:08x}", i, mode, MEMORY_MIB) for i in range(gpus)))


def fleet_of(nodes: int, gpus: int = 8) -> Fleet:
    """Empty nodes of one build."""
    fleet = Fleet()
    for number in range(nodes):
        fleet.set_node(LedgerNode(f"node-{number:05d}", inventory(gpus), {}))
    return fleet


def demand(size: int) -> PodDemand:
    """The request of a pod for `size` hundredths of a GPU, and as much of its memory."""
    limits = {VGPU.core: size}
    if size < CORES:
        limits[VGPU.memory] = size * BLOCKS // CORES
    return pod_demand(a_pod("default", "pod", (Container("main", limits),)))


def arrivals(hundredths: int, seed: int) -> Iterator[int]:
    """Sizes of pods until so much was asked for."""
    draw = random.Random(seed)
    asked = 0
    while asked < hundredths:
        size = draw.choices(list(USUAL), list(USUAL.values()))[0]
        asked += size
        yield size


def fill(nodes: int, policy: PlacementPolicy, seed: int, share: float = 1.1, gpus: int = 8) -> Filled:
    """Fill a cluster through the ledger that the extender serves from.

    Whether a pod is admitted is decided by a count of its own, as each node's kubelet and agent would.
    """
    fleet = fleet_of(nodes, gpus)
    demands = {size: demand(size) for size in USUAL}
    truth = {name: [CORES] * gpus for name in fleet.nodes}
    offered = failures = pending = count = 0
    for count, size in enumerate(arrivals(int(nodes * gpus * CORES * share), seed), start=1):
        want = demands[size]
        options = [
            (picked.worth, name, picked) for name in fleet.nodes if (picked := fleet.pick(name, want, policy))
        ]
        if not options:
            pending += 1
            continue
        _, best, found = min(options, key=lambda option: option[:2])
        fleet.assume(f"uid-{count}", best, PodClaim(want, chosen=found.chosen), 0)
        left = truth[best]
        each = min(size, CORES)
        if all(left[index] >= each for index in found.chosen[0]):
            for index in found.chosen[0]:
                left[index] -= each
            offered += size
        else:
            failures += 1
    return Filled(offered / (nodes * gpus * CORES), count, failures, pending)
