"""Finding out who is asking, from inside the RPC: one PodResources List, a GET for a pod not known yet."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import anyio
import structlog

from agent.kubelet.api import Reason, Refused
from agent.kubelet.podresources import PodList, PodResourcesUnavailable
from agent.model.demand import Impossible, Kind, Pod
from agent.model.ledger import Half
from agent.pairing.ports import PodSource, PodsUnavailable
from agent.pairing.requester import Asker, Known, Records, askers, resource_of, same_outcome

log = structlog.get_logger()

LIST_SECONDS = 1.0  # of the two seconds that an RPC may take
MISS_SECONDS = 1.0
# A pod that was just rejected lingers in the records for a moment, and so may look like one that asks.
TRIES = 4
PAUSE_SECONDS = 0.02


class Lister(Protocol):
    """PodResources, as far as it is used here."""

    async def list(self, deadline: float = LIST_SECONDS) -> PodList:
        """All containers and what they hold. Raises PodResourcesUnavailable."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known at one moment of an RPC."""

    records: Records | None  # None: the kubelet's records cannot be read
    pods: Mapping[tuple[str, str], Pod]
    unknown: frozenset[tuple[str, str]]  # listed pods whose spec cannot be read


class SpecsUnknown(Exception):
    """No known pod is asking, but pods are listed whose specs cannot be read."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        super().__init__()


class Identity:
    """Names the container behind a request."""

    def __init__(self, kind: Kind, lister: Lister, source: PodSource) -> None:
        self._kind = kind
        self._lister = lister
        self._source = source
        self._known = Known()

    def pods(self) -> Collection[Pod]:
        """The pods of the node as last seen."""
        return self._source.pods_on_node()

    async def records(self) -> Records | None:
        """The kubelet's records now; None if they cannot be read."""
        try:
            listed = await self._lister.list(LIST_SECONDS)
        except PodResourcesUnavailable as error:
            log.warning("records_unavailable", problem=str(error))
            return None
        return Records.of(self._kind, listed, self._known)

    async def who(
        self, half: Half, size: int, served: Collection[tuple[str, str, Half]], refused: Collection[str]
    ) -> tuple[Facts, Asker]:
        """The container that asks for `size` units. `refused`: UIDs of pods that are out of the race.

        Raises Refused when nobody or more than one may be asking, SpecsUnknown.
        """
        began = anyio.current_time()
        for attempt in range(TRIES):
            if attempt:
                await anyio.sleep(PAUSE_SECONDS)
            facts = await self._facts(half)
            found = self._askers(facts, half, size, served, refused)
            if not found and facts.records:
                facts = await self._asked_anew(facts, half)
                found = self._askers(facts, half, size, served, refused)
            if len(found) == 1 and not facts.unknown:
                return facts, found[0]
            if not found and facts.unknown:
                raise SpecsUnknown(facts)
            if facts.records is None and anyio.current_time() - began >= LIST_SECONDS:
                break  # a kubelet that took that long to say nothing leaves no time to be asked again
        resource = resource_of(self._kind, half)
        if not found:
            raise Refused(
                f"no pod of this node is known to wait for {size} of {resource}; create the pod anew",
                Reason.UNAVAILABLE,
            )
        names = ", ".join(f"{each.pod.namespace}/{each.pod.name}" for each in found)
        if facts.unknown:
            names += ", " + ", ".join("/".join(key) for key in sorted(facts.unknown))
        elif self._same(found):
            return facts, found[0]
        raise Refused(
            f"{size} of {resource} may be asked for by any of {names}: nothing is guessed; "
            "create the pod anew",
            Reason.UNAVAILABLE,
        )

    def _same(self, found: Collection[Asker]) -> bool:
        try:
            return same_outcome(self._kind, found)
        except Impossible:
            return False

    def _askers(
        self,
        facts: Facts,
        half: Half,
        size: int,
        served: Collection[tuple[str, str, Half]],
        refused: Collection[str],
    ) -> list[Asker]:
        pods = {key: pod for key, pod in facts.pods.items() if pod.uid not in refused}
        return askers(self._kind, half, size, facts.records, pods, served)

    async def _facts(self, half: Half) -> Facts:
        records = await self.records()
        pods: dict[tuple[str, str], Pod] = {}
        for pod in self._source.pods_on_node():
            known = pods.get(pod.key)
            # A pod may have followed another of the same name: the one that goes is not asking.
            if known is None or known.finished or known.ending:
                pods[pod.key] = pod
        if records is None:
            return Facts(None, pods, frozenset())
        missing = [key for key in records.pods - pods.keys() if records.lacking(key, half)]
        return await self._filled(records, pods, missing)

    async def _asked_anew(self, facts: Facts, half: Half) -> Facts:
        """With fresh copies of listed pods whose known copy is over: they may have a namesake by now."""
        assert facts.records is not None
        over = [
            key
            for key, pod in facts.pods.items()
            if (pod.finished or pod.ending) and key in facts.records.pods and facts.records.lacking(key, half)
        ]
        if not over:
            return facts
        filled = await self._filled(facts.records, facts.pods, over)
        return Facts(filled.records, filled.pods, facts.unknown)

    async def _filled(
        self,
        records: Records,
        pods: Mapping[tuple[str, str], Pod],
        missing: Collection[tuple[str, str]],
    ) -> Facts:
        if not missing:
            return Facts(records, pods, frozenset())
        found: dict[tuple[str, str], Pod | None] = {}

        async def fetch(key: tuple[str, str]) -> None:
            try:
                found[key] = await self._source.get(*key)
            except PodsUnavailable as error:
                log.info("pod_unreadable", pod="/".join(key), problem=str(error))

        with anyio.move_on_after(MISS_SECONDS):
            async with anyio.create_task_group() as group:
                for key in missing:
                    group.start_soon(fetch, key)
        fresh = {key: pod for key, pod in found.items() if pod is not None}
        return Facts(records, {**pods, **fresh}, frozenset(key for key in missing if key not in found))
