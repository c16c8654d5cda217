"""Finding out who is asking, from inside a call: one look at the record, a GET for a pod not known yet."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import anyio
import structlog

from agent.kubelet.podresources import PodList, PodResourcesUnavailable
from agent.model.demand import Impossible, Pod, ResourcePair
from agent.model.ledger import PairMember, Reservation
from agent.pairing.ports import LIST_SECONDS, Cause, PairRefused, PodSource, PodsUnavailable, Record
from agent.pairing.requester import Asker, Known, PodKey, Records, askers, resource_of, same_outcome

log = structlog.get_logger()

MISS_SECONDS = 1.0
# A pod that was just rejected lingers in the records for a moment, and so may look like one that asks.
TRIES = 4
PAUSE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known at one moment of a call."""

    records: Records | None  # None: they cannot be read
    pods: Mapping[PodKey, Pod]
    unknown: frozenset[PodKey] = frozenset()  # listed pods whose spec cannot be read
    absent: frozenset[PodKey] = frozenset()  # listed pods that the API server does not know


class RequesterResolver:
    """Names the container behind a request."""

    def __init__(self, pair: ResourcePair, record: Record, source: PodSource) -> None:
        self._pair = pair
        self._record = record
        self._source = source
        self._known = Known()

    async def records(self) -> Records | None:
        """The records now; None if they cannot be read."""
        try:
            return self.read(await self._record.look(LIST_SECONDS))
        except PodResourcesUnavailable as error:
            log.warning("records_unavailable", problem=str(error))
            return None

    def read(self, listed: PodList) -> Records:
        """What a record says about the pair."""
        return Records.of(self._pair, listed, self._known)

    async def resolve(
        self, member: PairMember, size: int, reservations: Collection[Reservation], refused: Collection[str]
    ) -> tuple[Facts, Asker]:
        """The container that asks for `size` units.

        `refused`: UIDs of pods that were turned away; one of them asks only if nobody else can. Raises
        PairRefused when nobody or more than one may be asking.
        """
        began = anyio.current_time()
        for attempt in range(TRIES):
            if attempt:
                await anyio.sleep(PAUSE_SECONDS)
            facts = await self._facts(member)
            found = self._askers(facts, member, size, reservations, refused)
            if not found and facts.records:
                facts = await self._asked_anew(facts, facts.records, member)
                found = self._askers(facts, member, size, reservations, refused)
            if len(found) == 1 and not facts.unknown:
                return facts, found[0]
            if facts.unknown or (facts.records is None and anyio.current_time() - began >= LIST_SECONDS):
                break  # whoever took that long to say nothing leaves no time to be asked again
        if found and not facts.unknown and self._same(found):
            return facts, found[0]
        raise self._nobody(facts, f"{size} of {resource_of(self._pair, member)}", found)

    def _nobody(self, facts: Facts, asked: str, found: Collection[Asker]) -> PairRefused:
        names = [f"{each.pod.namespace}/{each.pod.name}" for each in found]
        names += ["/".join(key) for key in sorted(facts.unknown)]
        if names:
            text = f"{asked} may be asked for by any of {', '.join(names)}: nothing is guessed; "
            remedy = "restore the connection to the API server and " if facts.unknown else ""
            text += remedy + "create the pod anew"
        else:
            text = f"no pod of this node is known to wait for {asked}; create the pod anew"
            if facts.absent:
                static = ", ".join("/".join(key) for key in sorted(facts.absent))
                text += (
                    f". The API server does not know {static}: a static pod cannot have a share, "
                    "since its spec is not to be seen before it runs; use a DaemonSet"
                )
        return PairRefused(text, Cause.UNAVAILABLE)

    def _same(self, found: Collection[Asker]) -> bool:
        try:
            return same_outcome(self._pair, found)
        except Impossible:
            return False

    def _askers(
        self,
        facts: Facts,
        member: PairMember,
        size: int,
        reservations: Collection[Reservation],
        refused: Collection[str],
    ) -> list[Asker]:
        found = askers(self._pair, member, size, facts.records, facts.pods, reservations)
        return [each for each in found if each.pod.uid not in refused] or found

    async def _facts(self, member: PairMember) -> Facts:
        records = await self.records()
        pods: dict[PodKey, Pod] = {}
        for pod in self._source.pods_on_node():
            known = pods.get(pod.key)
            # A pod may have followed another of the same name: the one that goes is not asking.
            if known is None or known.finished or known.ending:
                pods[pod.key] = pod
        if records is None:
            return Facts(None, pods)
        missing = [key for key in records.pods - pods.keys() if records.lacks(key, member)]
        return await self._filled(Facts(records, pods), missing)

    async def _asked_anew(self, facts: Facts, records: Records, member: PairMember) -> Facts:
        """With fresh copies of listed pods whose known copy is over: they may have a namesake by now."""
        over = [
            key
            for key, pod in facts.pods.items()
            if (pod.finished or pod.ending) and key in records.pods and records.lacks(key, member)
        ]
        filled = await self._filled(facts, over)
        return replace(filled, unknown=facts.unknown)

    async def _filled(self, facts: Facts, missing: Collection[PodKey]) -> Facts:
        if not missing:
            return facts
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
        unknown = frozenset(key for key in missing if key not in found)
        absent = frozenset(key for key, pod in found.items() if pod is None)
        return replace(facts, pods={**facts.pods, **fresh}, unknown=unknown, absent=facts.absent | absent)
