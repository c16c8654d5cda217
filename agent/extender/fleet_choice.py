"""Which GPUs of a node the whole demand of a pod gets, what that is worth, or why it does not fit: pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from agent.extender.fleet_rooms import GpuRoom, Rooms
from agent.extender.pod_demand import Chosen, PodDemand, Slot
from agent.model.demand import CORES
from agent.model.fragmentation import Free, Mix
from agent.model.node_inventory import PAIRS
from agent.model.placement import Policy
from agent.model.preference import choose as best_linked
from agent.model.topology import Topology

# Steps of the search for several containers on one node; beyond it a pod counts as not fitting there.
MOST_STEPS = 2000
# Lower is better; compared between nodes of one cluster under one policy.
Worth = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Picked:
    """GPUs by index for each slot of a demand, and what the choice is worth."""

    chosen: Chosen
    worth: Worth


def pick(rooms: Rooms, demand: PodDemand, policy: Policy, mix: Mix, topology: Topology) -> Picked | None:
    """A choice for all slots at once; None where there is none."""
    if demand.gpus > rooms.units:
        return None
    found = _search(rooms, demand.slots, policy, mix, topology)
    if found is None:
        return None
    chosen, after = found
    return Picked(chosen, _worth(rooms, after, policy, mix))


def fits(rooms: Rooms, demand: PodDemand) -> bool:
    """Whether there is a choice at all."""
    if demand.gpus > rooms.units:
        return False
    slots = demand.slots
    if not slots:
        return True
    if len(slots) > 1:
        return _search(rooms, slots, Policy.BINPACK, _NO_MIX, _NO_LINKS) is not None
    slot = slots[0]
    want, wanted = slot.demand, slot.mode
    for mode, widest, untouched in rooms.modes:
        if mode is wanted:
            if want.whole:
                return untouched >= want.whole
            if widest.cores < want.cores:
                return False
            # Where the one with the most cores lacks memory or clients, another may have them.
            return widest.takes(slot) or any(room.mode is mode and room.takes(slot) for room in rooms.gpus)
    return False


_NO_MIX, _NO_LINKS = Mix({}), Topology()
_After = dict[int, GpuRoom]


def _search(
    rooms: Rooms, slots: Sequence[Slot], policy: Policy, mix: Mix, topology: Topology
) -> tuple[Chosen, _After] | None:
    """Slot by slot, large ones first, going back where the rest does not fit."""
    steps = 0

    def place(number: int, now: _After) -> tuple[Chosen, _After] | None:
        nonlocal steps
        if number == len(slots):
            return (), now
        slot = slots[number]
        for indices in _candidates(now, slot, policy, mix, topology):
            steps += 1
            if steps > MOST_STEPS:
                return None
            after = {**now, **{index: now[index].after(slot) for index in indices}}
            rest = place(number + 1, after)
            if rest is not None:
                return ((indices, *rest[0]), rest[1])
        return None

    return place(0, {room.index: room for room in rooms.gpus})


def _candidates(
    now: _After, slot: Slot, policy: Policy, mix: Mix, topology: Topology
) -> Sequence[tuple[int, ...]]:
    mine = [room for room in now.values() if room.mode is slot.mode]
    if slot.demand.whole:
        free = [str(room.index) for room in mine if room.untouched]
        if len(free) < slot.demand.whole:
            return ()
        picked = best_linked(topology, free, (), slot.demand.whole) if topology.gpus else free
        return (tuple(sorted(map(int, picked[: slot.demand.whole]))),)
    order = _order(policy, slot, mix, mine)
    fitting = sorted((room for room in mine if room.takes(slot)), key=order)
    return [(room.index,) for room in fitting]


def _order(
    policy: Policy, slot: Slot, mix: Mix, rooms: Sequence[GpuRoom]
) -> Callable[[GpuRoom], tuple[float, ...]]:
    if policy is Policy.SPREAD:
        return lambda room: (-room.cores, -room.blocks, room.index)
    if policy is Policy.FRAGMENTATION:
        before = _free(rooms)
        return lambda room: (
            _growth(room, room.after(slot), before, mix),
            room.cores,
            room.blocks,
            room.index,
        )
    return lambda room: (room.cores, room.blocks, room.index)


def _free(rooms: Sequence[GpuRoom]) -> Free:
    return Free(
        sum(room.cores for room in rooms if not room.untouched), sum(room.untouched for room in rooms)
    )


def _growth(before: GpuRoom, after: GpuRoom, free: Free, mix: Mix) -> float:
    """How much more of the node the mix cannot use once one GPU has changed."""
    left = (
        Free(free.partly + after.cores, free.untouched - 1)
        if before.untouched
        else Free(free.partly - before.cores + after.cores, free.untouched)
    )
    shares = mix.share_loss(after.cores, after.fits) - mix.share_loss(before.cores, before.fits)
    return round(shares + mix.whole_loss(left) - mix.whole_loss(free), 6)


def _worth(rooms: Rooms, after: _After, policy: Policy, mix: Mix) -> Worth:
    """Of the GPUs that changed: what is left of them; of the node: what was free before."""
    changed = [(room, after[room.index]) for room in rooms.gpus if after[room.index] is not room]
    node = float(sum(room.cores for room in rooms.gpus) + CORES * rooms.units)
    left = float(sum(new.cores + (UNTOUCHED if old.untouched else 0) for old, new in changed))
    if policy is Policy.SPREAD:
        return (-node, -left)
    if policy is Policy.FRAGMENTATION and changed:
        modes = {old.mode for old, _ in changed}
        lost = 0.0
        for mode in modes:
            was = [room for room in rooms.gpus if room.mode is mode]
            lost += _lost([after[room.index] for room in was], mix) - _lost(was, mix)
        return (round(lost, 6), left, node)
    return (left, node)


# A share that opens a GPU takes it from those who need a whole one: worse than any remainder.
UNTOUCHED = 1000


def _lost(rooms: Sequence[GpuRoom], mix: Mix) -> float:
    return sum(mix.share_loss(room.cores, room.fits) for room in rooms) + mix.whole_loss(_free(rooms))


def refusal(rooms: Rooms, demand: PodDemand) -> str:
    """Why a demand fits no choice of GPUs, in a few words."""
    if demand.gpus > rooms.units:
        return f"{rooms.units} of {demand.gpus} GPUs free" if rooms.all_units else "no GPU sold as pgpu"
    for slot in demand.slots:
        if text := _slot_refusal(rooms, slot):
            return text
    return f"room for each, not for all {len(demand.slots)} containers together"


def _slot_refusal(rooms: Rooms, slot: Slot) -> str:
    want = slot.demand
    whole = want.whole
    if not rooms.out and not rooms.unknown:
        # What most nodes of a full cluster answer, without a look at each GPU.
        for mode, widest, untouched in rooms.modes:
            if mode is slot.mode and whole and untouched < whole:
                return f"{untouched} of {whole} GPUs wholly free"
            if mode is slot.mode and not whole and widest.cores < want.cores:
                return f"largest free share {widest.cores} of {want.cores} cores"
    mine = [room for room in rooms.gpus if room.mode is slot.mode]
    blocked = [
        (room, why)
        for room, why in rooms.out
        if room.mode is slot.mode and (room.untouched if whole else room.takes(slot))
    ]
    if whole:
        free = sum(room.untouched for room in mine)
        if free >= whole:
            return ""
        if free + len(blocked) >= whole:
            return _told_blocked(blocked)
    elif any(room.takes(slot) for room in mine):
        return ""
    elif blocked:
        return _told_blocked(blocked)
    if not mine:
        return f"no GPU sold as {PAIRS[slot.mode].name}"
    if rooms.unknown:
        return f"GPUs of {rooms.unknown} bound pod{'s' if rooms.unknown > 1 else ''} not known yet"
    return f"{free} of {whole} GPUs wholly free" if whole else _share_refusal(mine, slot)


def _share_refusal(mine: Sequence[GpuRoom], slot: Slot) -> str:
    want = slot.demand
    if want.cores > (most := max(room.cores for room in mine)):
        return f"largest free share {most} of {want.cores} cores"
    enough = [room for room in mine if room.cores >= want.cores]
    if want.blocks > (most := max(room.blocks for room in enough)):
        beside = f" beside {want.cores} cores" if want.cores else ""
        return f"largest free memory {most} of {want.blocks} blocks{beside}"
    return "MPS client ceiling reached on every GPU with room"


def _told_blocked(blocked: Sequence[tuple[GpuRoom, str]]) -> str:
    index, why = blocked[0][0].index, blocked[0][1]
    return f"GPU {index} {why}" + (f" and {len(blocked) - 1} more" if len(blocked) > 1 else "")


@lru_cache(maxsize=1)
def default_mix() -> Mix:
    """The usual mix."""
    return Mix()
