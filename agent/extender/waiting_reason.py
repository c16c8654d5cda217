"""Why no node has room for a pod that waits, in one sentence with the remedy, for its owner: pure.

Names of other pods stay out of it: they may be other tenants'.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from agent.extender.choice import refusal
from agent.extender.fleet import Fleet
from agent.extender.free_capacity import free_capacity
from agent.extender.packing import Work
from agent.extender.pod_demand import WHOLE_GPU, PodDemand, Slot
from agent.extender.verdicts import NOT_REACHED
from agent.model.modes import PAIRS, Mode
from agent.model.node_inventory import NodeInventory

MOST_REASONS = 2  # that are named, the most frequent first


@dataclass(frozen=True, slots=True)
class WaitingReason:
    """`kind` stays the same while only figures change."""

    kind: str
    sentence: str


def waiting_reason(fleet: Fleet, demand: PodDemand, refused: Mapping[str, str]) -> WaitingReason:
    """`refused`: every node that was looked at, with the reason."""
    nodes = [node for name in refused if (node := fleet.nodes.get(name))]
    ours = {node.name: node.inventory for node in nodes if node.inventory}
    # Other agents' GPUs: nothing is known of them but their number.
    others = [
        node.name
        for node in nodes
        if node.inventory is None and all(node.totals.get(each, 0) for each, _ in demand.totals)
    ]
    if others:
        return _full(demand, refused, [*ours, *others])
    if not ours:
        return WaitingReason(
            "no GPUs",
            "no node offers GPUs by this agent; an administrator gives a node a mode with the label "
            "nvidia-device-enable",
        )
    lacking = _modes_nobody_offers(ours.values(), demand)
    if lacking:
        return WaitingReason("no mode", _no_mode(lacking))
    if not _would_fit_when_empty(ours.values(), demand):
        return WaitingReason(
            "too large", f"no node could hold {_in_words(demand)} even if it were empty; {_less(demand)}"
        )
    return _full(demand, refused, ours)


def _full(demand: PodDemand, refused: Mapping[str, str], names: Iterable[str]) -> WaitingReason:
    seen = Counter(refused[name] for name in names if refused[name] != NOT_REACHED)
    most = ", ".join(
        f"{reason} ({count} node{'s' if count > 1 else ''})"
        for reason, count in seen.most_common(MOST_REASONS)
    )
    seen_text = f": {most}" if most else ""
    return WaitingReason(
        "full",
        f"no node has room now for {_in_words(demand)}{seen_text}; ask for less, or wait: the pod starts "
        "when enough is free",
    )


def _modes_nobody_offers(inventories: Iterable[NodeInventory], demand: PodDemand) -> list[Mode]:
    wanted = {slot.mode for slot in demand.slots} | ({Mode.PGPU} if demand.gpus else set())
    offered = {gpu.mode for inventory in inventories for gpu in inventory.gpus}
    return sorted(wanted - offered, key=lambda mode: mode.value)


def _no_mode(lacking: list[Mode]) -> str:
    wanted = " and ".join(PAIRS[mode].core if mode in PAIRS else WHOLE_GPU for mode in lacking)
    labels = " or ".join(f"nvidia-device-enable={mode.value}" for mode in lacking)
    return (
        f"no node offers {wanted}; ask for the resources of a mode that nodes are in, or have an "
        f"administrator label a node {labels}"
    )


def _would_fit_when_empty(inventories: Iterable[NodeInventory], demand: PodDemand) -> bool:
    tried: set[tuple[tuple[Mode, int, int], ...]] = set()  # nodes come in a few kinds
    for inventory in inventories:
        # GPUs that are unhealthy or drain now may be used again: wait for them.
        gpus = tuple(replace(gpu, trouble="", offered=True) for gpu in inventory.gpus)
        kind = tuple((gpu.mode, gpu.memory_mib, gpu.replicas) for gpu in gpus)
        if kind in tried:
            continue
        tried.add(kind)
        empty = replace(inventory, gpus=gpus)
        if not refusal(free_capacity(empty, ()), demand, empty.topology, Work()):
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
