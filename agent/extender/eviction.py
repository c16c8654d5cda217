"""What would have to go from a node so that a pod fits: pure."""

from agent.extender.fleet import Fleet
from agent.extender.fleet_choice import fits
from agent.extender.fleet_rooms import PodClaim, rooms_of
from agent.extender.pod_demand import PodDemand
from agent.model.node_inventory import NodeInventory


def would_have_to_go(
    fleet: Fleet, name: str, inventory: NodeInventory, demand: PodDemand
) -> list[PodClaim] | None:
    """Bound pods without which the demand fits, few and small; None: not even on the empty node."""
    claims = sorted(fleet.claims(name).values(), key=_size)
    if not fits(rooms_of(inventory, ()), demand):
        return None
    for claim in claims:
        if fits(rooms_of(inventory, (one for one in claims if one is not claim)), demand):
            return [claim]
    going: list[PodClaim] = []
    for claim in claims:
        going.append(claim)
        if fits(rooms_of(inventory, (one for one in claims if not _among(one, going))), demand):
            break
    # What went on the way without need may stay, large ones first.
    for claim in sorted(going, key=_size, reverse=True):
        fewer = [one for one in going if one is not claim]
        if fits(rooms_of(inventory, (one for one in claims if not _among(one, fewer))), demand):
            going = fewer
    return going


def _among(claim: PodClaim, others: list[PodClaim]) -> bool:
    return any(claim is other for other in others)


def _size(claim: PodClaim) -> tuple[int, str]:
    return (sum(slot.demand.cores for slot in claim.demand.slots) + 100 * claim.demand.gpus, claim.name)
