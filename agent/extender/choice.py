"""Chooses GPUs of a node for the whole demand of a pod, with a score, or says why it does not fit: pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent.extender.free_capacity import FreeCapacity, ModeCapacity, Summary
from agent.extender.packing import After, Ordering, Work, fullest_first, pack
from agent.extender.pod_demand import Chosen, PodDemand, Slot
from agent.model.demand import CORES
from agent.model.fragmentation import Mix
from agent.model.free_gpu import FreeGpu
from agent.model.modes import PAIRS
from agent.model.placement import PlacementPolicy, order, unusable
from agent.model.topology import Topology

# Lower is better; compared between nodes of one cluster under one policy.
Worth = tuple[float, ...]
Key = Callable[[FreeGpu], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Picked:
    """GPUs by index for each slot of a demand, and what the choice is worth."""

    chosen: Chosen
    worth: Worth


def pick(
    free: FreeCapacity, demand: PodDemand, policy: PlacementPolicy, mix: Mix, topology: Topology, work: Work
) -> Picked | None:
    """A choice for all slots at once; None exactly where the demand does not fit."""
    if demand.gpus > free.units:
        return None

    def by_policy(slot: Slot, gpus: Sequence[FreeGpu]) -> Key:
        return order(policy, slot.demand, gpus, mix)

    ordering: Ordering = fullest_first if policy is PlacementPolicy.BINPACK else by_policy
    found = pack(free, demand.slots, topology, ordering, work)
    if found is None:
        return None
    chosen, after = found
    return Picked(chosen, _worth(free, after, policy, mix))


def judge(
    free: FreeCapacity, demand: PodDemand, topology: Topology, work: Work, alike: dict[Summary, str]
) -> str:
    """Why a demand does not fit; empty: it fits. `alike`: what was found for this demand so far."""
    summary = free.summary if len(demand.slots) == 1 and not demand.gpus else None
    reason = "" if fits(free, demand, topology, work) else refusal(free, demand)
    if summary is not None and _is_decided_by_widest(free.modes[0], demand.slots[0]):
        alike[summary] = reason
    return reason


def _is_decided_by_widest(mode: ModeCapacity, slot: Slot) -> bool:
    """Whether no other GPU than the widest matters: it has room, or too few cores."""
    want, widest = slot.demand, mode.widest
    return (
        mode.mode is not slot.mode
        or want.whole > 0
        or widest.cores < want.cores
        or widest.fits(want, slot.containers)
    )


def fits(free: FreeCapacity, demand: PodDemand, topology: Topology, work: Work) -> bool:
    if demand.gpus > free.units:
        return False
    slots = demand.slots
    if len(slots) > 1:
        return pack(free, slots, topology, fullest_first, work) is not None
    return not slots or _fits_alone(free, slots[0])


def _fits_alone(free: FreeCapacity, slot: Slot) -> bool:
    mine = free.of(slot.mode)
    if mine is None:
        return False
    want, widest = slot.demand, mine.widest
    if want.whole:
        return mine.untouched >= want.whole
    if widest.cores < want.cores:
        return False
    # Where the one with the most cores lacks memory or clients, another may have them.
    return widest.fits(want, slot.containers) or any(gpu.fits(want, slot.containers) for gpu in mine.gpus)


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


# A share that opens a GPU takes it from those who need a whole one: worse than any remainder.
UNTOUCHED = 1000


def refusal(free: FreeCapacity, demand: PodDemand) -> str:
    """Why a demand fits no choice of GPUs, in a few words."""
    if demand.gpus > free.units:
        return f"{free.units} of {demand.gpus} GPUs free" if free.all_units else "no GPU offered as pgpu"
    former = None
    for slot in demand.slots:
        # Containers that ask for the same stand side by side.
        if (slot.mode, slot.demand) != former and (text := _slot_refusal(free, slot)):
            return text
        former = (slot.mode, slot.demand)
    return f"room for each, not for all {len(demand.slots)} containers together"


def _slot_refusal(free: FreeCapacity, slot: Slot) -> str:
    want = slot.demand
    whole = want.whole
    mode = free.of(slot.mode)
    if mode and not free.out and not free.unknown:
        # What most nodes of a full cluster answer, without a look at each GPU.
        if whole and mode.untouched < whole:
            return f"{mode.untouched} of {whole} GPUs wholly free"
        if not whole and mode.widest.cores < want.cores:
            return f"largest free share {mode.widest.cores} of {want.cores} cores"
    mine = mode.gpus if mode else ()
    blocked = [
        (gpu, why)
        for out_of, gpu, why in free.out
        if out_of is slot.mode and (gpu.untouched if whole else gpu.fits(want, slot.containers))
    ]
    if whole:
        untouched = mode.untouched if mode else 0
        if untouched >= whole:
            return ""
        if untouched + len(blocked) >= whole:
            return _blocked_by(blocked)
    elif any(gpu.fits(want, slot.containers) for gpu in mine):
        return ""
    elif blocked:
        return _blocked_by(blocked)
    if not mine:
        return f"no GPU offered as {PAIRS[slot.mode].name}"
    if free.unknown:
        return f"GPUs of {free.unknown} bound pod{'s' if free.unknown > 1 else ''} not known yet"
    return f"{untouched} of {whole} GPUs wholly free" if whole else _share_refusal(mine, slot)


def _share_refusal(mine: Sequence[FreeGpu], slot: Slot) -> str:
    want = slot.demand
    if want.cores > (most := max(gpu.cores for gpu in mine)):
        return f"largest free share {most} of {want.cores} cores"
    enough = [gpu for gpu in mine if gpu.cores >= want.cores]
    if want.blocks > (most := max(gpu.blocks for gpu in enough)):
        beside = f" beside {want.cores} cores" if want.cores else ""
        return f"largest free memory {most} of {want.blocks} blocks{beside}"
    return "MPS client ceiling reached on every GPU with room"


def _blocked_by(blocked: Sequence[tuple[FreeGpu, str]]) -> str:
    index, why = blocked[0][0].index, blocked[0][1]
    return f"GPU {index} {why}" + (f" and {len(blocked) - 1} more" if len(blocked) > 1 else "")
