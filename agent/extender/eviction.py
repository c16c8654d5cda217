"""Finds the pods that would have to leave a node for another one to fit, GPU by GPU: pure."""

from collections.abc import Collection, Mapping, Sequence

from agent.extender.choice import fits
from agent.extender.fleet import Fleet
from agent.extender.free_capacity import PodClaim, free_capacity
from agent.extender.packing import Work
from agent.extender.pod_demand import PodDemand
from agent.model.node_inventory import NodeInventory


def would_have_to_go(
    fleet: Fleet, name: str, inventory: NodeInventory, demand: PodDemand
) -> list[PodClaim] | None:
    """Bound pods without which the demand fits, few and small; None: not even on the empty node."""
    claims = fleet.claims(name)
    by_size = sorted(claims, key=lambda uid: _size(claims[uid]))
    if not _fits_without(inventory, claims, claims, demand):
        return None
    for uid in by_size:
        if _fits_without(inventory, claims, {uid}, demand):
            return [claims[uid]]
    going: list[str] = []
    for uid in by_size:
        going.append(uid)
        if _fits_without(inventory, claims, going, demand):
            break
    # What went on the way without need may stay, large ones first.
    return [claims[uid] for uid in _reprieved(inventory, claims, going[::-1], demand)]


def still_needed(
    fleet: Fleet, name: str, victims: Sequence[str], demand: PodDemand, *, give_back: bool
) -> Sequence[str] | None:
    """Those of a node's victims that must go, by UID; None: the demand does not fit without all of them.

    `give_back`: keep those that can be, the first ones before the others. A victim without GPUs has to go for
    another reason, which is not known here.
    """
    inventory = fleet.inventory(name)
    if inventory is None:
        return None if fleet.verdict_by_totals(name, demand, without=victims) else victims
    claims = fleet.claims(name)
    if not _fits_without(inventory, claims, victims, demand):
        return None
    return _reprieved(inventory, claims, victims, demand) if give_back else victims


def _reprieved(
    inventory: NodeInventory, claims: Mapping[str, PodClaim], victims: Sequence[str], demand: PodDemand
) -> list[str]:
    going = list(victims)
    for uid in victims:
        fewer = [one for one in going if one != uid]
        if uid in claims and _fits_without(inventory, claims, fewer, demand):
            going = fewer
    return going


def _fits_without(
    inventory: NodeInventory, claims: Mapping[str, PodClaim], going: Collection[str], demand: PodDemand
) -> bool:
    staying = (claim for uid, claim in claims.items() if uid not in going)
    return fits(free_capacity(inventory, staying), demand, inventory.topology, Work())


def _size(claim: PodClaim) -> tuple[int, str]:
    return (sum(slot.demand.cores for slot in claim.demand.slots) + 100 * claim.demand.gpus, claim.name)
