"""Pods that may be evicted, or would have to end, for another one to fit on their node, GPU by GPU.

By totals alone kube-scheduler would evict and still find no room.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import anyio.lowlevel
import msgspec

from agent.extender.choice import refusal
from agent.extender.fleet import Fleet
from agent.extender.free_capacity import PodClaim, free_capacity
from agent.extender.packing import SearchWork
from agent.extender.pod_demand import RESOURCES, PodDemand

VICTIMS_AT_ONCE = 16  # that are judged before others run, each by a look at its node: a few milliseconds


class _Resources(msgspec.Struct):
    limits: dict[str, Any] = msgspec.field(default_factory=dict)
    requests: dict[str, Any] = msgspec.field(default_factory=dict)
    claims: list[Any] = msgspec.field(default_factory=list)


class _Port(msgspec.Struct, rename="camel"):
    host_port: int = 0


class _Container(msgspec.Struct):
    resources: _Resources = msgspec.field(default_factory=_Resources)
    ports: list[_Port] = msgspec.field(default_factory=list)


class _Spec(msgspec.Struct, rename="camel"):
    containers: list[_Container] = msgspec.field(default_factory=list)
    init_containers: list[_Container] = msgspec.field(default_factory=list)
    resources: _Resources = msgspec.field(default_factory=_Resources)
    overhead: dict[str, Any] = msgspec.field(default_factory=dict)
    affinity: dict[str, Any] | None = None
    topology_spread_constraints: list[Any] = msgspec.field(default_factory=list)
    volumes: list[dict[str, Any]] = msgspec.field(default_factory=list)


class _Pod(msgspec.Struct):
    spec: _Spec = msgspec.field(default_factory=_Spec)


_SIMPLE_VOLUMES = frozenset(
    {"name", "projected", "emptyDir", "configMap", "secret", "downwardAPI", "hostPath"}
)


def only_gpus_matter(pod: bytes | msgspec.Raw) -> bool:
    """Whether a pod's spec asks of a node for nothing that a victim could hold but GPUs.

    Where it asks for CPU, say, a victim may have to go for that. Raises msgspec.DecodeError.
    """
    spec = msgspec.json.decode(pod, type=_Pod).spec
    containers = [*spec.containers, *spec.init_containers]
    resources = [spec.resources, *(each.resources for each in containers)]
    asked = {name for each in resources for name in (*each.limits, *each.requests)} - set(RESOURCES)
    return not (
        asked
        or spec.overhead
        or spec.affinity
        or spec.topology_spread_constraints
        or any(each.claims for each in resources)
        or any(port.host_port for each in containers for port in each.ports)
        or any(set(volume) - _SIMPLE_VOLUMES for volume in spec.volumes)
    )


async def victims_needed(
    fleet: Fleet, demand: PodDemand, proposed: Mapping[str, Sequence[str]], *, give_back: bool
) -> dict[str, Sequence[str]]:
    """Nodes where a pod fits once their victims are gone, each with those that must go, by UID.

    `proposed`: victims by node, the most important first. `give_back`: leave out those of them whose GPUs are
    not needed; a node where none is needed is left out, since the pod fits there as it is.
    """
    found: dict[str, Sequence[str]] = {}
    judged = 0
    for name, victims in proposed.items():
        if judged >= VICTIMS_AT_ONCE:
            await anyio.lowlevel.checkpoint()
            judged = 0
        needed = _still_needed(fleet, name, victims, demand, give_back=give_back)
        if needed:
            found[name] = needed
        judged += 1 + len(victims)
    return found


def would_have_to_go(fleet: Fleet, name: str, demand: PodDemand) -> list[PodClaim] | None:
    """Bound pods without which the demand fits, few and small; None: not even on the empty node."""
    claims = fleet.claims(name)
    by_size = sorted(claims, key=lambda uid: _size(claims[uid]))
    if not _fits_without(fleet, name, claims, demand):
        return None
    for uid in by_size:
        if _fits_without(fleet, name, {uid}, demand):
            return [claims[uid]]
    going: list[str] = []
    for uid in by_size:
        going.append(uid)
        if _fits_without(fleet, name, going, demand):
            break
    # What went on the way without need may stay, large ones first.
    return [claims[uid] for uid in _reprieved(fleet, name, going[::-1], demand)]


def _still_needed(
    fleet: Fleet, name: str, victims: Sequence[str], demand: PodDemand, *, give_back: bool
) -> Sequence[str] | None:
    """Those of a node's victims that must go, by UID; None: the demand does not fit without all of them.

    `give_back`: keep those that can be, the first ones before the others. A victim without GPUs has to go for
    another reason, which is not known here, and one that repels pods perhaps because it repels this one.
    """
    if not _fits_without(fleet, name, victims, demand):
        return None
    if not give_back or fleet.by_totals(name, demand):  # by totals kube-scheduler has looked itself
        return victims
    repelling = {uid for uid in victims if (pod := fleet.bound.get(uid)) and pod.repels}
    return _reprieved(fleet, name, victims, demand, repelling)


def _reprieved(
    fleet: Fleet, name: str, victims: Sequence[str], demand: PodDemand, needed: Collection[str] = ()
) -> list[str]:
    """Victims that must go, in their order; those in `needed` whether their GPUs help or not."""
    claims, going = fleet.claims(name), list(victims)
    for uid in victims:
        fewer = [one for one in going if one != uid]
        if uid in claims and uid not in needed and _fits_without(fleet, name, fewer, demand):
            going = fewer
    return going


def _fits_without(fleet: Fleet, name: str, going: Collection[str], demand: PodDemand) -> bool:
    inventory = fleet.inventory(name)
    if inventory is None or fleet.by_totals(name, demand):
        return not fleet.verdict_by_totals(name, demand, without=going)
    staying = (claim for uid, claim in fleet.claims(name).items() if uid not in going)
    return not refusal(free_capacity(inventory, staying), demand, inventory, SearchWork())


def _size(claim: PodClaim) -> tuple[int, str]:
    return (sum(slot.demand.cores for slot in claim.demand.slots) + 100 * claim.demand.gpus, claim.name)
