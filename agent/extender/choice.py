"""Chooses GPUs of a node for the whole demand of a pod, with a score, or says why it does not fit: pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agent.extender.free_capacity import FreeCapacity, ModeCapacity, Summary
from agent.extender.packing import After, Ordering, SearchWork, fullest_first, pack
from agent.extender.pod_demand import Chosen, PodDemand, Slot
from agent.model.gpu import Topology
from agent.model.modes import PAIRS
from agent.model.node_inventory import NodeInventory
from agent.model.placement import FreeGpu, Mix, PlacementPolicy, order, unusable
from agent.model.pod import CORES

# Lower is better; compared between nodes of one cluster under one policy.
Worth = tuple[float, ...]
Key = Callable[[FreeGpu], tuple[float, ...]]
# A share that opens a GPU takes it from those who need a whole one: worse than any remainder.
UNTOUCHED = 1000
MOST_ALIKE = 4096  # summaries of nodes for one demand: what was found is found again in some microseconds


@dataclass(frozen=True, slots=True)
class Picked:
    """GPUs by index for each slot of a demand, and what the choice is worth."""

    chosen: Chosen
    worth: Worth


def pick(
    free: FreeCapacity,
    demand: PodDemand,
    policy: PlacementPolicy,
    mix: Mix,
    topology: Topology,
    work: SearchWork,
    siblings: Mapping[int, int] | None = None,
) -> Picked | None:
    """A choice for all slots at once; None exactly where the demand does not fit.

    `siblings`: replicas of the same owner by GPU; the fewer the better, before all that the policy weighs.
    """
    if demand.gpus > free.units:
        return None

    def by_policy(slot: Slot, gpus: Sequence[FreeGpu]) -> Key:
        return order(policy, slot.demand, gpus, mix)

    ordering: Ordering = fullest_first if policy is PlacementPolicy.BINPACK else by_policy
    if siblings:
        ordering = _apart(siblings, ordering)
    found = pack(free, demand.slots, topology, ordering, work)
    if found is None:
        return None
    chosen, after = found
    worth = _worth(free, after, policy, mix)
    if siblings is None:
        return Picked(chosen, worth)
    beside = sum(siblings.get(index, 0) for indices in chosen for index in indices)
    return Picked(chosen, (float(beside), *worth))


def _apart(siblings: Mapping[int, int], ordering: Ordering) -> Ordering:
    def keys(slot: Slot, gpus: Sequence[FreeGpu]) -> Key:
        key = ordering(slot, gpus)
        return lambda gpu: (siblings.get(gpu.index, 0), *key(gpu))

    return keys


def judge(
    free: FreeCapacity,
    demand: PodDemand,
    inventory: NodeInventory,
    work: SearchWork,
    alike: dict[Summary, str],
) -> str:
    """Why a demand does not fit; empty: it fits. `alike`: what was found for this demand so far."""
    summary = free.summary if demand.by_summary else None
    if summary is None:
        return refusal(free, demand, inventory, work)
    found = alike.get(summary)
    if found is None:
        found = refusal(free, demand, inventory, work)
        if _is_decided_by_widest(free.modes[0], demand.slots[0]):
            if len(alike) >= MOST_ALIKE:
                alike.clear()
            alike[summary] = found
    return found


def _is_decided_by_widest(mode: ModeCapacity, slot: Slot) -> bool:
    """Whether no other GPU than the widest matters: it has room, or too few cores."""
    want, widest = slot.demand, mode.widest
    return (
        mode.mode is not slot.mode
        or want.whole > 0
        or widest.cores < want.cores
        or widest.fits(want, slot.containers)
    )


def _worth(free: FreeCapacity, after: After, policy: PlacementPolicy, mix: Mix) -> Worth:
    """Of the GPUs that changed: what is left of them; of the node: what was free before."""
    changed = [
        (mode, gpu, new)
        for mode in free.modes
        for gpu in mode.gpus
        if (new := after.get(gpu.index, gpu)) is not gpu
    ]
    node = float(sum(gpu.cores for mode in free.modes for gpu in mode.gpus) + CORES * free.units)
    left = float(sum(new.cores + (UNTOUCHED if old.untouched else 0) for _, old, new in changed))
    if policy is PlacementPolicy.SPREAD:
        return (-node, -left)
    if policy is PlacementPolicy.FRAGMENTATION and changed:
        lost = 0.0
        for mode in free.modes:
            if any(each is mode for each, _, _ in changed):
                lost += unusable([after[gpu.index] for gpu in mode.gpus], mix) - unusable(mode.gpus, mix)
        return (round(lost, 6), left, node)
    return (left, node)


def refusal(free: FreeCapacity, demand: PodDemand, inventory: NodeInventory, work: SearchWork) -> str:
    """Why a demand fits no choice of GPUs, in a few words; empty: it fits."""
    if demand.gpus > free.units:
        return f"{free.units} of {demand.gpus} GPUs free" if free.all_units else "no GPU offered as pgpu"
    slots = demand.slots
    if len(slots) > 1 and pack(free, slots, inventory.topology, fullest_first, work) is not None:
        return ""
    former = None
    for slot in slots:
        # Containers that ask for the same stand side by side.
        if (slot.mode, slot.demand) != former and (text := _slot_refusal(free, slot)):
            return text
        former = (slot.mode, slot.demand)
    return f"room for each, not for all {len(slots)} containers together" if len(slots) > 1 else ""


def _slot_refusal(free: FreeCapacity, slot: Slot) -> str:
    """Why one slot alone fits on no GPU; empty: it fits."""
    want, mode = slot.demand, free.of(slot.mode)
    whole, untouched = want.whole, mode.untouched if mode else 0
    if mode and (untouched >= whole if whole else _has_room(mode, slot)):
        return ""
    blocked = [
        (gpu, why)
        for out_of, gpu, why in free.out
        if out_of is slot.mode and (gpu.untouched if whole else gpu.fits(want, slot.containers))
    ]
    if blocked and untouched + len(blocked) >= whole:
        return _blocked_by(blocked)
    if mode is None:
        return f"no GPU offered as {PAIRS[slot.mode].name}"
    if free.unknown:
        return f"GPUs of {free.unknown} bound pod{'s' if free.unknown > 1 else ''} not known yet"
    return f"{untouched} of {whole} GPUs wholly free" if whole else _share_refusal(mode, slot)


def _has_room(mode: ModeCapacity, slot: Slot) -> bool:
    """Whether one of the GPUs takes the share."""
    want, widest = slot.demand, mode.widest
    if widest.cores < want.cores:
        return False
    # Where the one with the most cores lacks memory or clients, another may have them.
    return widest.fits(want, slot.containers) or any(gpu.fits(want, slot.containers) for gpu in mode.gpus)


def _share_refusal(mode: ModeCapacity, slot: Slot) -> str:
    want, widest = slot.demand, mode.widest
    if want.cores > widest.cores:
        return f"largest free share {widest.cores} of {want.cores} cores"
    most = max(gpu.blocks for gpu in mode.gpus if gpu.cores >= want.cores)
    if want.blocks > most:
        beside = f" beside {want.cores} cores" if want.cores else ""
        return f"largest free memory {most} of {want.blocks} blocks{beside}"
    return "MPS client ceiling reached on every GPU with room"


def _blocked_by(blocked: Sequence[tuple[FreeGpu, str]]) -> str:
    index, why = blocked[0][0].index, blocked[0][1]
    return f"GPU {index} {why}" + (f" and {len(blocked) - 1} more" if len(blocked) > 1 else "")
