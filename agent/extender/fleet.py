"""The GPUs of a whole cluster and their holders, in whatever order changes arrive: pure, without a clock.

Built from the nodes' inventories and the bound pods. A choice counts from the moment it is assumed, before
the API server confirms it; the watch then takes over, or a deadline lets go of it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from agent.extender.choice import Picked, judge, pick
from agent.extender.free_capacity import FreeCapacity, PodClaim, Summary, free_capacity
from agent.extender.packing import Work
from agent.extender.pod_demand import PodDemand
from agent.model.demand import CORES
from agent.model.fragmentation import Mix
from agent.model.node_inventory import NodeInventory
from agent.model.placement import PlacementPolicy, usual_mix

UNKNOWN_NODE = "node not known to the extender"


@dataclass(frozen=True, slots=True)
class BoundPod:
    """A bound pod as the watch shows it. `confirmed`: its node's agent wrote the choice."""

    uid: str
    node: str
    claim: PodClaim
    confirmed: bool = False


@dataclass(frozen=True, slots=True)
class Assumed:
    """A choice of ours. It stays beside what the watch shows, since a pod's annotations may be forged."""

    node: str
    claim: PodClaim
    expires: float | None  # on the caller's clock, in seconds; None: the watch has shown the pod


@dataclass(slots=True)
class _Node:
    inventory: NodeInventory | None = None
    totals: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    known: bool = False
    claims: dict[str, PodClaim] = field(default_factory=dict)
    free: FreeCapacity | None = None


class Fleet:
    """The ledger of a cluster's GPUs. `on_change` gets the name of each node whose capacity changed."""

    def __init__(self, mix: Mix | None = None) -> None:
        self.mix = mix or usual_mix()
        self.on_change: Callable[[str], None] = lambda _: None
        self._nodes: dict[str, _Node] = {}
        self._pods: dict[str, BoundPod] = {}
        self._assumed: dict[str, Assumed] = {}

    # News

    def set_node(self, name: str, inventory: NodeInventory | None, totals: Mapping[str, int]) -> None:
        """A node appeared or changed; `totals` are allocatable units by resource."""
        node = self._nodes.setdefault(name, _Node())
        if node.known and node.inventory == inventory and node.totals == totals:
            return
        node.inventory, node.totals, node.known = inventory, totals, True
        self._touch(name)

    def drop_node(self, name: str) -> None:
        """A node is gone. Its pods are dropped one by one, as the watch shows their end."""
        if node := self._nodes.get(name):
            node.known, node.inventory, node.totals = False, None, MappingProxyType({})
            self._touch(name)
            self._drop_if_empty(name, node)

    def set_pod(self, pod: BoundPod) -> None:
        """The watch shows a bound pod that has not ended."""
        former = self._pods.get(pod.uid)
        if former == pod:
            return
        if former and former.node != pod.node:
            self._unclaim(former.node, pod.uid)
        self._pods[pod.uid] = pod
        if assumed := self._assumed.get(pod.uid):
            if assumed.node == pod.node:
                self._assumed[pod.uid] = replace(assumed, expires=None)
            else:  # somebody else bound it elsewhere
                self.forget(pod.uid)
        self._claim(pod.uid)

    def drop_pod(self, uid: str) -> None:
        for known in (self._pods.pop(uid, None), self._assumed.pop(uid, None)):
            if known:
                self._unclaim(known.node, uid)

    # Choices

    def assume(self, uid: str, node: str, claim: PodClaim, expires: float) -> None:
        """Count a choice that is about to be written, or is kept until its deadline."""
        former = self._assumed.get(uid)
        if former and former.node != node:
            self._unclaim(former.node, uid)
        self._assumed[uid] = Assumed(node, claim, expires)
        self._claim(uid)

    def forget(self, uid: str) -> None:
        """A choice was not written. What the watch shows stays."""
        if assumed := self._assumed.pop(uid, None):
            self._unclaim(assumed.node, uid)
            if uid in self._pods:
                self._claim(uid)

    def expire(self, now: float) -> list[str]:
        """Let go of choices that the watch has not shown in time; their pods' UIDs."""
        late = [
            uid for uid, each in self._assumed.items() if each.expires is not None and each.expires <= now
        ]
        for uid in late:
            self.forget(uid)
        return late

    def assumed(self, uid: str) -> PodClaim | None:
        """The choice for a pod that no watch has shown as bound; None: there is none."""
        known = self._assumed.get(uid)
        return known.claim if known and known.expires is not None else None

    def where(self, uid: str) -> str | None:
        """The node that a pod is bound to, or about to be; None: not placed."""
        known = self._pods.get(uid) or self._assumed.get(uid)
        return known.node if known else None

    # Questions

    @property
    def names(self) -> Iterable[str]:
        """Names of the nodes that there are."""
        return (name for name, node in self._nodes.items() if node.known)

    @property
    def pods(self) -> int:
        """Pods with GPUs that are bound, or assumed to be bound soon."""
        return len(self._pods.keys() | self._assumed.keys())

    @property
    def waiting(self) -> int:
        """Choices that the watch has not shown yet."""
        return sum(each.expires is not None for each in self._assumed.values())

    def inventory(self, name: str) -> NodeInventory | None:
        """The inventory that the node's agent published; None: no usable one."""
        node = self._nodes.get(name)
        return node.inventory if node else None

    def verdict_by_totals(self, name: str, demand: PodDemand, without: Collection[str] = ()) -> str:
        """Why a demand does not fit by allocatable units alone; empty: it fits. `without`: pods left out."""
        node = self._nodes.get(name)
        if node is None or not node.known:
            return UNKNOWN_NODE
        return _by_totals(node, demand, without)

    def offers_by_totals(self, name: str, demand: PodDemand) -> bool:
        """Whether a node without an inventory offers some of every resource of a demand."""
        node = self._nodes.get(name)
        return bool(
            node and node.inventory is None and all(node.totals.get(each, 0) for each, _ in demand.totals)
        )

    def free(self, name: str) -> FreeCapacity:
        node = self._nodes[name]
        if node.free is None:
            node.free = free_capacity(node.inventory or NodeInventory(), node.claims.values())
        return node.free

    def claims(self, name: str) -> Mapping[str, PodClaim]:
        """Who holds what on a node, by UID."""
        node = self._nodes.get(name)
        return MappingProxyType(node.claims if node else {})

    def verdict(
        self,
        name: str,
        demand: PodDemand,
        work: Work | None = None,
        alike: dict[Summary, str] | None = None,
    ) -> str:
        """Why a demand does not fit on a node; empty: it fits, and `pick` finds a choice.

        `work` counts what it takes. `alike` keeps what was found for nodes that are alike, for one demand.
        """
        node = self._nodes.get(name)
        if node is None or not node.known:
            return UNKNOWN_NODE
        if node.inventory is None:
            return _by_totals(node, demand)
        free = node.free or self.free(name)
        if alike is not None and free.summary in alike and len(demand.slots) == 1:
            return alike[free.summary]
        topology = node.inventory.topology
        return judge(free, demand, topology, work or Work(), {} if alike is None else alike)

    def pick(
        self, name: str, demand: PodDemand, policy: PlacementPolicy, work: Work | None = None
    ) -> Picked | None:
        """GPUs of a node for a demand; an empty choice where the node has no inventory."""
        node = self._nodes.get(name)
        if node is None or not node.known:
            return None
        if node.inventory is None:
            return None if _by_totals(node, demand) else Picked((), (float("inf"),))
        topology = node.inventory.topology
        return pick(self.free(name), demand, policy, self.mix, topology, work or Work())

    @property
    def without_inventory(self) -> int:
        """Nodes that offer GPU resources and have no inventory that can be used."""
        return sum(bool(node.totals) and node.inventory is None for node in self._nodes.values())

    def allocated(self, names: Iterable[str] | None = None) -> tuple[int, int]:
        """Hundredths of GPUs that are held, and all there are, on nodes with an inventory.

        `names`: of these nodes alone; None: of all.
        """
        held = there = 0
        for name in list(self._nodes) if names is None else names:
            node = self._nodes.get(name)
            if node and node.inventory:
                free = self.free(name)
                gpus = free.gpus
                capacity = CORES * (len(gpus) + free.all_units)
                there += capacity
                held += capacity - sum(gpu.cores for gpu in gpus) - CORES * free.units
        return held, there

    # Inside

    def _claim(self, uid: str) -> None:
        pod, assumed = self._pods.get(uid), self._assumed.get(uid)
        if pod is None:
            assert assumed is not None
            self._set_claim(assumed.node, uid, assumed.claim)
        elif assumed is not None and pod.claim.held is None and not pod.confirmed:
            self._set_claim(pod.node, uid, assumed.claim)
        else:
            self._set_claim(pod.node, uid, pod.claim)

    def _set_claim(self, name: str, uid: str, claim: PodClaim) -> None:
        self._nodes.setdefault(name, _Node()).claims[uid] = claim
        self._touch(name)

    def _unclaim(self, name: str, uid: str) -> None:
        node = self._nodes.get(name)
        if node and node.claims.pop(uid, None) is not None:
            self._touch(name)
            self._drop_if_empty(name, node)

    def _drop_if_empty(self, name: str, node: _Node) -> None:
        if not node.known and not node.claims:
            del self._nodes[name]

    def _touch(self, name: str) -> None:
        self._nodes[name].free = None
        self.on_change(name)


def _by_totals(node: _Node, demand: PodDemand, without: Collection[str] = ()) -> str:
    claims = [claim for uid, claim in node.claims.items() if uid not in without]
    for resource, count in demand.totals:
        used = sum(dict(claim.demand.totals).get(resource, 0) for claim in claims)
        free = max(0, node.totals.get(resource, 0) - used)
        if count > free:
            return f"{free} of {count} {resource} free by totals (no inventory)"
    return ""
