"""Which container is asking: one look at the record, a GET for a pod not known yet."""

import itertools
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

import anyio
import structlog

from agent.holdings.holdings import HoldingsWatch
from agent.kit.tasks import Backoff, beside
from agent.kubelet.podresources import PATIENCE_SECONDS, PodResourcesUnavailable
from agent.model.holding import (
    Holder,
    Holding,
    PairHoldings,
    PairMember,
    Record,
    Reservation,
    Source,
    nameless,
)
from agent.model.modes import ResourcePair
from agent.model.pod import (
    STATIC_PODS,
    Container,
    Demand,
    InitContainerGroup,
    Pod,
    Stage,
    demand_of,
    init_group_of,
)
from agent.pairing.pod_source import PodSource, PodsUnavailable

log = structlog.get_logger()


class Cause(Enum):
    INVALID = "invalid"  # asking again will not help
    EXHAUSTED = "exhausted"  # no GPU has room
    UNAVAILABLE = "unavailable"  # who asks, or who holds what, is not known


class PairRefused(Exception):
    """A request that is not granted. The text reaches the pod's status: object, cause and remedy."""

    def __init__(self, message: str, cause: Cause = Cause.INVALID, pod: Pod | None = None) -> None:
        """`pod`: whose request it is, where that is known."""
        self.cause = cause
        self.pod = pod
        super().__init__(message)


# Which container is asking: pure, from the record of who holds what and the pods' specs.
# The kubelet takes a pod into its records just before it admits it, one pod after the other, and admits its
# containers in order. So the container that asks is the first of its pod that lacks the resource, and of all
# pods in the records only the one that is being admitted has such a container.

PodKey = tuple[str, str]
Open = Callable[[Record | None], Collection[Reservation]]


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
    had = {(one.pod.uid, one.holder.container): member in one.granted for one in reservations if one.granted}
    # The checkpoint has UIDs alone: the names may be those of a pod that this call has read. Of others than
    # plain init containers the kubelet's list says more.
    unnamed: dict[PodKey, list[Holding]] = {}
    for each in record.holdings if record else ():
        if not each.namespace:
            unnamed.setdefault(each.pod_key, []).append(each)
    found, going = list[Asker](), list[Asker]()
    for pod in pods:
        if pod.finished or (record and pod.key not in (record.newcomers if pod.ending else record.pods)):
            continue
        wanting = [each for each in pod.containers if each.limits.get(resource)]
        # Containers before one that holds the resource were served.
        plain = {each.name for each in wanting if each.stage is Stage.INIT}
        inits = (each for each in unnamed.get(nameless(pod.uid), ()) if each.container in plain)
        holding = {
            each.container
            for each in (*held.by_pod.get(pod.key, ()), *inits)
            if each.resource == resource and each.source is not Source.FORGOTTEN
        }
        first = max((n for n, each in enumerate(wanting, 1) if each.name in holding), default=0)
        for container in wanting[first:]:
            if had.get(place := (pod.uid, container.name)):
                continue
            if matches := container.limits[resource] == size:
                (going if record and pod.ending else found).append(Asker(pod, container))
            # That of a plain init container may be served: no record shows it without a readable checkpoint.
            # Before one that has its other member has all, none after it is asked for.
            if (matches and place in had) or (record and (matches or container.stage is not Stage.INIT)):
                break
    # A pod that runs was admitted; only one whose resource was unknown then asks later, when none waits. Nor
    # does one that is being deleted, unless the kubelet has just started and takes it up once more.
    return [each for each in found if each.pod.status.phase == "Pending"] or found + going * bool(found)


MISS_SECONDS = 1.0
# The kubelet may ask a moment before its own records, or the watch, show the pod.
TRIES = 4
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 0.3
AWAY_PAUSE_SECONDS = 2.0  # of an API server that does not answer, and is asked for up to 110 pods each time
# Kubelets before 1.34 go on listing a pod that was just rejected, which may look like one that asks until the
# API server shows its end; and one that restarts answers a moment later. A refusal ends a pod for good, and
# nothing but other pods waits meanwhile.
DOUBT_SECONDS = 10.0
# All pods of the node wait for that: so much at once in all calls together, and a tenth of the time for long;
# for an API server that does not answer as much again, and only while no other call waits in line: containers
# of pods that were admitted without their resource ask at each start, beside the one admission.
DOUBT_TOTAL_SECONDS = 30.0
DOUBT_SHARE = 0.1
RETRY = "create the pod again"


@dataclass(frozen=True, slots=True)
class Facts:
    record: Record | None  # None: it cannot be read
    pods: Mapping[PodKey, Pod]
    unknown: frozenset[PodKey] = frozenset()  # listed pods whose spec cannot be read
    absent: frozenset[PodKey] = frozenset()  # listed pods that the API server does not know
    problem: str = ""  # why neither the record nor the API server says who may be asking

    @property
    def known(self) -> bool:
        return not (self.unknown or self.problem)


@dataclass
class _Answers:
    """Answers of the API server during one call, and its failures to give one."""

    # By a pod's names, or by the UID of an older copy. None: there is no such pod.
    pods: dict[PodKey | str, Pod | PodsUnavailable | None] = field(default_factory=dict)
    told: set[PodKey] = field(default_factory=set)  # whose failures were logged
    there: frozenset[str] = frozenset()  # UIDs of pods that it had when the call began
    first_until: float = -math.inf  # a first list by then shows them, too
    # Pods that asked for as much as the call when it began, and were not being deleted.
    wanted: frozenset[PodKey] = frozenset()
    unseen: frozenset[PodKey] = frozenset()  # by the last record: as `_unseen` beside one that waits
    named: set[PodKey] = field(default_factory=set)  # whose holders it was asked for
    useless: bool = False  # it did answer, with a refusal or what is no pod: that is not waited for

    async def ask(self, which: PodKey | str, key: PodKey, read: Callable[..., Awaitable[Pod | None]]) -> None:
        """Read a pod, once in the call unless the answer was forgotten since."""
        if which in self.pods:
            return
        self.pods[which] = PodsUnavailable("no answer in time")  # where the call is given up
        try:
            self.pods[which] = await read(*key)
        except PodsUnavailable as error:
            self.pods[which] = error
            self.useless = self.useless or not error.away
            if key not in self.told:
                self.told.add(key)
                log.info("pod_unreadable", pod="/".join(key), problem=str(error))

    def forget(self, alike: Collection[PodKey]) -> None:
        """Have these and those that were asked for in vain be asked for again."""
        vain = {which for which, each in self.pods.items() if isinstance(each, PodsUnavailable)}
        for which in vain.union(alike):
            self.pods.pop(which, None)


@dataclass
class Doubt:
    """How long calls may wait for evidence: nobody holds the node's admissions up again and again."""

    spent: float = 0.0
    at: float = -math.inf

    def seconds(self, now: float) -> float:
        self.spent = max(0.0, self.spent - DOUBT_SHARE * (now - self.at))
        self.at = now
        return min(DOUBT_SECONDS, DOUBT_TOTAL_SECONDS - self.spent)


class RequesterResolver:
    def __init__(self, pair: ResourcePair, record: HoldingsWatch, source: PodSource) -> None:
        self._pair = pair
        self._record = record
        self._source = source
        self._newest: tuple[Record, PairHoldings] = (Record(), PairHoldings())
        self._alike, self._away = Doubt(), Doubt()  # pods that look alike; an API server that does not answer

    def held(self, record: Record | None) -> PairHoldings:
        """The part of a record that concerns this pair: the same object while nothing of it changes."""
        if record is None:
            return PairHoldings()
        known, before = self._newest
        if record is not known:
            found = PairHoldings.of(self._pair, record)
            self._newest = (record, before if found == before else found)
        return self._newest[1]

    @property
    def published(self) -> float:
        """When the newest reading began of which everybody knows all, by the monotonic clock in seconds."""
        return self._record.published

    def succeeds(self, pod: Pod) -> bool:
        """Whether the newest record has an earlier pod of its name; of a static one it has another UID."""
        another = self._newest[0].uids.get(pod.key, pod.uid) != pod.uid
        return another and not self._source.may_be_static(pod.metadata.name)

    def known(self, key: PodKey) -> Pod | None:
        """A pod of this node as last seen; None: not known now."""
        return next((pod for pod in self._source.pods_on_node() if pod.key == key), None)

    async def record(self, deadline: float = PATIENCE_SECONDS) -> Record | None:
        """The record now; None if it cannot be read."""
        try:
            return await self._record.look(deadline)
        except PodResourcesUnavailable as error:
            log.warning("records_unavailable", problem=str(error))
            return None

    async def resolve(
        self,
        member: PairMember,
        size: int,
        reservations: Open,
        refused: Collection[str],
        alone: Callable[[], bool],
        arrived: float,
    ) -> tuple[Facts, Asker]:
        """The container that asks for `size` units.

        `reservations`: the open ones, by a record. `refused`: UIDs of pods that were turned away; one of them
        asks only if nobody else can. `alone`: no other call waits. `arrived`: when this one came, by anyio's
        clock. Raises PairRefused when nobody or more than one may be asking.
        """
        began = counted = absent_asked = anyio.current_time()
        give_up = began + PATIENCE_SECONDS
        alike_until, away_until = (arrived + each.seconds(began) for each in (self._alike, self._away))
        pauses = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        resource = resource_of(self._pair, member)
        # One that has its other member asks, whether the watch has shown it or not.
        begun = [each.pod for each in reservations(None) if member not in each.granted]
        asked = self._begin(resource, size, began, begun)
        for attempt in itertools.count(1):
            facts = await self._facts(member, give_up - anyio.current_time(), asked)
            found = self._askers(member, size, facts, reservations)
            if facts.record and all(each.pod.started for each in found):
                # A listed pod whose known copy, or whose holder, is over may have a namesake by now.
                facts = await self._of(facts.record, facts.record.pods, member, asked)
                found = self._askers(member, size, facts, reservations)
            if len(found) == 1 and (
                record := await self._without_ended(facts.record, found[0], refused, asked)
            ):
                facts = await self._of(record, record.pods & asked.named, member, asked)
                found = self._askers(member, size, facts, reservations)
            if len(found) == 1:
                before, facts = facts, await self._confirmed(facts, found[0], asked)
                if facts is not before:
                    found = self._askers(member, size, facts, reservations)
            found = [each for each in found if each.pod.uid not in refused] or found
            if len(found) > 1 and attempt >= TRIES and alone():
                # One that was admitted while its resource was unknown may ask when its container starts, or
                # by the next kubelet. The first is beside an admission, whose own call then waits; the second
                # before that kubelet has heard of others, and by now who was just rejected is out.
                fresh = [each for each in found if not each.pod.started]
                found = fresh if any(not each.pod.ending for each in fresh) else found
            waits = not any(each.pod.started or each.pod.uid in refused for each in found)
            unseen = self._unseen(facts, asked, found, waits=waits)
            # Without a record nobody says whether one is there.
            alike = len(found) > 1 or bool(found and (unseen or not (waits or facts.record)))
            if found and not alike and facts.known and not found[0].pod.ending:
                return facts, found[0]
            now = anyio.current_time()
            if facts.known:
                # Equal pods are not the same: whose limits a container gets depends on who it is.
                doubt, budget, until = alike, self._alike, alike_until
            else:
                doubt = self._source.answers and alone() and not asked.useless
                budget, until = self._away, away_until
            budget.spent += (now - counted) * doubt
            counted = now
            if now >= give_up or (attempt >= TRIES and not (doubt and now < until)):
                break
            if doubt:
                # Their answers may come now, and the ends of pods that look alike.
                asked.forget([each.pod.key for each in found] if facts.known else [])
                if len(found) == 1 and now - absent_asked >= AWAY_PAUSE_SECONDS:
                    absent_asked = now  # they may be many
                    asked.forget(unseen)
            pauses.longest = LONGEST_PAUSE_SECONDS if facts.known else AWAY_PAUSE_SECONDS
            await anyio.sleep(min(pauses.next(), math.inf if attempt < TRIES else until - now))
        raise _nobody(facts, f"{size} of {resource}", found, unseen)

    def _begin(self, resource: str, size: int, now: float, begun: Collection[Pod]) -> _Answers:
        seen = self._source.pods_on_node()
        return _Answers(
            there=frozenset(pod.uid for pod in seen),
            first_until=now + MISS_SECONDS,
            wanted=frozenset(
                pod.key
                for pod in (*seen, *begun)
                if not pod.ending and any(each.limits.get(resource) == size for each in pod.containers)
            ),
        )

    def _unseen(
        self, facts: Facts, asked: _Answers, found: Collection[Asker], *, waits: bool
    ) -> frozenset[PodKey]:
        """Pods that nobody can see, one of which may be asking: a static one before its mirror.

        `waits`: those `found` wait to be admitted; of the static ones, those are through then that were
        listed before others. Else all count: an edited manifest makes another pod of the name. Others were
        deleted, within the call or by force: they count where they asked for as much, those without an object
        also where one that was `found` is through itself.
        """
        if facts.record is None:  # what the call saw before counts on
            return asked.unseen - facts.pods.keys()
        newcomers = facts.record.newcomers
        through = any(each.pod.key not in newcomers for each in found)
        ending = {pod.key for pod in facts.pods.values() if pod.ending and not pod.finished}
        going = asked.wanted & newcomers & ending
        asked.unseen = going | frozenset(
            key
            for key in (facts.absent | facts.unknown) & newcomers
            if through or key in asked.wanted or self._source.may_be_static(key[1])
        )
        return asked.unseen if waits else facts.absent | going

    async def confirmed(self, record: Record) -> Record:
        """The record after the API server was asked for holders that the kubelet does not list."""
        return await self._record.confirm(record.holdings)

    def _askers(self, member: PairMember, size: int, facts: Facts, reservations: Open) -> list[Asker]:
        record, pods = facts.record, facts.pods.values()
        return askers(self._pair, member, size, record, self.held(record), pods, reservations(record))

    async def _facts(self, member: PairMember, deadline: float, asked: _Answers) -> Facts:
        early = anyio.current_time() + MISS_SECONDS / 2 < asked.first_until
        # The list of the first second must not wait for a reading that may fail, whose answer may come yet.
        listing = beside(MISS_SECONDS / 2, partial(self._by_the_server, asked)) if early else nullcontext()
        async with listing:
            record = await self.record(deadline)
        if record is None:
            return await self._by_the_server(asked)
        shown = {pod.key for pod in self._source.pods_on_node()}
        return await self._of(record, record.pods - shown, member, asked)

    async def _without_ended(
        self, record: Record | None, asker: Asker, refused: Collection[str], asked: _Answers
    ) -> Record | None:
        """The record, where pods have ended that it names, by the API server's word now; None: none have.

        What the one before an asker had would count as had by it, and of a name that is listed without what
        it was listed with the next pod may be asking. Each name once in a call.
        """
        if record is None:
            return None
        pod = asker.pod
        # Plain init containers' units are never listed: that of the asker's own is asked after on suspicion.
        suspect = not self._source.current() or pod.uid in refused or record.uids.get(pod.key) != pod.uid
        own = pod.key if suspect else None
        hidden = {each.pod_key for each in record.hidden if each.listed or each.pod_key == own}
        if not (doubted := record.pods & hidden - asked.named):
            return None
        asked.named |= doubted
        confirmed = await self._record.confirm_names(doubted) or record
        return confirmed if doubted - {each.pod_key for each in confirmed.hidden} else None

    async def _of(
        self, record: Record, doubted: frozenset[PodKey], member: PairMember, asked: _Answers
    ) -> Facts:
        """By a record, after the API server was asked, once in a call, for holders of these names.

        Some ended unseen, and the checkpoint names them: what they held would count as had by the next.
        """
        names = doubted - asked.named
        asked.named |= names
        record = (names and await self._record.confirm_names(names)) or record
        # A pod may have followed another of the same name: the one that goes is not asking.
        known = sorted(self._source.pods_on_node(), key=lambda pod: not (pod.finished or pod.ending))
        pods = {pod.key: pod for pod in known}
        # Under a mute watch a copy that asks for the resource, or came last, may be of the one before, too.
        named, resource = [pods[key] for key in doubted & pods.keys()], resource_of(self._pair, member)
        asking = {pod.key for pod in named if any(each.limits.get(resource) for each in pod.containers)}
        over = {pod.key for pod in named if pod.finished or pod.ending}
        old = asking | over | (record.newcomers & pods.keys() & doubted)
        # Fresh copies of those that are listed and lack something of the member.
        keys = record.pods - pods.keys() | old
        listed = [Holder(*each) for each in record.containers if each[:2] in keys] if keys else []
        missing = {one.pod_key for one in listed if (one, member) not in self.held(record).by_place}
        if not missing:
            return Facts(record, pods)  # at once: those whom the reading has woken would have the turn first
        with anyio.move_on_after(MISS_SECONDS):
            async with anyio.create_task_group() as group:
                for key in missing:
                    read = self._source.fetch if key in old else self._source.get
                    group.start_soon(asked.ask, key, key, read)
        fresh = {key: pod for key in missing if isinstance(pod := asked.pods[key], Pod)}
        absent = frozenset(key for key in missing if asked.pods[key] is None)
        return Facts(record, {**pods, **fresh}, frozenset(missing - fresh.keys() - absent), absent)

    async def _by_the_server(self, asked: _Answers) -> Facts:
        """All pods of the node, read now: a watch may be mute, and no record shows what has come since."""
        # The kubelet had heard of the one that asks when it called; the watch may be a moment behind.
        first = anyio.current_time() < asked.first_until
        if first:
            asked.there |= {pod.uid for pod in self._source.pods_on_node()}
        try:
            pods = await self._source.list_now()
        except PodsUnavailable as error:
            log.warning("pods_unavailable", problem=str(error))
            asked.useless = not error.away
            return Facts(None, {}, problem=str(error))
        if first:
            asked.first_until = -math.inf
            asked.there |= {pod.uid for pod in pods}
        return Facts(None, {pod.key: pod for pod in pods if pod.uid in asked.there})

    async def _confirmed(self, facts: Facts, asker: Asker, asked: _Answers) -> Facts:
        """With a fresh copy of the only one that may be asking, where the copy may be of a pod that is over.

        Its successor of the same name is another pod: with limits, a namespace's policy and a UID of its own.
        """
        pod, waits = asker.pod, asker.pod.status.phase == "Pending"
        if facts.record is None or (self._source.current() and waits):
            return facts
        await asked.ask(pod.uid, pod.key, self._source.fetch)
        fresh = asked.pods[pod.uid]
        if isinstance(fresh, PodsUnavailable):
            # One that waits by the copy is most likely the same; one that runs was served before.
            return facts if waits else replace(facts, unknown=facts.unknown | {pod.key})
        if fresh is None:
            pods = {key: each for key, each in facts.pods.items() if key != pod.key}
            return replace(facts, pods=pods, absent=facts.absent | {pod.key})
        return replace(facts, pods={**facts.pods, pod.key: fresh})


def _nobody(facts: Facts, asked: str, found: Collection[Asker], unseen: frozenset[PodKey]) -> PairRefused:
    waiting = [each.pod.key for each in found if not each.pod.ending or len(found) > 1]
    keys = list(dict.fromkeys([*waiting, *sorted(facts.unknown | unseen if waiting else facts.unknown)]))
    if facts.problem:
        text = (
            f"who asks for {asked} is not known, and nothing is guessed: neither the kubelet's PodResources "
            f"nor the API server can be read ({facts.problem}); restore one of them and {RETRY}"
        )
    elif keys:
        log.warning("asker_doubtful", asked=asked, pods=["/".join(key) for key in keys])
        remedy = "restore the connection to the API server and " if facts.unknown else ""
        text = f"{asked} may be asked for by any of {_named(keys)}: nothing is guessed; {remedy}{RETRY}"
    else:
        text = f"no pod of this node is known to wait for {asked}; {RETRY}"
        if facts.absent:
            log.warning("asker_unknown", asked=asked, pods=["/".join(key) for key in sorted(facts.absent)])
            text += f". The API server does not know {_named(sorted(facts.absent))}: {STATIC_PODS}"
    return PairRefused(text, Cause.UNAVAILABLE)


def _named(pods: Sequence[PodKey]) -> str:
    """Pods of one namespace by their names; of several, whose tenants may read it, the number."""
    if len({namespace for namespace, _ in pods}) == 1:
        return ", ".join("/".join(key) for key in pods)
    return f"{len(pods)} pods of several namespaces (the agent's log has their names)"
