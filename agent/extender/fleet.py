"""The GPUs of a whole cluster and their holders, in whatever order changes arrive: pure, without a clock.

Built from the nodes' inventories and the bound pods. A choice counts from the moment it is assumed, before
the API server confirms it; the watch then takes over. A deadline lets go of one that was never confirmed,
a newer list without the pod of one that was.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from agent.extender.choice import Picked, judge, pick
from agent.extender.free_capacity import FreeCapacity, PodClaim, Summary, free_capacity
from agent.extender.packing import SearchWork
from agent.extender.pod_demand import WHOLE_GPUS, PodDemand
from agent.model.node_inventory import NodeInventory
from agent.model.placement import Mix, PlacementPolicy, usual_mix
from agent.model.pod import CORES

UNKNOWN_NODE = "node not known to the extender"


@dataclass(frozen=True, slots=True)
class LedgerNode:
    """A node as the watch shows it. `totals`: allocatable units by resource."""

    name: str
    inventory: NodeInventory | None  # that its agent published; None: no usable one
    totals: Mapping[str, int]
    problem: str = ""  # why an inventory that is there cannot be used


@dataclass(frozen=True, slots=True)
class BoundPod:
    """A bound pod as the watch shows it. `confirmed`: its node's agent wrote the choice."""

    uid: str
    node: str
    claim: PodClaim
    confirmed: bool = False
    repels: bool = False  # its required anti-affinity may keep other pods off the node


@dataclass(frozen=True, slots=True)
class Assumed:
    """A choice of ours. It stays beside what the watch shows, since a pod's annotations may be forged."""

    node: str
    claim: PodClaim
    expires: float  # on the caller's clock, in seconds; infinite: the watch has shown the pod
    gang: str = ""  # for a member of which it is kept before it is bound
    confirmed: float = math.inf  # when the API server answered that the pod is bound; infinite: it has not


class Fleet:
    """The ledger of a cluster's GPUs. `on_change` gets the name of each node whose capacity changed."""

    def __init__(self, mix: Mix | None = None) -> None:
        self.mix = mix or usual_mix()
        self.on_change: Callable[[str], None] = lambda _: None
        self._nodes: dict[str, LedgerNode] = {}
        self._pods: dict[str, BoundPod] = {}
        self._assumed: dict[str, Assumed] = {}
        self._claims: dict[str, dict[str, PodClaim]] = {}  # by node, also of nodes that are not there
        self._free: dict[str, FreeCapacity] = {}
        # Of nodes on which a demand of one slot is judged by no more than these figures, by name.
        self.summaries: dict[str, Summary] = {}
        self._replicas: dict[str, dict[str, int]] = {}  # pods by node, for each owner whose replicas spread

    # News

    def set_node(self, node: LedgerNode) -> None:
        """A node appeared or changed."""
        if self._nodes.get(node.name) != node:
            self._nodes[node.name] = node
            self._touch(node.name)

    def drop_node(self, name: str) -> None:
        """A node is gone. Its pods are dropped one by one, as the watch shows their end."""
        if self._nodes.pop(name, None):
            self._touch(name)

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
                self._assumed[pod.uid] = replace(assumed, expires=math.inf)
            else:  # somebody else bound it elsewhere
                self.forget(pod.uid)
        self._claim(pod.uid)

    def drop_pod(self, uid: str) -> None:
        for known in (self._pods.pop(uid, None), self._assumed.pop(uid, None)):
            if known:
                self._unclaim(known.node, uid)

    # Choices

    def assume(self, uid: str, node: str, claim: PodClaim, expires: float, gang: str = "") -> None:
        """Count a choice that is about to be written, or is kept for a member of `gang` till its deadline."""
        former = self._assumed.get(uid)
        if former and former.node != node:
            self._unclaim(former.node, uid)
        self._assumed[uid] = Assumed(node, claim, expires, gang)
        self._claim(uid)

    def forget(self, uid: str) -> None:
        """A choice was not written. What the watch shows stays."""
        if assumed := self._assumed.pop(uid, None):
            self._unclaim(assumed.node, uid)
            if uid in self._pods:
                self._claim(uid)

    def confirm(self, uid: str, now: float) -> None:
        """The API server answered that a pod is bound: its choice stays until a list newer than `now`."""
        if (assumed := self._assumed.get(uid)) and assumed.expires < math.inf:
            self._assumed[uid] = replace(assumed, confirmed=now)

    def unlisted(self, uids: Collection[str], asked: float) -> None:
        """A list asked for at `asked` has these pods and no other: those confirmed before have ended."""
        for uid in [uid for uid, each in self._assumed.items() if each.confirmed < asked]:
            if uid not in uids:
                self.drop_pod(uid)

    def unshown_since(self) -> float:
        """When the oldest binding was confirmed that the watch has not shown; infinite: there is none."""
        waiting = (each.confirmed for each in self._assumed.values() if each.expires < math.inf)
        return min(waiting, default=math.inf)

    def expire(self, now: float, heard: float = math.inf) -> list[str]:
        """Let go of choices that were neither shown nor confirmed in time; their pods' UIDs.

        `heard`: when the watch of bound pods last showed life. One that was silent since a Binding's deadline
        may yet show it; what is only kept for a gang was never written.
        """
        late = [
            uid
            for uid, each in self._assumed.items()
            if each.confirmed == math.inf and each.expires <= (now if each.gang else min(now, heard))
        ]
        for uid in late:
            self.forget(uid)
        return late

    def assumed(self, uid: str) -> Assumed | None:
        """The choice for a pod that no watch has shown as bound; None: there is none."""
        known = self._assumed.get(uid)
        return known if known and known.expires < math.inf else None

    def where(self, uid: str) -> str | None:
        """The node that a pod is bound to, or about to be; None: not placed."""
        known = self._pods.get(uid) or self._assumed.get(uid)
        return known.node if known else None

    # Questions

    @property
    def nodes(self) -> Mapping[str, LedgerNode]:
        """The nodes that there are, by name."""
        return MappingProxyType(self._nodes)

    @property
    def bound(self) -> Mapping[str, BoundPod]:
        """Pods that the watch shows, by UID."""
        return MappingProxyType(self._pods)

    @property
    def pods(self) -> int:
        """Pods with GPUs that are bound, or assumed to be bound soon."""
        return len(self._pods.keys() | self._assumed.keys())

    @property
    def waiting(self) -> int:
        """Choices that the watch has not shown yet."""
        return sum(each.expires < math.inf for each in self._assumed.values())

    def inventory(self, name: str) -> NodeInventory | None:
        """The inventory that the node's agent published; None: no usable one."""
        node = self._nodes.get(name)
        return node.inventory if node else None

    def by_totals(self, name: str, demand: PodDemand) -> bool:
        """Whether a node's allocatable units alone say whether a demand fits.

        MIG instances are of one size where a GPU's own name offers them (`mig.strategy: single`), and the
        inventory counts none.
        """
        inventory = self.inventory(name)
        if inventory is None or inventory.by_claims:
            return True
        whole = bool(demand.gpus) and not demand.slots
        return whole and any(gpu.mode.row.partitioned for gpu in inventory.gpus)

    def verdict_by_totals(self, name: str, demand: PodDemand, without: Collection[str] = ()) -> str:
        """Why a demand does not fit by allocatable units alone; empty: it fits. `without`: pods left out."""
        node = self._nodes.get(name)
        if node is None:
            return UNKNOWN_NODE
        claims = [claim for uid, claim in self.claims(name).items() if uid not in without]
        others = self.of_other_doors(name, demand)
        for resource, count in demand.totals:
            if resource in others:
                continue
            used = sum(dict(claim.demand.totals).get(resource, 0) for claim in claims)
            free = max(0, node.totals.get(resource, 0) - used)
            if count > free:
                why = "" if node.inventory else " (no inventory)"
                return f"{free} of {count} {resource} free by totals{why}"
        return ""

    def of_other_doors(self, name: str, demand: PodDemand) -> tuple[str, ...]:
        """Resources of a demand that a node has by another door, if at all, as by a DRA driver.

        It lists none, and has no agent of ours, or one that offers all by DRA. It passes: kube-scheduler has
        judged that.
        """
        node = self._nodes.get(name)
        if node is None or node.problem or (node.inventory and not node.inventory.by_claims):
            return ()
        ours = node.inventory is not None  # a plugin of no units may stand beside it
        return tuple(
            resource
            for resource in demand.whole_gpus
            if resource not in node.totals or (ours and not node.totals[resource])
        )

    def free(self, name: str) -> FreeCapacity:
        """Free capacity of a node that there is."""
        found = self._free.get(name)
        if found is None:
            inventory = self._nodes[name].inventory or NodeInventory()
            found = self._free[name] = free_capacity(inventory, self.claims(name).values())
            if (summary := found.summary) and not inventory.by_claims:
                self.summaries[name] = summary
        return found

    def claims(self, name: str) -> Mapping[str, PodClaim]:
        """Who holds what on a node, by UID."""
        return MappingProxyType(self._claims.get(name, {}))

    def verdict(
        self,
        name: str,
        demand: PodDemand,
        work: SearchWork | None = None,
        alike: dict[Summary, str] | None = None,
    ) -> str:
        """Why a demand does not fit on a node; empty: it fits, and `pick` finds a choice.

        `work` counts what it takes. `alike` keeps what was found for nodes that are alike, for one demand.
        """
        inventory = self.inventory(name)
        if inventory is None or self.by_totals(name, demand):
            return self.verdict_by_totals(name, demand)
        if demand.gpus and (reason := self._other_name(name, demand)):
            return reason
        return judge(self.free(name), demand, inventory, work or SearchWork(), {} if alike is None else alike)

    def pick(
        self,
        name: str,
        demand: PodDemand,
        policy: PlacementPolicy,
        work: SearchWork | None = None,
        owner: str = "",
    ) -> Picked | None:
        """GPUs of a node for a demand; an empty choice where the node has no inventory.

        `owner`: away from its replicas, as far as there is room.
        """
        inventory = self.inventory(name)
        if inventory is None or self.by_totals(name, demand):
            return None if self.verdict_by_totals(name, demand) else Picked((), (math.inf,))
        if demand.gpus and self._other_name(name, demand):
            return None
        siblings = self._siblings(name, owner) if name in self.replicas(owner) else None
        work = work or SearchWork()
        return pick(self.free(name), demand, policy, self.mix, inventory.topology, work, siblings)

    def replicas(self, owner: str) -> Mapping[str, int]:
        """Pods of an owner by node."""
        return self._replicas.get(owner, {})

    def allocated(self, names: Iterable[str] | None = None) -> tuple[int, int]:
        """Hundredths of GPUs that are held, and all there are, on nodes with an inventory.

        `names`: of these nodes alone; None: of all.
        """
        held = there = 0
        for name in list(self._nodes) if names is None else names:
            if self.inventory(name):
                free = self.free(name)
                capacity = CORES * (len(free.gpus) + free.all_units)
                there += capacity
                held += capacity - sum(gpu.cores for gpu in free.gpus) - CORES * free.units
        return held, there

    # Inside

    def _other_name(self, name: str, demand: PodDemand) -> str:
        """Why whole GPUs of a node are not those that are asked for: time slices may be renamed."""
        offered = [each for each in WHOLE_GPUS if self._nodes[name].totals.get(each)]
        if not offered or set(demand.whole_gpus) <= set(offered):
            return ""
        return f"its GPUs are offered as {offered[0]}"

    def _claim(self, uid: str) -> None:
        pod, assumed = self._pods.get(uid), self._assumed.get(uid)
        if pod is None:
            assert assumed is not None
            self._set_claim(assumed.node, uid, assumed.claim)
        elif assumed is not None and pod.claim.held is None and not pod.confirmed:
            self._set_claim(pod.node, uid, assumed.claim)
        else:
            self._set_claim(pod.node, uid, pod.claim)

    def _siblings(self, name: str, owner: str) -> Mapping[int, int]:
        """Replicas of an owner on each GPU of a node, as far as it is known."""
        inventory = self.inventory(name) or NodeInventory()
        index = {gpu.uuid: gpu.index for gpu in inventory.gpus}
        found: Counter[int] = Counter()
        for claim in self.claims(name).values():
            if claim.owner == owner:
                held = {index[each.uuid] for each in claim.held or () if each.uuid in index}
                found.update(held or {at for indices in claim.chosen or () for at in indices})
        return found

    def _count(self, owner: str, name: str, change: int) -> None:
        if owner:
            nodes = self._replicas.setdefault(owner, {})
            nodes[name] = nodes.get(name, 0) + change
            if not nodes[name]:
                del nodes[name]
            if not nodes:
                del self._replicas[owner]

    def _set_claim(self, name: str, uid: str, claim: PodClaim) -> None:
        claims = self._claims.setdefault(name, {})
        if former := claims.get(uid):
            self._count(former.owner, name, -1)
        claims[uid] = claim
        self._count(claim.owner, name, 1)
        self._touch(name)

    def _unclaim(self, name: str, uid: str) -> None:
        claims = self._claims.get(name, {})
        if (claim := claims.pop(uid, None)) is not None:
            self._count(claim.owner, name, -1)
            if not claims:
                del self._claims[name]
            self._touch(name)

    def _touch(self, name: str) -> None:
        self._free.pop(name, None)
        self.summaries.pop(name, None)
        self.on_change(name)
