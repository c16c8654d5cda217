"""Which pods would have to go from a node so that another one fits, GPU by GPU: pure."""

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
    needed = still_needed(inventory, claims, sorted(going, key=lambda uid: _size(claims[uid]))[::-1], demand)
    return [claims[uid] for uid in needed or ()]


def still_needed(
    inventory: NodeInventory, claims: Mapping[str, PodClaim], victims: Sequence[str], demand: PodDemand
) -> list[str] | None:
    """Those of the victims that must go, by UID; None: the demand does not fit without all of them.

    The first ones are kept where they can be. Victims that hold no GPU are none of ours: they stay victims.
    """
    if not _fits_without(inventory, claims, victims, demand):
        return None
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
