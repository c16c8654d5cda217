"""Finds the requesting container during a call: one look at the record, a GET for a pod not known yet."""

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import anyio
import structlog

from agent.kit.backoff import Backoff
from agent.kubelet.podresources import PATIENCE_SECONDS, PodList, PodResourcesUnavailable, RecordReader
from agent.model.demand import STATIC_PODS, Pod
from agent.model.ledger import PairMember, Reservation
from agent.model.units import ResourcePair
from agent.pairing.pod_access import Cause, PairRefused, PodSource, PodsUnavailable
from agent.pairing.requester import Asker, PairRecords, PodKey, Records, askers, resource_of

log = structlog.get_logger()

MISS_SECONDS = 1.0
# The kubelet may ask a moment before its own records, or the watch, show the pod.
TRIES = 4
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 0.3
# Kubelets before 1.34 go on listing a pod that was just rejected, which may look like one that asks until the
# API server shows its end. A refusal ends a pod for good, and nothing but other pods waits meanwhile.
DOUBT_SECONDS = 10.0
RETRY = "create the pod again"


@dataclass(frozen=True, slots=True)
class Facts:
    records: Records | None  # None: they cannot be read
    pods: Mapping[PodKey, Pod]
    unknown: frozenset[PodKey] = frozenset()  # listed pods whose spec cannot be read
    absent: frozenset[PodKey] = frozenset()  # listed pods that the API server does not know


class RequesterResolver:
    def __init__(self, pair: ResourcePair, record: RecordReader, source: PodSource) -> None:
        self._pair = pair
        self._record = record
        self._source = source
        self._parts = PairRecords(pair)

    def part_of(self, record: PodList) -> Records:
        """The part of a record that concerns this pair."""
        return self._parts.of(record)

    def known(self, key: PodKey) -> Pod | None:
        """A pod of this node as last seen; None: not known now."""
        return next((pod for pod in self._source.pods_on_node() if pod.key == key), None)

    async def records(self, deadline: float = PATIENCE_SECONDS) -> Records | None:
        """The records now; None if they cannot be read."""
        try:
            return self.part_of(await self._record.look(deadline))
        except PodResourcesUnavailable as error:
            log.warning("records_unavailable", problem=str(error))
            return None

    async def resolve(
        self, member: PairMember, size: int, reservations: Collection[Reservation], refused: Collection[str]
    ) -> tuple[Facts, Asker]:
        """The container that asks for `size` units.

        `refused`: UIDs of pods that were turned away; one of them asks only if nobody else can. Raises
        PairRefused when nobody or more than one may be asking.
        """
        began = anyio.current_time()
        give_up = began + PATIENCE_SECONDS
        pauses = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        for attempt in itertools.count(1):
            facts = await self._facts(member, give_up - anyio.current_time())
            found = askers(self._pair, member, size, facts.records, facts.pods.values(), reservations)
            if not found and facts.records:
                # A listed pod whose known copy is over may have a namesake by now.
                over = [key for key, pod in facts.pods.items() if pod.finished or pod.ending]
                facts = await self._fetched(facts, facts.records, over, member)
                found = askers(self._pair, member, size, facts.records, facts.pods.values(), reservations)
            found = [each for each in found if each.pod.uid not in refused] or found
            if len(found) == 1 and not facts.unknown:
                return facts, found[0]
            # Equal pods are not the same: whose limits a container gets depends on who it is.
            doubt = len(found) > 1 and not facts.unknown
            now = anyio.current_time()
            if now >= give_up or (attempt >= TRIES and not (doubt and now < began + DOUBT_SECONDS)):
                break
            await anyio.sleep(pauses.next())
        raise _nobody(facts, f"{size} of {resource_of(self._pair, member)}", found)

    async def _facts(self, member: PairMember, deadline: float) -> Facts:
        records = await self.records(deadline)
        # A pod may have followed another of the same name: the one that goes is not asking.
        known = sorted(self._source.pods_on_node(), key=lambda pod: not (pod.finished or pod.ending))
        facts = Facts(records, pods := {pod.key: pod for pod in known})
        return await self._fetched(facts, records, records.pods - pods.keys(), member) if records else facts

    async def _fetched(
        self, facts: Facts, records: Records, keys: Collection[PodKey], member: PairMember
    ) -> Facts:
        """With fresh copies of those pods that are listed and lack something of a member."""
        listed = [one for one in records.containers if one.pod_key in keys] if keys else []
        missing = {one.pod_key for one in listed if (one, member) not in records.held.by_place}
        found: dict[PodKey, Pod | None] = {}

        async def fetch(key: PodKey) -> None:
            try:
                found[key] = await self._source.get(*key)
            except PodsUnavailable as error:
                log.info("pod_unreadable", pod="/".join(key), problem=str(error))

        with anyio.move_on_after(MISS_SECONDS):
            async with anyio.create_task_group() as group:
                for key in missing:
                    group.start_soon(fetch, key)
        fresh = {key: pod for key, pod in found.items() if pod is not None}
        unknown = facts.unknown | (missing - found.keys() - facts.pods.keys())
        absent = facts.absent | (found.keys() - fresh.keys())
        return Facts(records, {**facts.pods, **fresh}, unknown, absent)


def _nobody(facts: Facts, asked: str, found: Collection[Asker]) -> PairRefused:
    names = [f"{each.pod.namespace}/{each.pod.name}" for each in found]
    names += ["/".join(key) for key in sorted(facts.unknown)]
    if names:
        remedy = "restore the connection to the API server and " if facts.unknown else ""
        text = f"{asked} may be asked for by any of {', '.join(names)}: nothing is guessed; {remedy}{RETRY}"
    else:
        text = f"no pod of this node is known to wait for {asked}; {RETRY}"
        if facts.absent:
            static = ", ".join("/".join(key) for key in sorted(facts.absent))
            text += f". The API server does not know {static}: {STATIC_PODS}"
    return PairRefused(text, Cause.UNAVAILABLE)
