"""Which container is asking: pure, from the record of who holds what and the pods' specs.

The kubelet takes a pod into its records just before it admits it, one pod after the other, and admits its
containers in order. So the container that asks is the first of its pod that lacks the resource, and of all
pods in the records only the one that is being admitted has such a container.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from agent.kubelet.podresources import Holding, PodList
from agent.model.demand import Demand, InitContainerGroup, demand_of, init_group_of
from agent.model.ledger import Held, Holder, Holdings, PairMember, Reservation
from agent.model.pod import Container, Pod, Stage
from agent.model.units import ResourcePair

PodKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Asker:
    """A container that may be the one that asks."""

    pod: Pod
    container: Container

    @property
    def holder(self) -> Holder:
        return Holder(self.pod.namespace, self.pod.name, self.container.name)

    def needs(self, pair: ResourcePair) -> tuple[Demand, InitContainerGroup | None]:
        """Its demand, and its init container group if it inherits units. Raises Impossible."""
        demand, group = demand_of(pair, self.container), init_group_of(pair, self.pod.containers)
        assert demand is not None  # it was found by its limits
        return demand, group if group and self.container.name in group.containers else None


@dataclass(frozen=True)
class Records:
    """The record of one pair of resources."""

    held: Holdings
    containers: frozenset[Holder]  # all that the kubelet lists: no plain init containers
    began: float = -math.inf  # when the reading began

    @cached_property
    def pods(self) -> frozenset[PodKey]:
        return frozenset(each.pod_key for each in self.containers)


class PairRecords:
    """Takes the part that concerns one pair out of each reading of the record.

    Readings repeat each other nearly: what did not change is the very same object as before, and all that was
    derived from it is kept, too.
    """

    def __init__(self, pair: ResourcePair) -> None:
        self._members = {resource_of(pair, member): member for member in PairMember}
        # By the identity of a holding, which is kept beside it, so that no other object comes to have it.
        self._known: dict[int, tuple[Holding, Held]] = {}
        self._newest = Holdings()

    def of(self, listed: PodList) -> Records:
        known, members = self._known, self._members
        self._known = {
            id(each): known.get(id(each)) or (each, _held(each, member))
            for each in listed.holdings
            # Of a pod whose names are not known only the checkpoint speaks: the kubelet's offer is newer.
            if each.namespace and (member := members.get(each.resource))
        }
        entries = tuple(held for _, held in self._known.values())
        if entries != self._newest.entries:
            self._newest = Holdings(entries)
        containers = frozenset(Holder(*names) for names in listed.containers)
        return Records(self._newest, containers, listed.began)


def _held(holding: Holding, member: PairMember) -> Held:
    holder = Holder(holding.namespace, holding.pod, holding.container)
    return Held(holder, member, holding.id_set, not holding.listed)


def resource_of(pair: ResourcePair, member: PairMember) -> str:
    return pair.core if member is PairMember.CORE else pair.memory


def askers(
    pair: ResourcePair,
    member: PairMember,
    size: int,
    records: Records | None,
    pods: Collection[Pod],
    reservations: Collection[Reservation],
) -> list[Asker]:
    """Containers that may be asking for `size` units. What is granted and not in the records yet counts, too.

    Without records every waiting pod of the node may be asking.
    """
    resource = resource_of(pair, member)
    served = {(each.pod.uid, each.holder.container) for each in reservations if member in each.granted}
    found: list[Asker] = []
    for pod in pods:
        if pod.finished or pod.ending or (records is not None and pod.key not in records.pods):
            continue
        wanting = [each for each in pod.containers if each.limits.get(resource)]
        held = records.held.by_pod.get(pod.key, ()) if records is not None else ()
        holding = {each.holder.container for each in held if each.member is member}
        # Containers before one that holds the resource were served.
        first = max((n for n, each in enumerate(wanting, 1) if each.name in holding), default=0)
        for container in wanting[first:]:
            if (pod.uid, container.name) in served:
                continue
            if container.limits[resource] == size:
                found.append(Asker(pod, container))
                break
            # That of a plain init container may be served: no record shows it without a readable checkpoint.
            if container.stage is not Stage.INIT:
                break
    # A pod that runs was admitted; only one whose resource was unknown then asks later, when none waits.
    return [asker for asker in found if asker.pod.status.phase == "Pending"] or found
