"""Assigns all slots of a pod to GPUs of one node: one search for filter, score and bind.

Packing shares onto GPUs is a hard problem, and the author of a pod chooses its shape. So GPUs that are
equal are tried once, a state that was a dead end is not entered again, and the work is bounded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent.extender.free_capacity import FreeCapacity, ModeCapacity
from agent.extender.pod_demand import Chosen, Slot
from agent.model.gpu import Topology
from agent.model.placement import FreeGpu
from agent.model.placement import choose as best_linked

# The most steps of one search; beyond it a pod counts as not fitting on the node.
NODE_STEPS = 256
LOOK_STEPS = 2  # what a look at a node for several slots costs beside the search
After = dict[int, FreeGpu]  # by index
# A key by which the GPUs of a mode are ordered for a slot, the best first.
Ordering = Callable[[Slot, Sequence[FreeGpu]], Callable[[FreeGpu], tuple[float, ...]]]


@dataclass(slots=True)
class SearchWork:
    """Steps that were done; one is a slot tried on a GPU."""

    steps: int = 0


def fullest_first(slot: Slot, gpus: Sequence[FreeGpu]) -> Callable[[FreeGpu], tuple[float, ...]]:
    """The order in which a packing is most often found."""
    del slot, gpus
    return lambda gpu: (gpu.cores, gpu.blocks, gpu.index)


def pack(
    free: FreeCapacity, slots: Sequence[Slot], topology: Topology, ordering: Ordering, work: SearchWork
) -> tuple[Chosen, After] | None:
    """GPUs by index for each slot, and what the GPUs of these modes have left; None: no packing was found.

    Whether one is found does not depend on `ordering`: what one order finds too late, the usual one decides.
    """
    chosen: list[tuple[int, ...]] = [()] * len(slots)
    after: After = {}
    for mode in free.modes:
        mine = [number for number, slot in enumerate(slots) if slot.mode is mode.mode]
        if not mine:
            continue
        wanted = [slots[number] for number in mine]
        if len(mine) == 1:
            found = _first(mode, wanted[0], topology, ordering, work)
        else:
            found = _packed(mode, wanted, topology, ordering, work)
        if found is None:
            return None
        for number, indices in zip(mine, found[0], strict=True):
            chosen[number] = indices
        after |= found[1]
    return (tuple(chosen), after) if all(chosen) else None


_Found = tuple[list[tuple[int, ...]], After]


def _first(
    mode: ModeCapacity, slot: Slot, topology: Topology, ordering: Ordering, work: SearchWork
) -> _Found | None:
    work.steps += 1
    if slot.demand.whole:
        after = {gpu.index: gpu for gpu in mode.gpus}
        indices = _take_whole(after, slot, topology)
        return ([indices], after) if indices else None
    fitting = [gpu for gpu in mode.gpus if gpu.fits(slot.demand, slot.containers)]
    if not fitting:
        return None
    best = min(fitting, key=ordering(slot, mode.gpus))
    after = {gpu.index: gpu for gpu in mode.gpus}
    after[best.index] = best.after(slot.demand, slot.containers)
    return [(best.index,)], after


def _packed(
    mode: ModeCapacity, slots: Sequence[Slot], topology: Topology, ordering: Ordering, work: SearchWork
) -> _Found | None:
    work.steps += LOOK_STEPS
    start = {gpu.index: gpu for gpu in mode.gpus}
    whole = []
    for slot in slots:
        if slot.demand.whole:
            work.steps += 1
            indices = _take_whole(start, slot, topology)
            if not indices:
                return None
            whole.append(indices)
    shares = [slot for slot in slots if not slot.demand.whole]
    if _cannot_fit(start, shares, work):
        return None
    decided = _Search(shares, fullest_first, work).run(start)
    if decided is None:
        return None
    found = decided if ordering is fullest_first else _Search(shares, ordering, work).run(start) or decided
    remaining = iter(found[0])
    taken = iter(whole)
    return [next(taken) if slot.demand.whole else next(remaining) for slot in slots], found[1]


def _take_whole(now: After, slot: Slot, topology: Topology) -> tuple[int, ...]:
    """Takes the best connected untouched GPUs out of `now`; empty: there are too few."""
    count = slot.demand.whole
    free = [str(index) for index, gpu in now.items() if gpu.untouched]
    if len(free) < count:
        return ()
    picked = best_linked(topology, free, (), count) if topology.gpus else free
    indices = tuple(sorted(map(int, picked[:count])))
    for index in indices:
        now[index] = now[index].after(slot.demand)
    return indices


def _cannot_fit(now: After, slots: Sequence[Slot], work: SearchWork) -> bool:
    """Whether counting alone shows that shares cannot fit: each of the largest needs a part of a GPU.

    `slots` come in descending order of cores, so each of the first n is at least as large as the n-th.
    """
    left = [gpu.cores for gpu in now.values()]
    for number, slot in enumerate(slots, start=1):
        size = slot.demand.cores
        if size and (number == len(slots) or slots[number].demand.cores < size):
            work.steps += 1
            if sum([cores // size for cores in left]) < number:
                return True
    blocks = sum([gpu.blocks for gpu in now.values()])
    return sum(left) < sum([slot.demand.cores for slot in slots]) or blocks < sum(
        [slot.demand.blocks for slot in slots]
    )


_State = tuple[int, tuple[tuple[int, int, int, bool], ...]]


class _Search:
    """Depth first, going back where the rest does not fit."""

    def __init__(self, slots: Sequence[Slot], ordering: Ordering, work: SearchWork) -> None:
        self._slots = slots
        self._ordering = ordering
        self._work = work
        self._last = work.steps + NODE_STEPS
        self._dead_ends: set[_State] = set()

    def run(self, start: After) -> _Found | None:
        now = dict(start)
        chosen: list[tuple[int, ...]] = []
        return (chosen, now) if self._place(0, now, chosen) else None

    def _place(self, number: int, now: After, chosen: list[tuple[int, ...]]) -> bool:
        if number == len(self._slots):
            return True
        if self._dead_ends and _state(number, now) in self._dead_ends:
            return False
        slot = self._slots[number]
        fitting = [gpu for gpu in now.values() if gpu.fits(slot.demand, slot.containers)]
        tried: set[tuple[int, int, int, int, bool]] = set()
        for gpu in sorted(fitting, key=self._ordering(slot, list(now.values()))):
            alike = (gpu.cores, gpu.blocks, gpu.all_blocks, gpu.clients, gpu.untouched)
            if alike in tried:
                continue
            tried.add(alike)
            self._work.steps += 1
            if self._work.steps > self._last:
                return False
            now[gpu.index] = gpu.after(slot.demand, slot.containers)
            chosen.append((gpu.index,))
            if self._place(number + 1, now, chosen):
                return True
            chosen.pop()
            now[gpu.index] = gpu
        self._dead_ends.add(_state(number, now))
        return False


def _state(number: int, now: After) -> _State:
    return number, tuple(sorted((gpu.cores, gpu.blocks, gpu.clients, gpu.untouched) for gpu in now.values()))
