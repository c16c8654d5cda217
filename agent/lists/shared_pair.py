"""The two resources of a pair as the kubelet sees them: what is listed, and what a container gets.

Neutral to the mode: each hands its own conditions and answers in. No unit carries
NUMA topology: with hints the kubelet takes aligned IDs unasked, and would split pairs (docs/vgpu.md).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import anyio

from agent.injection.inject import Injector
from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.tasks import Cell, follow
from agent.kubelet import wire
from agent.kubelet.wire import Allocation, PreferenceRequest, Reason, Refused, joined
from agent.model.gpu import Gpu
from agent.model.holding import PairMember, Record, UnitPool
from agent.model.modes import Assignment, Mode, ResourcePair
from agent.model.placement import PlacementPolicy, choose, lowest
from agent.modes.wing import Node
from agent.pairing.pair_rules import NOTHING, Grant, PairRules
from agent.pairing.pairing import Pairing, PairingStats
from agent.pairing.resolver import Cause, PairRefused, RequesterResolver, resource_of
from agent.telemetry import definitions as d
from agent.telemetry.series import Series

# The pairing of a mode with a pair, and its metrics: how many were granted, refused, given up.


def pairing_of(node: Node, pair: ResourcePair, placement: str, reservation_seconds: float) -> Pairing:
    """The pairing of a mode; whole GPUs, where the pair has them, are the best connected ones.

    `placement` is the policy of a pod that names none, `reservation_seconds` how long a pair is reserved for
    a container that has one member of it.
    """

    def connected(free: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        return choose(node.snapshot.value.topology, free, must_include, size)

    rules = PairRules(
        pair,
        PlacementPolicy(placement),
        reservation_seconds,
        connected if pair.whole_gpus else lowest,
        node.name,
    )
    return Pairing(rules, RequesterResolver(pair, node.holdings, node.pods), node.recorder)


def pairs_collector(
    mode: str, stats: PairingStats, reserved: int, fences: Mapping[str, bool]
) -> Iterator[Series]:
    """The metrics of a mode. `reserved`: pairs that are reserved and not complete; `fences`: which hold."""
    yield d.PAIRS, stats.granted, (mode, "granted")
    yield d.PAIRS, stats.refused, (mode, "refused")
    yield d.PAIRS, stats.expired, (mode, "expired")
    yield d.RESERVATIONS, reserved, (mode,)
    for fence, holds in fences.items():
        yield d.ENFORCED, holds, (mode, fence)


_REASONS = {
    Cause.INVALID: Reason.INVALID,
    Cause.EXHAUSTED: Reason.EXHAUSTED,
    Cause.UNAVAILABLE: Reason.UNAVAILABLE,
}


class Sharing:
    """A mode with a pair: its conditions, and what its containers get. This one adds nothing to the pair."""

    def __init__(self, pair: ResourcePair, mode: Mode, *, trim: bool = True) -> None:
        """`trim`: whether free units that nobody can use are left off the lists.

        Where an extender chooses GPUs they stay: totals need protect nobody then, and a list that has yet to
        grow would cost the next pod its life.
        """
        self.mode = mode
        self.pair = pair
        self.trim = trim

    def unready(self, uuid: str) -> str:  # noqa: ARG002
        """Why a GPU's units are Unhealthy though the GPU is well, in words; empty: they are healthy."""
        return ""

    def full(self, uuid: str) -> str:  # noqa: ARG002
        """Why no more units of a GPU are offered now, in words; empty: they are."""
        return ""

    def grown(self, uuid: str) -> frozenset[str]:  # noqa: ARG002
        """Units of a GPU that are not offered, since running containers have grown by them."""
        return frozenset()

    async def additions(
        self,
        member: PairMember,  # noqa: ARG002
        grant: Grant,  # noqa: ARG002
        gpus: Sequence[Gpu],  # noqa: ARG002
    ) -> Allocation:
        """Make what a container gets for a member beside its GPUs; keys of the two members must differ.

        Raises Refused where it may not start: nothing is granted then.
        """
        return Allocation()


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One GPU's part of a list: `key` says what it was made from."""

    gpu: str
    key: object
    data: bytes
    ids: frozenset[str]
    healthy: int

    @property
    def listed(self) -> int:
        return len(self.ids)


class SharedPair:
    """One pair of resources of the node: keeps pools true, and lists what can still be given out."""

    def __init__(
        self,
        sharing: Sharing,
        inventory: Cell[Snapshot],
        modes: Cell[Assignment],
        pairing: Pairing,
        record: Cell[Record | None],
    ) -> None:
        """`record`: who holds what."""
        self.sharing = sharing
        self.inventory = inventory
        self.modes = modes
        self.pairing = pairing
        self._record = record
        self._bare: dict[tuple[str, int], UnitPool] = {}
        self._reduced: dict[str, tuple[tuple[str, int], frozenset[str], UnitPool]] = {}
        self._pools: dict[str, UnitPool] = {}

    def restock(self) -> None:
        """Hand pairing the units that can be offered now.

        Thousands of IDs are made for a GPU when it first comes into the mode, and not before: a node that
        never offers fractions holds none.
        """
        promised = {gpu for each in self.pairing.ledger.reservations for gpu in each.gpus}
        pools = {
            state.uuid: self._pool(state)
            for state in self.inventory.value.gpus
            if self.modes.value.of(state.uuid).plugin_mode is self.sharing.mode or state.uuid in promised
        }
        if pools != self._pools:
            self._pools = pools
            self.pairing.set_pools(pools.values())

    def _pool(self, state: GpuState) -> UnitPool:
        gpu, sharing = state.gpu, self.sharing
        key = (gpu.uuid, gpu.memory_bytes)
        if key not in self._bare:
            self._bare[key] = UnitPool.of(sharing.pair, gpu.uuid, gpu.index, gpu.memory_bytes)
        grown, reduced = sharing.grown(gpu.uuid), self._reduced.get(gpu.uuid)
        if reduced is None or reduced[:2] != (key, grown):
            # Made once for each change, for lists are made again where pools are other objects.
            reduced = self._reduced[gpu.uuid] = (key, grown, self._bare[key].without(grown))
        mode = self.modes.value.of(gpu.uuid)
        keeps = mode.plugin_mode is sharing.mode and state.healthy and not sharing.unready(gpu.uuid)
        room = keeps and not sharing.full(gpu.uuid)
        offerable, drains = room and mode.offered, room and not mode.offered
        known, pool = self._pools.get(gpu.uuid), reduced[2]
        if known and known.blocks is pool.blocks:
            pool = known  # it is asked for many times before something changes
        if (pool.index, pool.offerable, pool.keeps, pool.drains) == (gpu.index, offerable, keeps, drains):
            return pool
        return replace(pool, index=gpu.index, offerable=offerable, keeps=keeps, drains=drains)

    async def run(self) -> None:
        await follow(self.refresh, self.inventory, self.modes, self._record)

    def refresh(self) -> None:
        """Bring pools and holders up to date now; while nobody can say who holds what, these stay."""
        self.restock()
        if self._record.value is not None:
            self.pairing.observe(self._record.value)


class SharedPairPlugin:
    offers_preference = True
    needs_pre_start = False

    def __init__(self, shares: SharedPair, member: PairMember, injector: Injector) -> None:
        self.resource = resource_of(shares.sharing.pair, member)
        self._shares = shares
        self._member = member
        self._injector = injector
        self._chunks: dict[str, _Chunk] = {}
        # All units of a GPU, well or not: a switch needs both one after the other, in milliseconds.
        self._whole: dict[tuple[str, bool], _Chunk] = {}
        self._shown: Sequence[_Chunk] = ()  # what the list shows of each GPU
        self._asked: list[frozenset[str]] = []  # IDs on it that may be given by calls under way
        shares.restock()
        self._seen = self._versions()  # what the list was made from
        self._listed = self._encoded()  # the parts of the list: the same objects until a GPU changes
        self.lists: Cell[bytes] = Cell(b"".join(self._listed))

    async def run(self) -> None:
        """Keep the list true; the core member keeps pools and records of both."""
        shares = self._shares
        async with anyio.create_task_group() as group:
            if self._member is PairMember.CORE:
                group.start_soon(shares.run)
            await follow(self._refresh_if_changed, shares.inventory, shares.modes, shares.pairing.changes)

    def refresh(self) -> None:
        """Bring the list up to date now; only parts of GPUs that changed are made again."""
        self._shares.restock()
        self._seen = self._versions()
        parts = self._encoded()
        if parts != self._listed:
            self._listed = parts
            self.lists.publish(b"".join(parts))

    def _refresh_if_changed(self) -> None:
        """A switch has refreshed the list itself before the cells wake their readers."""
        if self._versions() != self._seen:
            self.refresh()

    def _versions(self) -> tuple[int, ...]:
        shares = self._shares
        return tuple(cell.version for cell in (shares.inventory, shares.modes, shares.pairing.changes))

    def figures(self, assignment: Assignment) -> tuple[int, int]:
        chunks = list(self._parts(assignment))
        return sum(each.listed for each in chunks), sum(each.healthy for each in chunks)

    async def prefer(self, request: PreferenceRequest) -> Sequence[str]:
        """IDs on the GPU that has room for both members; none that has left the list."""
        available = frozenset(request.available)
        with self._handing_out(available) as gone:
            try:
                return await self._shares.pairing.prefer(
                    self._member, request.size, available - gone if gone else available, request.must_include
                )
            except PairRefused as refusal:
                raise Refused(str(refusal), _REASONS[refusal.cause]) from refusal

    async def allocate(self, ids: Sequence[str]) -> Allocation:
        """The answer: the same GPUs from both members, and this member's additions."""
        with self._handing_out(frozenset(ids)) as gone:
            if gone:
                raise Refused(
                    f"device ID {min(gone)} of {self.resource} is not offered any more: its GPU closes, or "
                    "is of no use for lack of the other resource; create the pod again",
                    Reason.UNAVAILABLE,
                )
            try:
                grant = await self._shares.pairing.allocate(self._member, ids)
            except PairRefused as refusal:
                raise Refused(str(refusal), _REASONS[refusal.cause]) from refusal
            return await self._made(grant)

    async def _made(self, grant: Grant) -> Allocation:
        by_uuid = self._shares.inventory.value.by_uuid
        gpus = [by_uuid[uuid].gpu for uuid in grant.gpus]
        try:
            with self._shares.pairing.answering(grant):
                additions = await self._shares.sharing.additions(self._member, grant, gpus)
        except Refused as refusal:
            self._shares.pairing.turn_away(grant.pod, str(refusal))
            raise
        return joined(self._injector.allocation(gpus), additions)

    async def pre_start(self, ids: Sequence[str]) -> None:
        """Nothing to do: not asked for."""

    @contextmanager
    def _handing_out(self, ids: frozenset[str]) -> Iterator[frozenset[str]]:
        """Answer those of `ids` that are not on the list; inside, the others stay there.

        A kubelet that is given one which has left ends by a nil pointer, see `SingleResource`.
        """
        shown = {each.gpu: each.ids for each in self._shown}
        pools = {pool.gpu: pool.id_set(self._member) for pool in self._shares.pairing.ledger.pools.values()}
        hidden = {gpu: units for gpu, units in pools.items() if shown.get(gpu) is not units}
        gone = NOTHING.union(*(ids & (units - shown.get(gpu, NOTHING)) for gpu, units in hidden.items()))
        asked, before = ids - gone if gone else ids, self._listed
        self._asked.append(asked)
        try:
            yield gone
        finally:
            self._asked.remove(asked)
            if self._listed is not before:  # it may have what nobody has asked for in the end
                self.refresh()

    def _encoded(self) -> list[bytes]:
        parts = list(self._parts(self._shares.modes.value))
        self._shown = parts
        self._shares.pairing.listed(self._member, {each.gpu: each.healthy for each in parts})
        return [data for each in parts if (data := each.data)]

    def _parts(self, assignment: Assignment) -> Iterator[_Chunk]:
        """The part of each GPU, in order of index: all of its units, the kept ones, or none."""
        ledger = self._shares.pairing.ledger
        pools, kept = ledger.pools, ledger.kept_ids
        begun = [each for each in ledger.reservations if not each.complete]
        promised = NOTHING.union(*(each.gpus for each in begun))
        opened = {gpu for each in begun if each.granted for gpu in each.gpus}
        admitting = self._shares.pairing.continuing() | promised
        for state in self._shares.inventory.value.gpus:
            pool, mode = pools.get(state.uuid), assignment.of(state.uuid)
            # A GPU leaves this mode when the kubelet's records show no holder: ours may be older than that.
            if pool is None or mode.plugin_mode is not self._shares.sharing.mode:
                continue
            well = state.healthy and not self._shares.sharing.unready(state.uuid)
            # A pod that the kubelet is admitting gets its second member, even from a GPU that drains, or that
            # has just given it the last units of the first. While free IDs stay listed they stay Healthy for
            # a first one that is about to be granted, too: the second is asked for by the list of now.
            if mode.offered or state.uuid in (promised if mode.leaving else opened):
                trim = self._shares.sharing.trim and state.uuid not in admitting
                whole = not (trim and self._all_held(pool, kept, ledger.whole))
            else:
                whole, well = mode.leaving, False
            ids = pool.id_set(self._member)
            keep = None if whole else (kept & ids).union(*(ids & each for each in self._asked))
            yield self._chunk(pool, keep, well)

    def _all_held(self, pool: UnitPool, kept: frozenset[str], whole: frozenset[str]) -> bool:
        """Whether the free units of this member are of no use to anybody."""
        if self._shares.sharing.full(pool.gpu):
            return True
        if self._member is PairMember.MEMORY:
            return pool.gpu in whole or (not self._shares.sharing.pair.memory_alone and pool.core_set <= kept)
        return pool.block_set <= kept

    def _chunk(self, pool: UnitPool, keep: frozenset[str] | None, healthy: bool) -> _Chunk:
        """The encoded part of a GPU; `keep` None: all of its units."""
        key = (keep, healthy, pool.ids(self._member))
        known = self._whole.get((pool.gpu, healthy)) if keep is None else self._chunks.get(pool.gpu)
        if known is None or known.key != key:
            ids = pool.ids(self._member)
            listed = ids if keep is None else [each for each in ids if each in keep]
            shown = pool.id_set(self._member) if keep is None else keep
            data = wire.devices(listed, healthy)
            known = _Chunk(pool.gpu, key, data, shown, len(listed) if healthy else 0)
            if keep is None:
                self._whole[pool.gpu, healthy] = known
            else:
                self._chunks[pool.gpu] = known
        return known
