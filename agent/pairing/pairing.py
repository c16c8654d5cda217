"""Both members of a pair on one GPU: the actor behind the sockets of two resources.

The kubelet asks for core and memory of a container in two separate rounds of calls, in any order, and
says of neither whose they are. Each round finds out who asks. The first one of a container chooses a GPU with
room for both and reserves the pair; the second uses the reservation. Nothing here outlives the process: the
record of who holds what (`agent.holdings.record`) shows all that was granted.

Calls are served one at a time, within the time that `agent.kubelet.service` gives to each.
"""

import math
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import anyio
import structlog

from agent.kit.tasks import Cell
from agent.model.holding import Holder, Ledger, PairMember, Record, Reservation, UnitPool
from agent.model.placement import ASSIGNED, HINT, places
from agent.model.pod import WAITING_FOR_GPU, Pod
from agent.pairing.pair_rules import Call, Grant, PairRules, PairState
from agent.pairing.resolver import Cause, PairRefused, PodKey, RequesterResolver, resource_of

log = structlog.get_logger()

# The kubelet's Allocate follows its GetPreferredAllocation at once. One that comes later, in seconds, is not
# taken for the same container's without another look.
PROMPT_SECONDS = 1.0
# The kubelet takes in the lists of both members one after the other, on a busy node some tenths of a second
# after they were sent.
SETTLED_SECONDS = 1.0
# The kubelet records what an Allocate gave some milliseconds after it: an earlier reading says nothing of it.
RECORDED_SECONDS = 1.0
# The containers of a pod get their devices one after the other, before any of them starts. One that gets some
# again, from a kubelet that has lost its records, is followed by no other.
LONGEST_ADMISSION_SECONDS = 120.0


class Recorder:
    """Reports to pods' owners; never waits. This one writes to the log alone."""

    def refused(self, pod: Pod, message: str) -> None:
        """A request of the pod was refused; the socket's service logs it."""
        # The kubelet may ask for both members before it gives the pod up: one event says it.
        self.event(pod, "AllocationRefused", message, key="refused")

    def waiting(self, pod: Pod, message: str, key: str) -> None:
        """A container of the pod cannot start yet; the kubelet tries again. `key`: what it waits for."""
        self.event(pod, WAITING_FOR_GPU, message, key=key)

    def hint_ignored(self, pod: Pod, message: str) -> None:
        """The scheduler's choice was not followed."""
        log.warning("placement_hint_ignored", pod=f"{pod.namespace}/{pod.name}", reason=message)
        self.event(pod, "PlacementHintIgnored", message)

    def chosen(self, pod: Pod, container: str, indices: Sequence[int], *, last: bool) -> None:
        """A container has its GPUs. `last`: no later container of the pod asks for GPUs of this pair.

        A choice that is carried out counts no more, and that for later containers is still to be followed.
        """
        chosen = {f"{HINT}{places(pod.containers).index(container)}": ",".join(map(str, indices))}
        self.annotate(pod, {**chosen, ASSIGNED: "true"} if last else chosen)

    def annotate(self, pod: Pod, annotations: Mapping[str, str]) -> None:
        """The pod is to have these annotations."""

    def event(self, pod: Pod, reason: str, message: str, *, warning: bool = True, key: str = "") -> None:
        """Something happened to the pod; the caller logs it. `key`: said once, see `EventRecorder`."""


@dataclass(frozen=True, slots=True)
class Continuing:
    """A pod whose later containers are waited for, its GPUs, and until when, in seconds of the clock."""

    uid: str = ""
    pod: PodKey = ("", "")
    gpus: frozenset[str] = frozenset()
    until: float = -math.inf


@dataclass(frozen=True, slots=True)
class Preferred:
    """The answer to the call before this one, and whose it was."""

    member: PairMember
    ids: frozenset[str]
    holder: Holder
    uid: str  # of its pod
    at: float


@dataclass
class PairingStats:
    """Counters; read by metrics."""

    granted: int = 0  # pairs
    refused: int = 0
    expired: int = 0  # reservations that nobody came back for


class Pairing:
    """Chooses, reserves and verifies for one kind of pair on one node."""

    def __init__(
        self,
        rules: PairRules,
        resolver: RequesterResolver,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rules = rules
        self.pair = rules.pair
        self.stats = PairingStats()
        # Published when something changed that lists may depend on; `ledger` has the news.
        self.changes: Cell[int] = Cell(0)
        self._resolver = resolver
        self._recorder = recorder or Recorder()
        self._clock = clock
        self._state = PairState()
        self._read = -math.inf  # when the newest reading began that the state knows of
        self._turn = anyio.Lock()  # calls wait for each other here, in order of arrival
        self._calls: list[float] = []  # when each of them came that is served or waits, by anyio's clock
        # When these came, and answers that are being made: a promise may wait for one, and to find out who
        # asks, or to make what its container gets, may take longer than any promise lasts.
        self._under_way: list[float] = []
        # The pod whose later containers are still to be admitted.
        self._continuing = Continuing()
        self._preferred: Preferred | None = None  # None: the last call was another one
        # Healthy units of each GPU on the list of a member, and when they became more.
        self._listed: dict[PairMember, dict[str, tuple[int, float]]] = {}

    @property
    def ledger(self) -> Ledger:
        return self._state.ledger

    @property
    def waiting(self) -> int:
        """Pairs that were reserved and wait for their second member."""
        return sum(not each.complete for each in self.ledger.reservations)

    def continuing(self) -> frozenset[str]:
        """GPUs of a pod of which a container was just admitted and the next one is not yet.

        A later container gets the units of a plain init container, and what it needs more of the same GPU.
        """
        return self._continuing.gpus if self._continues() else frozenset()

    def _continues(self) -> bool:
        """Whether a later container is waited for: for a while, and longer where a record shows its pod."""
        known, now = self._continuing, self._late_by()
        admitted = known.pod in self.ledger.held.by_pod
        return now < known.until + (LONGEST_ADMISSION_SECONDS if admitted else 0.0)

    def _comes_last(self, grant: Grant) -> bool:
        """Whether no later container of the pod asks for this pair."""
        members = {self.pair.core, self.pair.memory}
        names = [each.name for each in grant.pod.containers if members & each.limits.keys()]
        return names[-1:] in ([], [grant.container])

    def set_pools(self, pools: Collection[UnitPool]) -> None:
        """Take in the units that may be given out; called at each change of inventory and modes."""
        self._become(self._state.with_pools(pools))

    def observe(self, record: Record) -> None:
        """Take in who holds what, by a reading that may be older than the last grant.

        One that is older than a call's is passed over: reservations that the newer one showed ended with it.
        """
        if record.began >= self._read:
            self._take_in(record)
        # A pod may end before any record shows what it was granted.
        self._become(self._state.without(lambda each: each.pod.uid in record.ended))
        if self._continuing.uid in record.ended:
            self._continue_nowhere()
        self._forget_late()

    def listed(self, member: PairMember, healthy: Mapping[str, int]) -> None:
        """Take in how many healthy units of each GPU the list of a member has now."""
        before, now = self._listed.get(member, {}), self._clock()
        self._listed[member] = {
            gpu: (count, known[1] if (known := before.get(gpu)) and count <= known[0] else now)
            for gpu, count in healthy.items()
        }

    def _unsettled(self) -> frozenset[str]:
        """GPUs of which the kubelet may have one member's units and not yet the other's.

        A pod that gets the first of such a GPU is refused at the second.
        """
        since = self._clock() - SETTLED_SECONDS
        return frozenset(
            gpu
            for member, counts in self._listed.items()
            for gpu, pool in self.ledger.pools.items()
            if (known := counts.get(gpu)) is None or known[0] < len(pool.ids(member)) or known[1] > since
        )

    async def reconcile(self) -> None:
        if record := await self._resolver.record():
            self._take_in(record)

    async def prefer(
        self, member: PairMember, size: int, available: Collection[str], inherited: Collection[str] = ()
    ) -> Sequence[str]:
        """`size` of the `available` IDs of a member, the `inherited` ones among them. Raises PairRefused."""
        async with self._serving():
            call = Call(member, size, frozenset(inherited), frozenset(available), self._clock())
            reservation = await self._found(call)
            self._state, ids = self.rules.pick(self._state, reservation, call)
            self._preferred = Preferred(
                member, frozenset(ids), reservation.holder, reservation.pod.uid, self._clock()
            )
            return ids

    async def allocate(self, member: PairMember, ids: Sequence[str]) -> Grant:
        """Hand a member to its container. Raises PairRefused; nothing is granted then."""
        async with self._serving() as preferred:
            gpus, asked = self.rules.checked(self._state, member, ids), frozenset(ids)
            call = Call(member, len(ids), asked, None, self._clock())
            # Without a preference: the IDs are inherited, or the kubelet took its own choice.
            reservation = self._reservation_of(preferred, call) or await self._found(call)
            # What was granted counts from now on: finding out who asks may have taken seconds.
            call = replace(call, now=self._clock())
            self._state, grant = self.rules.grant(self._state, reservation, call, asked, gpus)
        if grant.complete:
            until = -math.inf if self._comes_last(grant) else call.now + self.rules.reservation_seconds
            self._continuing = Continuing(grant.pod.uid, grant.pod.key, frozenset(grant.gpus), until)
            self._report(member, grant)
        if grant.complete or not all(self.ledger.pools[gpu].offerable for gpu in grant.gpus):
            self._publish()  # a GPU that closes stays open for the second half
        return grant

    async def set_aside(
        self, gpu: str, member: PairMember, count: int, keep: Callable[[tuple[str, ...]], Awaitable[None]]
    ) -> None:
        """Have `keep` take `count` free units of a GPU out of its pool, while no call is served.

        The highest numbers, since calls take the lowest. Raises PairRefused where there are not so many, or
        nobody can say how many, and what `keep` raises.
        """
        async with self._turn:
            self._forget_late()  # before: what ends meanwhile counts on
            # A reservation may have ended before a record showed what came of it.
            record = await self._resolver.record()
            if record is None:
                text = "nobody can say who holds what now: the kubelet does not answer"
                raise PairRefused(f"no units of GPU {gpu} can be added: {text}", Cause.UNAVAILABLE)
            self._take_in(record)
            free = self.ledger.free_units(gpu, member)
            if len(free) < count:
                raise PairRefused(
                    f"GPU {gpu} has {len(free)} free units of {resource_of(self.pair, member)}, "
                    f"{count} more are asked for",
                    Cause.EXHAUSTED,
                )
            await keep(tuple(free[-count:]))

    def turn_away(self, pod: Pod, message: str) -> None:
        """Take back all that a pod was granted: its admission fails as a whole."""
        self.stats.refused += 1
        if self._continuing.uid == pod.uid:
            self._continuing = Continuing()
        left = self._state.without(lambda each: each.pod.uid == pod.uid)
        self._become(replace(left, refused=left.refused | {pod.uid}))
        self._recorder.refused(pod, message)

    def report_waiting(self, pod: PodKey, message: str, key: str) -> None:
        """Report to a pod's owner why a container cannot start yet; nothing where the pod is not known."""
        if found := self._resolver.known(pod):
            self._recorder.waiting(found, message, key)

    def _reservation_of(self, preferred: Preferred | None, call: Call) -> Reservation | None:
        """The reservation of the container that has just asked for a preference, if it takes what was given.

        The kubelet makes the two calls in a row, and nothing has come between them.
        """
        if preferred is None or call.now - preferred.at > PROMPT_SECONDS:
            return None
        if (preferred.member, preferred.ids) != (call.member, call.inherited):
            return None
        reservation = self.ledger.reservation(preferred.holder)
        same = reservation and (reservation.pod.uid, reservation.ids(call.member)) == (
            preferred.uid,
            preferred.ids,
        )
        return reservation if same else None

    async def _found(self, call: Call) -> Reservation:
        """A reservation for the container that asks: the open one of that container, or a new one."""
        refused = self._state.refused
        facts, asker = await self._resolver.resolve(
            call.member,
            call.size,
            partial(self._open, self.ledger.reservations),
            refused,
            lambda: len(self._calls) == 1,
            self._calls[0],
        )
        call = replace(call, now=self._clock())
        if facts.record is None:
            call = replace(call, blind=True, succeeds=self._resolver.succeeds(asker.pod))
        else:
            self._take_in(facts.record, facts.pods)
            call = replace(call, leftover=facts.record.leftover)
        self._forget_late(asker.pod.uid)
        try:
            reservation, hint_ignored = self.rules.reserve(self._state, call, asker, self._unsettled())
        except PairRefused as refusal:
            if facts.record is None or refusal.cause is not Cause.EXHAUSTED:
                raise
            # A kubelet that was away may know of ends that neither the watch nor the checkpoint shows yet.
            confirmed = await self._resolver.confirmed(facts.record)
            self._take_in(confirmed, facts.pods)
            call = replace(call, leftover=confirmed.leftover)
            reservation, hint_ignored = self.rules.reserve(self._state, call, asker, self._unsettled())
        if hint_ignored:
            self._recorder.hint_ignored(asker.pod, hint_ignored)
        return reservation

    def _open(self, reservations: Sequence[Reservation], record: Record | None) -> Sequence[Reservation]:
        """Those that the kubelet of this record may go on with."""
        if record is None:
            return reservations
        since, held = record.kubelet_since, self._resolver.held(record)
        return [each for each in reservations if not self.rules.outlived(each, since, held)]

    def _take_in(self, record: Record, pods: Mapping[PodKey, Pod] | None = None) -> None:
        self._read = max(self._read, record.began)
        # When reservations expire at the latest that were made before the reading began.
        covers = record.began + self.rules.reservation_seconds
        held, before = self._resolver.held(record), self.ledger.reservations
        state = self._state.without(lambda each: self.rules.outlived(each, record.kubelet_since, held))
        self._become(state.observed(held, record.pods, covers, pods))
        self._count_expired(before)
        if self._continuing.until <= covers and self._continuing.pod not in record.pods:
            self._continue_nowhere()

    def _report(self, member: PairMember, grant: Grant) -> None:
        self.stats.granted += 1
        log.info(
            "pair_granted",
            resource=resource_of(self.pair, member),
            pod=f"{grant.pod.namespace}/{grant.pod.name}",
            container=grant.container,
            gpu=",".join(grant.gpus),
            cores=grant.demand.cores,
            blocks=grant.demand.blocks,
        )
        indices = [self.ledger.pools[gpu].index for gpu in grant.gpus]
        self._recorder.chosen(grant.pod, grant.container, indices, last=grant.last)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[Preferred | None]:
        """The answer before this call, if that was a preference; this call ends its use."""
        arrived = anyio.current_time()
        self._calls.append(arrived)
        try:
            with self._stopped():
                async with self._turn:
                    self._forget_late()
                    preferred, self._preferred = self._preferred, None
                    try:
                        yield preferred
                    except PairRefused as refusal:
                        if refusal.pod is None:
                            self.stats.refused += 1
                        else:
                            self.turn_away(refusal.pod, str(refusal))
                        raise
        finally:
            self._calls.remove(arrived)

    @contextmanager
    def answering(self, grant: Grant) -> Iterator[None]:
        """Inside, the answer to an Allocate is made; what it grants counts from when that leaves."""
        with self._stopped():
            yield
        granted = self.ledger.reservation(Holder(*grant.pod.key, grant.container))
        if granted and granted.pod.uid == grant.pod.uid:
            expires = self._clock() + self.rules.reservation_seconds
            self._state = self._state.reserved(replace(granted, expires=expires))

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        """Inside, the clock by which reservations are late stands."""
        began = self._clock()
        self._under_way.append(began)
        try:
            yield
        finally:
            self._under_way.remove(began)

    def _late_by(self) -> float:
        """The clock by which reservations are late: a call that waits or is served stops it."""
        return min([self._clock(), *self._under_way])

    def _forget_late(self, asking: str | None = None) -> None:
        """End what nobody came back for in time. `asking`: the UID of the pod whose call is being served.

        A pod that has a part of what it asks for may come for the rest much later, and the kubelet turns to
        another one only then.
        """
        now = self._late_by()

        def over(reservation: Reservation) -> bool:
            if reservation.expires > now or not reservation.granted:
                return reservation.expires <= now
            # What was granted is held until a reading that began later says otherwise, whatever its age.
            recorded_at = reservation.expires - self.rules.reservation_seconds + RECORDED_SECONDS
            may_go_on = asking in (None, reservation.pod.uid) and reservation.goes_on(self.ledger.held)
            return recorded_at <= max(self._read, self._resolver.published) and not may_go_on

        before = self.ledger.reservations
        self._become(self._state.without(over))
        self._count_expired(before)
        another = asking not in (None, self._continuing.uid) and self._continuing.until <= now
        if another or not self._continues():
            self._continue_nowhere()

    def _count_expired(self, before: Iterable[Reservation]) -> None:
        """Count those of `before` that are gone and whose second member nobody came for in time."""
        now = self._late_by()
        left = {each.holder for each in self.ledger.reservations}
        for reservation in before:
            if reservation.expires <= now and not reservation.complete and reservation.holder not in left:
                self.stats.expired += 1
                log.info("promise_expired", container=str(reservation.holder), gpu=",".join(reservation.gpus))

    def _continue_nowhere(self) -> None:
        """No later container is waited for."""
        if self._continuing.until > -math.inf:
            self._publish()
        self._continuing = Continuing()

    def _become(self, state: PairState) -> None:
        before, self._state = self._state, state
        if state.ledger is not before.ledger:
            self._publish()

    def _publish(self) -> None:
        self.changes.publish(self.changes.value + 1)
