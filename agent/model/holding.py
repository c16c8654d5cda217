"""Who holds what: one record for the whole agent, and the ledger of units that follows. Values alone."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, Self

from agent.model.modes import MODE_OF_UNIT, REPLICA, SEPARATOR, BadDeviceId, Mode, ResourcePair, Unit, parse
from agent.model.placement import FreeGpu
from agent.model.pod import CORES, Demand, Pod
from agent.model.resource_claim import ClaimedShare

# Resources that vGPU containers have beyond what their pods asked for.

Place = tuple[str, str, str, str]  # namespace, pod, container, GPU (UUID)


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one container, or of all of a GPU together: nobody else is offered it."""

    memory_bytes: int = 0
    cores: int = 0  # percent of the GPU


def by_gpu(grown: Mapping[Place, Growth]) -> dict[str, Growth]:
    """By GPU (UUID), of containers by namespace, pod, name and GPU."""
    found: dict[str, Growth] = {}
    for (_, _, _, gpu), growth in grown.items():
        before = found.get(gpu, Growth())
        found[gpu] = Growth(before.memory_bytes + growth.memory_bytes, before.cores + growth.cores)
    return found


# Who holds what: one record for the whole agent, as its room `agent.holdings` reads it. Values alone.


class Holder(NamedTuple):
    """A container by its names."""

    namespace: str
    pod: str
    container: str

    @property
    def pod_key(self) -> tuple[str, str]:
        """Namespace and name of the pod."""
        return (self.namespace, self.pod)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.pod}, container {self.container}"


class Source(Enum):
    """Where it stands that a container holds something."""

    LISTED = "listed"  # in the kubelet's PodResources
    CHECKPOINT = "checkpoint"  # in its checkpoint alone, as with plain init containers
    FORGOTTEN = "forgotten"  # the same, of before: this kubelet knows nothing of it, and may ask for it again
    CLAIM = "claim"  # in its PodResources, as a device of a ResourceClaim


@dataclass(frozen=True)
class Holding:
    """Devices of one resource that one container holds. A container without any has no entry.

    By a claim: one device, which `share` describes in the place of IDs.
    """

    namespace: str
    pod: str
    container: str
    resource: str
    ids: tuple[str, ...]
    source: Source = Source.LISTED
    share: ClaimedShare | None = None

    @cached_property
    def holder(self) -> Holder:
        return Holder(self.namespace, self.pod, self.container)

    @cached_property
    def pod_key(self) -> tuple[str, str]:
        """Namespace and name of the pod."""
        return (self.namespace, self.pod)

    @property
    def listed(self) -> bool:
        """Whether the kubelet lists it; else a plain init container may hold it, whether it runs or not."""
        return self.source in (Source.LISTED, Source.CLAIM)

    @cached_property
    def id_set(self) -> frozenset[str]:
        return frozenset(self.ids)

    def units_of(self, gpu: str) -> Mapping[str, int]:
        """How much of a GPU it is, by what is counted."""
        share = self.share
        if share is None:
            count = sum(text.partition(SEPARATOR)[0] == gpu for text in self.ids)
            return {self.resource: count} if count else {}
        if share.gpu != gpu:
            return {}
        pair = share.mode.row.pair
        return {pair.core: share.cores, pair.memory: share.memory} if pair else {share.mode.resources[0]: 1}

    @cached_property
    def amounts(self) -> Mapping[tuple[str, Unit], int]:
        """How many units of each kind of each GPU its IDs are, without those that nobody can read.

        Worked out once: holdings are the same objects in every record until somebody holds something else.
        """
        found: dict[tuple[str, Unit], int] = {}
        for text in self.ids:
            with suppress(BadDeviceId):
                device = parse(text)
                key = device.gpu, device.unit
                found[key] = found.get(key, 0) + 1
        return found

    @cached_property
    def readable(self) -> bool:
        """Whether each of its IDs can be read."""
        return sum(self.amounts.values()) == len(self.ids)

    @cached_property
    def gpus(self) -> frozenset[str]:
        """The UUIDs with which its IDs begin."""
        if self.share:
            return frozenset({self.share.gpu})
        return frozenset(text.partition(SEPARATOR)[0] for text in self.ids)


@dataclass(frozen=True, slots=True)
class GpuHolder:
    """A container that holds units of a GPU, and in which mode it got them."""

    mode: Mode
    replica: bool  # of a time-sliced GPU
    holding: Holding

    @property
    def pod(self) -> str:
        """namespace/name of the pod."""
        return f"{self.holding.namespace}/{self.holding.pod}".removeprefix("/")


def nameless(uid: str) -> tuple[str, str]:
    """The key of a pod that the checkpoint alone has, and whose names nobody says."""
    return "", f"pod with UID {uid}"


@dataclass(frozen=True)
class Record:
    """Who holds what, by one reading. Kubelets before 1.34 list finished pods too."""

    holdings: tuple[Holding, ...] = ()
    # Every container that the kubelet lists, holding or not.
    containers: tuple[tuple[str, str, str], ...] = ()
    # UIDs of pods that are over by the API server; the kubelet knows nothing of it.
    ended: frozenset[str] = frozenset()
    # UIDs of pods that ask for devices and are not over by the API server, as far as it is known, and of
    # those that hold some by the kubelet though their object is gone: a static pod's mirror may be deleted.
    unfinished: frozenset[str] = frozenset()
    # UIDs of pods that hold devices by the kubelet's checkpoint, by namespace and name.
    uids: Mapping[tuple[str, str], str] = field(default_factory=dict)
    away: bool = False  # the API server is asked, and does not say now which pods there are
    # Pods that the kubelet lists and it does not show now; none where it is not asked.
    unshown: frozenset[tuple[str, str]] = frozenset()
    parents: Mapping[str, str] = field(default_factory=dict)  # instance -> its GPU, both by UUID
    # Those of the holdings that the kubelet does not list now, of pods that live by what else is known.
    hidden: tuple[Holding, ...] = field(default=(), compare=False)
    # Pods of which the kubelet may be admitting one. It takes up one after the other: all that were listed
    # before others are admitted by now, or rejected.
    newcomers: frozenset[tuple[str, str]] = field(default=frozenset(), compare=False)
    # Units of each pod that the kubelet's checkpoint names, and that is over or whose name nobody knows: one
    # that has just started offers them to nobody before it has heard of all pods.
    leftover: tuple[frozenset[str], ...] = field(default=(), compare=False)
    # When the reading began, by the monotonic clock in seconds: what was granted later is not in it.
    began: float = field(default=-math.inf, compare=False)
    # A moment of that clock: the checkpoint that was read has been written later. Without one it is `began`.
    written: float = field(default=-math.inf, compare=False)
    # When the first reading of this kubelet began. What was granted before, and its checkpoint does not show,
    # the kubelet before had not written down when it ended, and had started nobody with.
    kubelet_since: float = field(default=-math.inf, compare=False)

    @cached_property
    def pods(self) -> frozenset[tuple[str, str]]:
        """Namespaces and names of the pods that the kubelet lists."""
        return frozenset(names[:2] for names in self.containers)

    @cached_property
    def uuids(self) -> frozenset[str]:
        """GPUs and instances of which anything is held."""
        return frozenset[str]().union(*(each.gpus for each in self.holdings))

    @cached_property
    def by_gpu(self) -> Mapping[str, Sequence[GpuHolder]]:
        """Who holds what of each GPU, by UUID. Resources of other plugins are passed over."""
        found: dict[str, dict[GpuHolder, None]] = {}
        for holding in self.holdings:
            if share := holding.share:
                found.setdefault(share.gpu, {})[GpuHolder(share.mode, replica=False, holding=holding)] = None
            for gpu, unit in holding.amounts:
                holder = GpuHolder(MODE_OF_UNIT[unit], unit is REPLICA, holding)
                found.setdefault(self.parents.get(gpu, gpu), {})[holder] = None
        return {gpu: list(holders) for gpu, holders in found.items()}


# Which units of which GPU are held, reserved or free: a frozen ledger, rebuilt from the record of holders.
#
# It is no record of its own: reservations live for seconds, from the first of a container's calls until the
# record shows the pair.


class PairMember(Enum):
    CORE = "core"
    MEMORY = "memory"

    # Enum's own is a call of Python, and a place in a record is looked up by container and member.
    __hash__ = object.__hash__

    @property
    def other(self) -> "PairMember":
        return PairMember.MEMORY if self is PairMember.CORE else PairMember.CORE


@dataclass(frozen=True, slots=True)
class UnitPool:
    """All units of one GPU, as device IDs, in order of their numbers."""

    gpu: str
    index: int
    cores: tuple[str, ...]
    blocks: tuple[str, ...]
    core_set: frozenset[str]
    block_set: frozenset[str]
    offerable: bool = True  # healthy, in this mode and not draining
    keeps: bool = True  # healthy and in this mode: what was reserved of it is handed out, draining or not
    drains: bool = False  # it keeps, and is offered to nobody new: a pod that has begun on it goes on there

    @classmethod
    def of(cls, pair: ResourcePair, gpu: str, index: int, memory_bytes: int) -> Self:
        """The pool of a GPU of that size: 100 cores and its whole blocks of memory."""
        core, memory = pair.core_unit.mark, pair.memory_unit.mark
        cores = tuple(f"{gpu}{SEPARATOR}{core}{n}" for n in range(CORES))
        blocks = tuple(f"{gpu}{SEPARATOR}{memory}{n}" for n in range(pair.blocks(memory_bytes)))
        return cls(gpu, index, cores, blocks, frozenset(cores), frozenset(blocks))

    def without(self, ids: frozenset[str]) -> Self:
        """The pool without some units; the same object where it has none of them."""
        if not ids & self.block_set and not ids & self.core_set:
            return self
        cores = tuple(each for each in self.cores if each not in ids)
        blocks = tuple(each for each in self.blocks if each not in ids)
        return replace(
            self, cores=cores, blocks=blocks, core_set=frozenset(cores), block_set=frozenset(blocks)
        )

    def ids(self, member: PairMember) -> tuple[str, ...]:
        return self.cores if member is PairMember.CORE else self.blocks

    def id_set(self, member: PairMember) -> frozenset[str]:
        """Units of one resource, to look up in."""
        return self.core_set if member is PairMember.CORE else self.block_set


@dataclass(frozen=True)
class PairHoldings:
    """All that containers hold of one pair, with what is often asked of it worked out once."""

    cores: tuple[Holding, ...] = ()
    blocks: tuple[Holding, ...] = ()

    @classmethod
    def of(cls, pair: ResourcePair, record: Record) -> Self:
        """That of a record, without pods of unknown names: the kubelet's offer is newer than those."""
        named = [each for each in record.holdings if each.namespace]
        cores = tuple(each for each in named if each.resource == pair.core)
        return cls(cores, tuple(each for each in named if each.resource == pair.memory))

    @cached_property
    def ids(self) -> frozenset[str]:
        return frozenset().union(*(each.id_set for each in (*self.cores, *self.blocks)))

    @cached_property
    def by_place(self) -> Mapping[tuple[Holder, PairMember], frozenset[str]]:
        """Units of each member that each container holds by the kubelet's own word."""
        both = ((PairMember.CORE, self.cores), (PairMember.MEMORY, self.blocks))
        return {
            (each.holder, member): each.id_set
            for member, holdings in both
            for each in holdings
            if each.source is not Source.FORGOTTEN
        }

    @cached_property
    def by_pod(self) -> Mapping[tuple[str, str], Sequence[Holding]]:
        """Those of each pod, by its namespace and name."""
        found: dict[tuple[str, str], list[Holding]] = {}
        for each in (*self.cores, *self.blocks):
            found.setdefault(each.pod_key, []).append(each)
        return found

    @cached_property
    def large(self) -> tuple[frozenset[str], ...]:
        """Cores of containers that hold as many as a GPU has, or more."""
        return tuple(each.id_set for each in self.cores if len(each.ids) >= CORES)


@dataclass(frozen=True, slots=True)
class Reservation:
    """A pair reserved for a container. The IDs of a member are known once they were answered."""

    holder: Holder
    pod: Pod
    demand: Demand
    gpus: tuple[str, ...]  # in order of index; one for a share
    expires: float  # on the caller's clock, in seconds
    core_ids: frozenset[str] | None = None
    block_ids: frozenset[str] | None = None
    granted: frozenset[PairMember] = frozenset()  # members whose Allocate was answered
    blind: bool = False  # made without a record: for a kubelet that no reading has seen yet, maybe
    succeeds: bool = False  # what the last record says of the pod's name is an earlier pod's

    def ids(self, member: PairMember) -> frozenset[str] | None:
        """The IDs answered for a member; None: not yet."""
        return self.core_ids if member is PairMember.CORE else self.block_ids

    def needs(self, member: PairMember) -> int:
        """Units of a member that the container asks for."""
        return self.demand.cores if member is PairMember.CORE else self.demand.blocks

    @property
    def complete(self) -> bool:
        """Whether every member that was asked for is granted."""
        return all(member in self.granted for member in PairMember if self.needs(member))

    def shown(self, held: PairHoldings) -> bool:
        """Whether a record shows all of it."""
        return self.complete and self._shown(held, frozenset(PairMember))

    def goes_on(self, held: PairHoldings) -> bool:
        """Whether its container has by a record what was granted of it, and is to get the other member."""
        return bool(self.granted) and not self.complete and self._shown(held, self.granted)

    def _shown(self, held: PairHoldings, members: frozenset[PairMember]) -> bool:
        return all(
            held.by_place.get((self.holder, member), frozenset()) >= (self.ids(member) or frozenset())
            for member in members
        )

    def with_ids(self, member: PairMember, ids: frozenset[str]) -> Self:
        """With the answer to GetPreferredAllocation."""
        return replace(self, core_ids=ids) if member is PairMember.CORE else replace(self, block_ids=ids)

    def with_grant(self, member: PairMember) -> Self:
        """With a member handed out."""
        return replace(self, granted=self.granted | {member})


@dataclass(frozen=True)
class Ledger:
    """Stocks, holdings and reservations of one pair of resources on one node."""

    pools: Mapping[str, UnitPool] = field(default_factory=lambda: MappingProxyType({}))
    held: PairHoldings = PairHoldings()
    reservations: tuple[Reservation, ...] = ()

    @cached_property
    def kept_ids(self) -> frozenset[str]:
        """All IDs that are held or reserved."""
        return self.held.ids | self.reserved_ids if self.reservations else self.held.ids

    @cached_property
    def reserved_ids(self) -> frozenset[str]:
        """All IDs that were answered to somebody and may not be in the records yet."""
        answered = (each.ids(member) for each in self.reservations for member in PairMember)
        return frozenset().union(*(ids for ids in answered if ids is not None))

    @cached_property
    def whole(self) -> frozenset[str]:
        """GPUs of which one container holds all cores."""
        large = [*self.held.large]
        reserved = (each.core_ids for each in self.reservations if each.complete)
        # One may hold all cores that are left in a pool from which others have grown: that is no whole GPU.
        large += [ids for ids in reserved if ids and len(ids) >= CORES]
        pools = [each for each in self.pools.values() if each.core_set]
        return frozenset(pool.gpu for pool in pools for ids in large if pool.core_set <= ids)

    def reservation(self, holder: Holder) -> Reservation | None:
        return next((each for each in self.reservations if each.holder == holder), None)

    def observed(self, held: PairHoldings, over: Callable[[Reservation], bool]) -> Self:
        """With what the record says now. Reservations end that it shows, and those that are over."""
        kept = tuple(each for each in self.reservations if not each.shown(held) and not over(each))
        same = self.held == held
        if same and len(kept) == len(self.reservations):
            return self
        return replace(self, held=self.held if same else held, reservations=kept)

    def expired(self, now: float) -> Self:
        return self.without(lambda each: each.expires <= now)

    def reserved(self, reservation: Reservation) -> Self:
        """With a reservation, in the place of an earlier one for the same container."""
        others = tuple(each for each in self.reservations if each.holder != reservation.holder)
        return replace(self, reservations=(*others, reservation))

    def without(self, over: Callable[[Reservation], bool]) -> Self:
        kept = tuple(each for each in self.reservations if not over(each))
        return self if len(kept) == len(self.reservations) else replace(self, reservations=kept)

    def free_units(self, gpu: str, member: PairMember) -> list[str]:
        """Units of a GPU that are nobody's, nor will be by what is reserved, in order."""
        pool, kept = self.pools.get(gpu), self.kept_ids
        if pool is None or not pool.offerable:
            return []
        # A container that has a GPU reserved, and not yet which units of it.
        coming = sum(
            each.needs(member) for each in self.reservations if gpu in each.gpus and each.ids(member) is None
        )
        free = [each for each in pool.ids(member) if each not in kept]
        return free[coming:]

    def taken(self, asking: Holder, own: frozenset[str] = frozenset()) -> frozenset[str]:
        """IDs that cannot come to a container: held by others, or reserved for them.

        `own`: IDs that come to it though they are held, as it inherits them, or has them already.
        """
        others = (each for each in self.reservations if each.holder != asking)
        reserved = [ids for each in others for member in PairMember if (ids := each.ids(member))]
        # Thousands of IDs are held on a large node: they are copied only where something differs.
        taken = self.held.ids.union(*reserved) if reserved else self.held.ids
        return taken - own if own else taken

    def taken_of(self, ids: frozenset[str], asking: Holder, own: frozenset[str]) -> frozenset[str]:
        """Those of `ids` that cannot come to a container, as in `taken`, without going through all units."""
        wanted = ids - own
        others = (each for each in self.reservations if each.holder != asking)
        reserved = (each.ids(member) or frozenset() for each in others for member in PairMember)
        return frozenset().union(wanted & self.held.ids, *(wanted & each for each in reserved))

    def free_gpus(
        self,
        asking: Holder,
        taken: frozenset[str],
        own: frozenset[str] = frozenset(),
        begun: frozenset[str] = frozenset(),
    ) -> dict[str, FreeGpu]:
        """Free units of each offerable GPU for a container, by UUID: not `taken`, and not owed to others.

        `begun`: units that its pod has for certain; it goes on where these lie though no other is served.
        """
        others = [each for each in self.reservations if each.holder != asking]
        goes_on = {each.partition(SEPARATOR)[0] for each in begun}
        shut = self.whole - {each.partition(SEPARATOR)[0] for each in own}
        # One of an init container whose cores the asking one inherits shuts its heir out of nothing.
        strangers = (each for each in others if not (each.core_ids and each.core_ids <= own))
        shut |= {gpu for each in strangers if each.demand.whole for gpu in each.gpus}
        owed = {gpu: [0, 0] for gpu in self.pools}
        for each in others:
            if not each.demand.whole and each.gpus[0] in owed:
                owed[each.gpus[0]][0] += each.demand.cores if each.core_ids is None else 0
                owed[each.gpus[0]][1] += each.demand.blocks if each.block_ids is None else 0
        return {
            pool.gpu: _free_gpu(pool, taken, owed[pool.gpu], pool.gpu in shut)
            for pool in self.pools.values()
            if pool.offerable or (pool.drains and pool.gpu in goes_on)
        }


def _free_gpu(pool: UnitPool, taken: frozenset[str], owed: list[int], shut: bool) -> FreeGpu:
    if shut:
        return FreeGpu(pool.gpu, pool.index, 0, 0, len(pool.blocks), untouched=False)
    cores = len(pool.core_set - taken) - owed[0]
    blocks = len(pool.block_set - taken) - owed[1]
    untouched = cores == CORES and blocks == len(pool.blocks)
    return FreeGpu(pool.gpu, pool.index, max(0, cores), max(0, blocks), len(pool.blocks), untouched)
