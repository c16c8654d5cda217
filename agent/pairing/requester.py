"""Which container is asking: pure, from the record of who holds what and the pods' specs.

The kubelet takes a pod into its records just before it admits it, one pod after the other, and admits its
containers in order. So the container that asks is the first of its pod that lacks the resource, and of all
pods in the records only the one that is being admitted has such a container.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from agent.kubelet.podresources import Holding, PodList
from agent.model.demand import (
    Container,
    Demand,
    InitContainerGroup,
    Pod,
    ResourcePair,
    Stage,
    demand_of,
    init_group_of,
)
from agent.model.ledger import Held, Holder, Holdings, PairMember, Reservation

PodKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Asker:
    """A container that may be the one that asks."""

    pod: Pod
    container: Container

    @property
    def holder(self) -> Holder:
        """Its names."""
        return Holder(self.pod.namespace, self.pod.name, self.container.name)

    def demand(self, pair: ResourcePair) -> Demand:
        """What it asks of the pair. Raises Impossible."""
        found = demand_of(pair, self.container)
        assert found is not None  # it was found by its limits
        return found

    def group(self, pair: ResourcePair) -> InitContainerGroup | None:
        """The part of its pod that it shares GPUs with, if it inherits units. Raises Impossible."""
        group = init_group_of(pair, self.pod)
        return group if group and self.container.name in group.containers else None


class Known:
    """Entries made of the last answer: a holding that comes again as the same object keeps its entry."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Holding, Held]] = {}

    def entries(self, pair: ResourcePair, listed: PodList) -> tuple[Held, ...]:
        """The holdings of the pair."""
        members = {pair.core: PairMember.CORE, pair.memory: PairMember.MEMORY}
        made: dict[int, tuple[Holding, Held]] = {}
        for each in listed.holdings:
            # Of a pod that nobody can name only the checkpoint speaks: the kubelet's offer is newer.
            if each.namespace and (member := members.get(each.resource)):
                before = self._made.get(id(each))
                if before is None or before[0] is not each:
                    holder = Holder(each.namespace, each.pod, each.container)
                    before = (each, Held(holder, member, frozenset(each.ids), not each.listed))
                made[id(each)] = before
        self._made = made
        return tuple(held for _, held in made.values())


@dataclass(frozen=True)
class Records:
    """What the record says about one pair of resources."""

    held: Holdings
    containers: frozenset[Holder]  # all that the kubelet lists: no plain init containers

    @classmethod
    def of(cls, pair: ResourcePair, listed: PodList, known: Known) -> "Records":
        """The records for `pair`; `known` keeps what did not change."""
        return cls(
            Holdings(known.entries(pair, listed)), frozenset(Holder(*names) for names in listed.containers)
        )

    @cached_property
    def pods(self) -> frozenset[PodKey]:
        """Pods that the kubelet lists."""
        return frozenset(each.pod_key for each in self.containers)

    def lacks(self, pod: PodKey, member: PairMember) -> bool:
        """Whether a listed container of a pod holds nothing of a member."""
        return any(
            each.pod_key == pod and (each, member) not in self.held.by_place for each in self.containers
        )


def resource_of(pair: ResourcePair, member: PairMember) -> str:
    """The resource's name."""
    return pair.core if member is PairMember.CORE else pair.memory


def askers(
    pair: ResourcePair,
    member: PairMember,
    size: int,
    records: Records | None,
    pods: Mapping[PodKey, Pod],
    reservations: Collection[Reservation],
) -> list[Asker]:
    """Containers that may be asking for `size` units. What is granted and not in the records yet counts, too.

    Without records every waiting pod of the node may be asking.
    """
    served = {(each.pod.uid, each.holder.container) for each in reservations if member in each.granted}
    found = [
        asker
        for key, pod in pods.items()
        if not pod.finished
        and not pod.ending
        and (records is None or key in records.pods)
        and (asker := _asker(pair, member, size, records, pod, served))
    ]
    # A pod that runs was admitted; only one whose resource was unknown then asks later, when none waits.
    waiting = [asker for asker in found if asker.pod.phase == "Pending"]
    return waiting or found


def _asker(
    pair: ResourcePair,
    member: PairMember,
    size: int,
    records: Records | None,
    pod: Pod,
    served: Collection[tuple[str, str]],
) -> Asker | None:
    resource = resource_of(pair, member)
    wanting = [each for each in pod.containers if each.limits.get(resource)]
    if records is not None:
        holding = [
            place
            for place, each in enumerate(wanting)
            if (Holder(pod.namespace, pod.name, each.name), member) in records.held.by_place
        ]
        # Containers before one that holds the resource were served.
        wanting = wanting[max(holding) + 1 :] if holding else wanting
    for container in wanting:
        if (pod.uid, container.name) in served:
            continue
        if container.limits[resource] == size:
            return Asker(pod, container)
        if container.stage is not Stage.INIT:
            return None
        # Without a readable checkpoint the records do not show it: it may have been served before.
    return None


def same_outcome(pair: ResourcePair, candidates: Collection[Asker]) -> bool:
    """Whether it makes no difference which of them is asking. Raises Impossible."""
    outcomes = {(each.demand(pair), each.group(pair), _wishes(each.pod)) for each in candidates}
    return len(outcomes) == 1


def _wishes(pod: Pod) -> frozenset[tuple[str, str]]:
    prefixes = ("tencent.com/", "gpu-node-agent.io/")
    return frozenset(item for item in pod.annotations.items() if item[0].startswith(prefixes))
