"""Which units of which GPU are held, promised or free: a frozen ledger, rebuilt from the kubelet's records.

It is no record of its own: `held` is what PodResources says, reservations are promises that live for
seconds, from the first of a container's calls until the kubelet's records show the pair.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Self

from agent.model.demand import CORES, Demand, Kind
from agent.model.ids import SEPARATOR


class Half(Enum):
    """One of the two resources of a pair."""

    CORE = "core"
    MEMORY = "memory"

    @property
    def other(self) -> "Half":
        """The other one."""
        return Half.MEMORY if self is Half.CORE else Half.CORE


@dataclass(frozen=True, slots=True)
class Holder:
    """A container by its names, as PodResources tells them."""

    namespace: str
    pod: str
    container: str

    @property
    def pod_key(self) -> tuple[str, str]:
        """Namespace and name of the pod."""
        return (self.namespace, self.pod)

    @property
    def nameless(self) -> bool:
        """Whether it stands for a container that could not be named."""
        return not self.namespace

    def __str__(self) -> str:
        return f"{self.namespace}/{self.pod}, container {self.container}"


@dataclass(frozen=True, slots=True)
class Stock:
    """All units of one GPU, as device IDs, in order of their numbers."""

    gpu: str
    index: int
    cores: tuple[str, ...]
    blocks: tuple[str, ...]
    core_set: frozenset[str]
    block_set: frozenset[str]
    sellable: bool = True  # healthy, in this mode and not draining
    keeps: bool = True  # healthy and in this mode: what was promised of it is handed out, draining or not

    @classmethod
    def of(cls, kind: Kind, gpu: str, index: int, memory_bytes: int) -> Self:
        """The stock of a GPU of that size: 100 cores and its whole blocks of memory."""
        core, memory = kind.core_unit.value, kind.memory_unit.value
        cores = tuple(f"{gpu}{SEPARATOR}{core}{n}" for n in range(CORES))
        blocks = tuple(f"{gpu}{SEPARATOR}{memory}{n}" for n in range(kind.blocks(memory_bytes)))
        return cls(gpu, index, cores, blocks, frozenset(cores), frozenset(blocks))

    def ids(self, half: Half) -> tuple[str, ...]:
        """Units of one resource."""
        return self.cores if half is Half.CORE else self.blocks

    def id_set(self, half: Half) -> frozenset[str]:
        """Units of one resource, to look up in."""
        return self.core_set if half is Half.CORE else self.block_set


@dataclass(frozen=True, slots=True)
class Held:
    """What a container holds of one resource."""

    holder: Holder
    half: Half
    ids: frozenset[str]


@dataclass(frozen=True)
class Holdings:
    """All that containers hold, with what is often asked of it worked out once."""

    entries: tuple[Held, ...] = ()

    def __iter__(self) -> Iterator[Held]:
        return iter(self.entries)

    @cached_property
    def ids(self) -> frozenset[str]:
        """All IDs that anybody holds."""
        return frozenset().union(*(entry.ids for entry in self.entries))

    @cached_property
    def large(self) -> tuple[frozenset[str], ...]:
        """Cores of containers that hold as many as a GPU has, or more."""
        return tuple(each.ids for each in self.entries if each.half is Half.CORE and len(each.ids) >= CORES)

    def same(self, other: "Holdings") -> bool:
        """Whether nothing changed: entry by entry the same object, or an equal one."""
        return self is other or self.entries == other.entries


@dataclass(frozen=True, slots=True)
class Reservation:
    """A pair promised to a container. The IDs of a half are known once they were answered."""

    holder: Holder
    demand: Demand
    gpus: tuple[str, ...]  # in order of index; one for a share
    expires: float  # on the caller's clock, in seconds
    core_ids: frozenset[str] | None = None
    block_ids: frozenset[str] | None = None
    granted: frozenset[Half] = frozenset()  # halves whose Allocate was answered
    demand_known: bool = True  # False: only the half that asked first is known

    def ids(self, half: Half) -> frozenset[str] | None:
        """The IDs answered for a half; None: not yet."""
        return self.core_ids if half is Half.CORE else self.block_ids

    def needs(self, half: Half) -> int:
        """Units of a half that the container asks for."""
        return self.demand.cores if half is Half.CORE else self.demand.blocks

    @property
    def complete(self) -> bool:
        """Whether every half that was asked for is granted."""
        return self.demand_known and all(half in self.granted for half in Half if self.needs(half))

    def with_ids(self, half: Half, ids: frozenset[str]) -> Self:
        """With the answer to GetPreferredAllocation."""
        return replace(self, core_ids=ids) if half is Half.CORE else replace(self, block_ids=ids)

    def with_grant(self, half: Half) -> Self:
        """With a half handed out."""
        return replace(self, granted=self.granted | {half})


@dataclass(frozen=True, slots=True)
class Room:
    """What one GPU has left, after all that is held and promised."""

    gpu: str
    index: int
    cores: int
    blocks: int
    all_blocks: int
    untouched: bool  # nothing of it is held or promised

    def fits(self, demand: Demand) -> bool:
        """Whether a share fits."""
        return self.cores >= demand.cores and self.blocks >= demand.blocks


@dataclass(frozen=True)
class Ledger:
    """Stocks, holdings and reservations of one pair of resources on one node."""

    stocks: Mapping[str, Stock] = field(default_factory=lambda: MappingProxyType({}))
    held: Holdings = Holdings()
    reservations: tuple[Reservation, ...] = ()

    @property
    def held_ids(self) -> frozenset[str]:
        """All IDs that anybody holds."""
        return self.held.ids

    @cached_property
    def kept_ids(self) -> frozenset[str]:
        """All IDs that are held or promised."""
        return self.held.ids | self.promised_ids if self.reservations else self.held.ids

    @cached_property
    def promised_ids(self) -> frozenset[str]:
        """All IDs that were answered to somebody and may not be in the records yet."""
        answered = (each.ids(half) for each in self.reservations for half in Half)
        return frozenset().union(*(ids for ids in answered if ids is not None))

    @cached_property
    def whole(self) -> frozenset[str]:
        """GPUs of which one container holds all cores."""
        large = [*self.held.large]
        large += [each.core_ids for each in self.reservations if each.complete and each.core_ids]
        return frozenset(
            stock.gpu for stock in self.stocks.values() for ids in large if stock.core_set <= ids
        )

    def reservation(self, holder: Holder) -> Reservation | None:
        """The promise to a container."""
        return next((each for each in self.reservations if each.holder == holder), None)

    def observed(self, held: Holdings, pods: frozenset[tuple[str, str]], now: float) -> Self:
        """With what the kubelet's records say now.

        Promises end that were kept (the records show them from here on), that are late, or whose pod, by
        namespace and name, the kubelet no longer lists.
        """
        kept = tuple(
            each
            for each in self.reservations
            if not each.complete
            and each.expires > now
            and (each.holder.nameless or each.holder.pod_key in pods)
        )
        same = self.held.same(held)
        return replace(self, held=self.held if same else held, reservations=kept)

    def expired(self, now: float) -> Self:
        """Without the promises that are late."""
        kept = tuple(each for each in self.reservations if each.expires > now)
        return self if len(kept) == len(self.reservations) else replace(self, reservations=kept)

    def stocked(self, stocks: Mapping[str, Stock]) -> Self:
        """With other stocks."""
        return replace(self, stocks=stocks)

    def promised(self, reservation: Reservation) -> Self:
        """With a promise, in the place of an earlier one to the same container."""
        others = tuple(each for each in self.reservations if each.holder != reservation.holder)
        return replace(self, reservations=(*others, reservation))

    def withdrawn(self, holder: Holder) -> Self:
        """Without the promise to a container."""
        return replace(self, reservations=tuple(each for each in self.reservations if each.holder != holder))

    def rooms(
        self,
        asking: Holder | None = None,
        own: frozenset[str] = frozenset(),
        busy: frozenset[str] = frozenset(),
    ) -> dict[str, Room]:
        """What each sellable GPU has left for a container, by UUID.

        `own`: IDs that are held but come to that container all the same, as it inherits them. `busy`: IDs
        that are held though no listed container shows them.
        """
        others = [each for each in self.reservations if each.holder != asking]
        promised = [ids for each in others for half in Half if (ids := each.ids(half)) is not None]
        taken = self.held.ids.union(busy, *promised) - own
        shut = self.whole - {each.partition(SEPARATOR)[0] for each in own}
        shut |= {gpu for each in others if each.demand.whole for gpu in each.gpus}
        owed = {gpu: [0, 0] for gpu in self.stocks}
        for each in others:
            if not each.demand.whole and each.gpus[0] in owed:
                owed[each.gpus[0]][0] += each.demand.cores if each.core_ids is None else 0
                owed[each.gpus[0]][1] += each.demand.blocks if each.block_ids is None else 0
        return {
            stock.gpu: _room(stock, taken, owed[stock.gpu], stock.gpu in shut)
            for stock in self.stocks.values()
            if stock.sellable
        }


def _room(stock: Stock, taken: frozenset[str], owed: list[int], shut: bool) -> Room:
    if shut:
        return Room(stock.gpu, stock.index, 0, 0, len(stock.blocks), untouched=False)
    cores = len(stock.core_set - taken) - owed[0]
    blocks = len(stock.block_set - taken) - owed[1]
    untouched = cores == len(stock.cores) and blocks == len(stock.blocks)
    return Room(stock.gpu, stock.index, max(0, cores), max(0, blocks), len(stock.blocks), untouched)
