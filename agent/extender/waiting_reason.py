"""Why no node has room for a pod that waits, in one sentence with the remedy, for its owner: pure.

Names of other pods stay out of it: they may be other tenants'.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from agent.extender.choice import fits
from agent.extender.fleet import UNKNOWN_NODE, Fleet
from agent.extender.free_capacity import free_capacity
from agent.extender.packing import Work
from agent.extender.pod_demand import WHOLE_GPU, PodDemand, Slot
from agent.extender.verdicts import NOT_REACHED
from agent.model.modes import PAIRS, Mode

MOST_REASONS = 2  # that are named, the most frequent first


@dataclass(frozen=True, slots=True)
class WaitingReason:
    """`kind` stays the same while only figures change."""

    kind: str
    sentence: str


def waiting_reason(fleet: Fleet, demand: PodDemand, refused: Mapping[str, str]) -> WaitingReason:
    """`refused`: every node that was looked at, with the reason."""
    names = [name for name in refused if fleet.inventory(name)]
    # Other agents' GPUs: nothing is known of them but their number.
    others = [name for name in refused if fleet.offers_by_totals(name, demand)]
    if others:
        return _full(demand, refused, [*names, *others])
    if not names:
        return WaitingReason(
            "no GPUs",
            "no node offers GPUs by this agent; an administrator gives a node a mode with the label "
            "nvidia-device-enable",
        )
    lacking = _modes_nobody_offers(fleet, demand, names)
    if lacking:
        return WaitingReason("no mode", _no_mode(lacking))
    if not _would_fit_when_empty(fleet, names, demand):
        return WaitingReason(
            "too large", f"no node could hold {_in_words(demand)} even if it were empty; {_less(demand)}"
        )
    return _full(demand, refused, names)


def _full(demand: PodDemand, refused: Mapping[str, str], names: Iterable[str]) -> WaitingReason:
    seen = Counter(refused[name] for name in names if refused.get(name) not in (None, NOT_REACHED))
    most = ", ".join(
        f"{reason} ({count} node{'s' if count > 1 else ''})"
        for reason, count in seen.most_common(MOST_REASONS)
        if reason != UNKNOWN_NODE
    )
    seen_text = f": {most}" if most else ""
    return WaitingReason(
        "full",
        f"no node has room now for {_in_words(demand)}{seen_text}; ask for less, or wait: the pod starts "
        "when enough is free",
    )


def _modes_nobody_offers(fleet: Fleet, demand: PodDemand, names: list[str]) -> list[Mode]:
    wanted = {slot.mode for slot in demand.slots} | ({Mode.PGPU} if demand.gpus else set())
    offered = {gpu.mode for name in names if (inventory := fleet.inventory(name)) for gpu in inventory.gpus}
    return sorted(wanted - offered, key=lambda mode: mode.value)


def _no_mode(lacking: list[Mode]) -> str:
    wanted = " and ".join(PAIRS[mode].core if mode in PAIRS else WHOLE_GPU for mode in lacking)
    labels = " or ".join(f"nvidia-device-enable={mode.value}" for mode in lacking)
    return (
        f"no node offers {wanted}; ask for the resources of a mode that nodes are in, or have an "
        f"administrator label a node {labels}"
    )


def _would_fit_when_empty(fleet: Fleet, names: Iterable[str], demand: PodDemand) -> bool:
    tried: set[tuple[tuple[Mode, int, int], ...]] = set()  # nodes come in a few kinds
    for name in names:
        if inventory := fleet.inventory(name):
            # GPUs that are unhealthy or drain now may be used again: wait for them.
            gpus = tuple(replace(gpu, trouble="", offered=True) for gpu in inventory.gpus)
            kind = tuple((gpu.mode, gpu.memory_mib, gpu.replicas) for gpu in gpus)
            if kind in tried:
                continue
            tried.add(kind)
            empty = replace(inventory, gpus=gpus)
            if fits(free_capacity(empty, ()), demand, empty.topology, Work()):
                return True
    return False


def _in_words(demand: PodDemand) -> str:
    parts = [f"{demand.gpus} x {WHOLE_GPU}"] if demand.gpus else []
    parts += [_slot_in_words(slot, count) for slot, count in Counter(demand.slots).items()]
    return " and ".join(parts)


def _slot_in_words(slot: Slot, count: int) -> str:
    pair = PAIRS[slot.mode]
    want = slot.demand
    if want.whole:
        text = f"{want.whole} whole GPU{'s' if want.whole > 1 else ''} in mode {slot.mode.value}"
    else:
        cores = f"{want.cores} {pair.core} and " if want.cores else ""
        text = f"{cores}{want.blocks} {pair.memory} of one GPU"
    return text if count == 1 else f"{count} times {text}"


def _less(demand: PodDemand) -> str:
    several = len(demand.slots) > 1 or demand.gpus > 1 or any(slot.demand.whole > 1 for slot in demand.slots)
    spread = ", or spread the work over more pods" if several else ""
    return f"ask for less{spread}, or for nodes with larger GPUs"
