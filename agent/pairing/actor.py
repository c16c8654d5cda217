"""Both halves of a pair on one GPU: the actor behind the sockets of two resources.

The kubelet asks for core and memory of a container in two separate rounds of calls, in any order, and
says of neither whose they are. The first GetPreferredAllocation of a container finds out who asks,
chooses a GPU with room for both and promises the pair; the second round keeps the promise. Nothing here
outlives the process: the kubelet's records hold all that was granted (`agent.model.ledger`).

Calls are served one at a time. Each ends within the two seconds that `agent.kubelet.service` gives it.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import anyio
import structlog

from agent.kit.cell import Cell
from agent.kubelet.api import PreferenceRequest, Reason, Refused
from agent.model.demand import Demand, Impossible, Kind, Pod
from agent.model.ids import SEPARATOR
from agent.model.ledger import Half, Holder, Ledger, Reservation, Stock
from agent.model.placement import (
    Choice,
    NoRoom,
    Policy,
    WholeChooser,
    hint_of,
    lowest,
    place,
    policy_of,
)
from agent.pairing.facts import Facts, Identity, SpecsUnknown
from agent.pairing.order import Call, Unclear, by_order
from agent.pairing.ports import LogRecorder, Recorder
from agent.pairing.records import Memory, PairingStats, View
from agent.pairing.requester import Asker, Records, resource_of

log = structlog.get_logger()

# The second round of calls follows the first at once. Within this time, in seconds, it is recognised by its
# size alone; after it the kubelet's records are asked again.
PROMPT_SECONDS = 1.0
# How long what the kubelet was seen to keep back is taken to be held by somebody.
BUSY_SECONDS = 30.0
SETTLE_SECONDS = 2.0  # after a change of the lists the kubelet may not have taken them in yet


class Pairing:
    """Chooses, promises and verifies for one kind of pair on one node."""

    def __init__(
        self,
        kind: Kind,
        identity: Identity,
        *,
        policy: Policy = Policy.BINPACK,
        reservation_seconds: float = 10.0,
        recorder: Recorder | None = None,
        whole: WholeChooser = lowest,
        node: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind = kind
        self.stats = PairingStats()
        # Published when something changed that lists may depend on; `view` has the news.
        self.changes: Cell[int] = Cell(0)
        self._identity = identity
        self._policy = policy
        self._ttl = reservation_seconds
        self._recorder: Recorder = recorder or LogRecorder()
        self._whole = whole
        self._node = node
        self._clock = clock
        self._ledger = Ledger()
        self._memory = Memory()
        self._units: dict[Half, frozenset[str]] = dict.fromkeys(Half, frozenset())  # all there are
        self._turn = anyio.Lock()  # calls wait for each other here, in order of arrival
        self._grants = 0
        self._prompt: tuple[Holder, Half, float] | None = None  # whose half was granted last, and when
        self._stocked_at = float("-inf")
        self._pods: Mapping[tuple[str, str], Pod] = {}  # as of the last call that asked

    @property
    def view(self) -> View:
        """The state as it is now."""
        return View(self._ledger, self._memory.hidden_ids)

    def stock(self, stocks: Collection[Stock]) -> None:
        """Take in what there is to sell; whoever watches inventory and modes calls this."""
        self._ledger = self._ledger.stocked({each.gpu: each for each in stocks})
        self._units = {half: frozenset().union(*(each.id_set(half) for each in stocks)) for half in Half}
        self._memory.busy.clear()
        self._stocked_at = self._clock()
        self._publish()

    async def reconcile(self) -> None:
        """Compare with the kubelet's records and let go of what has ended."""
        grants = self._grants
        records = await self._identity.records()
        async with self._turn:
            # Records that are older than a grant do not show it yet: the next look will.
            if records is not None and grants == self._grants:
                self._observe(records)

    async def recall(self, held: Mapping[tuple[str, str, str], frozenset[str]]) -> bool:
        """Take in what ended init containers hold, by pod UID, container and resource; after a start.

        False: no pod is known yet, so that nothing could be told from it.
        """
        pods = {pod.uid: pod for pod in self._identity.pods()}
        async with self._turn:
            for (uid, container, resource), ids in held.items():
                if resource in (self.kind.core, self.kind.memory) and uid in pods:
                    self._memory.recalled(pods[uid], container, ids)
            self._publish()
        return bool(pods)

    async def prefer(self, half: Half, request: PreferenceRequest) -> Sequence[str]:
        """The IDs of a half. Raises Refused."""
        async with self._turn:
            available = frozenset(request.available)
            inherited = frozenset(request.must_include)
            self._forget_late()
            promise = self._second_half(half, request.size)
            if promise is None:
                promise = await self._found(half, request.size, inherited, available)
            ids = self._pick(promise, half, request, available)
            self._note_busy(half, available | inherited)
            self._ledger = self._ledger.promised(promise.with_ids(half, frozenset(ids)))
            return ids

    async def allocate(self, half: Half, ids: Sequence[str]) -> tuple[str, ...]:
        """Grant a half; the GPUs, in order of index, that its container gets. Raises Refused."""
        async with self._turn:
            asked = frozenset(ids)
            gpus = self._gpus_of(half, asked)
            self._forget_late()
            promise = next((each for each in self._ledger.reservations if each.ids(half) == asked), None)
            if promise is None:
                # Not asked for our preference: the IDs are inherited, or the kubelet took its own choice.
                promise = await self._found(half, len(asked), asked, None)
                if not set(gpus) <= set(promise.gpus):
                    self._refuse(None, f"the kubelet took units of GPU {', '.join(gpus)} against the promise")
                promise = promise.with_ids(half, asked)
            for gpu in promise.gpus:
                self._sellable(gpu)
            self._grant(promise, half, asked)
            return promise.gpus

    def _grant(self, promise: Reservation, half: Half, ids: frozenset[str]) -> None:
        now = self._clock()
        promise = replace(promise.with_grant(half), expires=now + self._ttl)
        holder = promise.holder
        self._grants += 1
        self._ledger = self._ledger.promised(promise)
        self._prompt = (holder, half, now)
        pod = self._pod_of(holder)
        if pod is not None:
            self._memory.granted(pod, holder.container, half, ids)
        if promise.complete:
            self.stats.granted += 1
            log.info(
                "pair_granted",
                resource=resource_of(self.kind, half),
                pod=f"{holder.namespace}/{holder.pod}",
                container=holder.container,
                gpu=",".join(promise.gpus),
                cores=promise.demand.cores,
                blocks=promise.demand.blocks,
            )
            if pod is not None:
                indices = [self._ledger.stocks[gpu].index for gpu in promise.gpus]
                self._recorder.chosen(pod, holder.container, indices)
            self._publish()

    # Who asks, and for what

    def _second_half(self, half: Half, size: int) -> Reservation | None:
        """The promise whose first half was granted a moment ago, if this call fits it."""
        if self._prompt is None or self._prompt[1] is half:
            return None
        holder, _, since = self._prompt
        promise = self._ledger.reservation(holder)
        if promise is None or not promise.demand_known or promise.ids(half) is not None:
            return None
        prompt = self._clock() - since <= PROMPT_SECONDS
        return promise if prompt and promise.needs(half) == size else None

    async def _found(
        self, half: Half, size: int, inherited: frozenset[str], available: frozenset[str] | None
    ) -> Reservation:
        """A promise for whoever asks: the open one of that container, or a new one."""
        try:
            facts, asker = await self._identity.who(half, size, self._memory.served, self._memory.refused)
        except SpecsUnknown as unknown:
            return self._by_order(unknown.facts, half, size, inherited, available)
        if facts.records is not None:
            self._observe(facts.records)
        self._pods = facts.pods
        existing = self._ledger.reservation(asker.holder)
        if existing and existing.demand_known and existing.granted and existing.needs(half) == size:
            return existing
        try:
            demand = asker.demand(self.kind)
            choice = self._choose(asker, facts, half, demand, inherited, available)
        except (Impossible, NoRoom) as problem:
            reason = Reason.INVALID if isinstance(problem, Impossible) else Reason.EXHAUSTED
            self._refuse(asker.pod, str(problem), reason)
        if choice.hint_ignored:
            self._recorder.hint_ignored(asker.pod, choice.hint_ignored)
        granted, held = self._granted_before(asker.holder, facts.records)
        return Reservation(
            asker.holder,
            demand,
            choice.gpus,
            self._clock() + self._ttl,
            core_ids=held.get(Half.CORE),
            block_ids=held.get(Half.MEMORY),
            granted=granted,
        )

    def _choose(
        self,
        asker: Asker,
        facts: Facts,
        half: Half,
        demand: Demand,
        inherited: frozenset[str],
        available: frozenset[str] | None,
    ) -> Choice:
        """GPUs for a container; raises Impossible, NoRoom."""
        holder, anchor = asker.holder, asker.anchor(self.kind)
        handed_on = self._memory.hidden.get(asker.pod.key, frozenset()) if anchor else frozenset()
        before = facts.records.ids(holder, half.other) if facts.records else frozenset()
        existing = self._ledger.reservation(holder)
        promised = frozenset(existing.gpus) if existing and existing.granted else frozenset()
        tied = {each.partition(SEPARATOR)[0] for each in inherited | before | handed_on} | promised
        if handed_on:
            handed_on -= frozenset().union(*(each.ids for each in self._ledger.held if each.holder != holder))
        own = handed_on | before | inherited
        peak = anchor.peak if anchor and not tied else demand
        rooms = self._ledger.rooms(holder, own, self._kept_back(half, available))
        choice = place(
            rooms,
            peak,
            policy_of(asker.pod, self._policy),
            hint_of(asker.pod, holder.container, self._node, anchor.members if anchor else ()),
            self._whole,
            tied,
        )
        # Of the whole GPUs that a later container will need, this one takes only its own.
        return Choice(choice.gpus[: max(1, demand.whole)], choice.hint_ignored)

    def _by_order(
        self,
        facts: Facts,
        half: Half,
        size: int,
        inherited: frozenset[str],
        available: frozenset[str] | None,
    ) -> Reservation:
        """A promise without specs. Raises Refused."""
        assert facts.records is not None
        self._observe(facts.records)
        expires = self._clock() + self._ttl
        busy = self._kept_back(half, available)
        try:
            found = by_order(
                Call(self.kind, half, size, inherited, busy), self._ledger, facts, expires, self._whole
            )
        except (Impossible, NoRoom) as problem:
            reason = Reason.INVALID if isinstance(problem, Impossible) else Reason.EXHAUSTED
            self._refuse(None, str(problem), reason)
        except Unclear as problem:
            self._refuse(None, str(problem), Reason.UNAVAILABLE)
        self.stats.serial += 1
        log.warning("asker_told_by_order", resource=resource_of(self.kind, half), container=str(found.holder))
        for former in found.instead_of:
            self._ledger = self._ledger.withdrawn(former)
        return found.promise

    def _granted_before(
        self, holder: Holder, records: Records | None
    ) -> tuple[frozenset[Half], dict[Half, frozenset[str]]]:
        """Halves that a container holds by the records, as after a restart of this process mid-pair."""
        if records is None:
            return frozenset(), {}
        held = {half: ids for half in Half if (ids := records.ids(holder, half))}
        return frozenset(held), held

    # IDs

    def _pick(
        self, promise: Reservation, half: Half, request: PreferenceRequest, available: frozenset[str]
    ) -> list[str]:
        """Inherited IDs first, then the lowest free numbers of the promised GPUs."""
        known = promise.ids(half)
        if known is not None and len(known) == request.size and known <= available:
            return sorted(known)
        picked = dict.fromkeys(request.must_include)
        strangers = {each.partition(SEPARATOR)[0] for each in picked} - set(promise.gpus)
        if strangers:
            self._refuse(
                self._pod_of(promise.holder),
                f"{promise.holder} inherits units of GPU {', '.join(sorted(strangers))} from an init "
                f"container, but its other half lies on GPU {', '.join(promise.gpus)}; create the pod anew",
            )
        others = frozenset().union(
            *(r.ids(half) or frozenset() for r in self._ledger.reservations if r.holder != promise.holder)
        )
        for gpu in promise.gpus:
            free = (each for each in self._ledger.stocks[gpu].ids(half) if each in available)
            for each in free:
                if len(picked) >= request.size:
                    break
                if each not in others:
                    picked[each] = None
        if len(picked) < request.size:
            self._note_busy(half, available)
            self._ledger = self._ledger.withdrawn(promise.holder)
            self._refuse(
                self._pod_of(promise.holder),
                f"GPU {', '.join(promise.gpus)} was chosen for {promise.demand.told()} of {promise.holder}, "
                f"but the kubelet has only {len(picked)} of {request.size} {resource_of(self.kind, half)} "
                "left there (init containers keep units that no record shows); create the pod anew",
                Reason.EXHAUSTED,
            )
        return list(picked)

    def _gpus_of(self, half: Half, ids: frozenset[str]) -> tuple[str, ...]:
        """GPUs of a half's IDs in order of index; raises Refused for IDs that are not of this half."""
        stocks = self._ledger.stocks
        gpus = {each.partition(SEPARATOR)[0] for each in ids}
        for gpu in gpus:
            if gpu not in stocks:
                self._refuse(None, f"GPU {gpu} is not known on this node; the kubelet's list is out of date")
        foreign = next((i for i in ids if i not in stocks[i.partition(SEPARATOR)[0]].id_set(half)), None)
        if foreign is not None:
            self._refuse(None, f"{foreign} is not a unit of {resource_of(self.kind, half)} on this node")
        return tuple(sorted(gpus, key=lambda gpu: stocks[gpu].index))

    def _sellable(self, gpu: str) -> None:
        stock = self._ledger.stocks.get(gpu)
        if stock is None or not stock.keeps:
            self._refuse(
                None, f"GPU {gpu} is not sold as {self.kind.name} now: it is unhealthy, or changes its mode"
            )

    # What is seen

    def _observe(self, records: Records) -> None:
        before = self._ledger
        self._ledger = before.observed(records.held, records.pods, self._clock())
        gone = self._memory.forget_others_than(records.pods)
        if gone or before.held is not self._ledger.held or before.reservations != self._ledger.reservations:
            self._publish()

    def _forget_late(self) -> None:
        before = self._ledger
        self._ledger = before.expired(self._clock())
        for promise in before.reservations:
            if self._ledger.reservation(promise.holder) is None and not promise.complete:
                self.stats.expired += 1
                log.info("promise_expired", container=str(promise.holder), gpu=",".join(promise.gpus))

    def _note_busy(self, half: Half, available: frozenset[str]) -> None:
        now = self._clock()
        if now - self._stocked_at >= SETTLE_SECONDS:
            kept_back = self._units[half] - available - self._ledger.held_ids - self._ledger.promised_ids
            self._memory.busy[half] = (kept_back, now + BUSY_SECONDS)

    def _kept_back(self, half: Half, available: frozenset[str] | None) -> frozenset[str]:
        """IDs that cannot be had though no listed container holds them."""
        kept_back = self._memory.kept_back(half.other, self._clock())
        return kept_back if available is None else kept_back | (self._units[half] - available)

    def _pod_of(self, holder: Holder) -> Pod | None:
        return self._pods.get(holder.pod_key)

    def _publish(self) -> None:
        self.changes.publish(self.changes.value + 1)

    def _refuse(self, pod: Pod | None, message: str, reason: Reason = Reason.INVALID) -> NoReturn:
        self.stats.refused += 1
        if pod is not None:
            self._memory.turned_away(pod)
            self._recorder.refused(pod, message)
        raise Refused(message, reason)
