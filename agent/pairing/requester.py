"""Which container is asking: pure, from the record of who holds what and the pods' specs.

The kubelet takes a pod into its records just before it admits it, one pod after the other, and admits its
containers in order. So the container that asks is the first of its pod that lacks the resource, and of all
pods in the records only the one that is being admitted has such a container.
"""

from collections.abc import Collection
from dataclasses import dataclass

from agent.model.demand import Demand, InitContainerGroup, demand_of, init_group_of
from agent.model.holding import Holder, Record
from agent.model.ledger import PairHoldings, PairMember, Reservation
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


def resource_of(pair: ResourcePair, member: PairMember) -> str:
    return pair.core if member is PairMember.CORE else pair.memory


def askers(
    pair: ResourcePair,
    member: PairMember,
    size: int,
    record: Record | None,
    held: PairHoldings,
    pods: Collection[Pod],
    reservations: Collection[Reservation],
) -> list[Asker]:
    """Containers that may be asking for `size` units. What is granted and not in the record yet counts, too.

    Without a record any pod of the node may be asking, even one that is deleted while the kubelet admits it,
    and any of its containers that this process has not just served.
    """
    resource = resource_of(pair, member)
    served = {(each.pod.uid, each.holder.container) for each in reservations if member in each.granted}
    found: list[Asker] = []
    for pod in pods:
        if pod.finished or (record is not None and (pod.ending or pod.key not in record.pods)):
            continue
        wanting = [each for each in pod.containers if each.limits.get(resource)]
        # Containers before one that holds the resource were served.
        first = max(
            (
                n
                for n, each in enumerate(wanting, 1)
                if (Holder(*pod.key, each.name), member) in held.by_place
            ),
            default=0,
        )
        for container in wanting[first:]:
            if (pod.uid, container.name) in served:
                continue
            if matches := container.limits[resource] == size:
                found.append(Asker(pod, container))
            # That of a plain init container may be served: no record shows it without a readable checkpoint.
            if record is not None and (matches or container.stage is not Stage.INIT):
                break
    # A pod that runs was admitted; only one whose resource was unknown then asks later, when none waits.
    return [asker for asker in found if asker.pod.status.phase == "Pending"] or found
