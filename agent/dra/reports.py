"""Reports on claims to people: events, and conditions in the claims' status where rights allow."""

from http import HTTPStatus
from typing import Any

import anyio
import structlog

from agent.cluster.api import ApiError, KubeApi, now
from agent.cluster.event_recorder import Event, EventRecorder, Regarding
from agent.dra.driver import ClaimReports
from agent.kit.tasks import Mailbox
from agent.kubelet.claim_service import ClaimName
from agent.model.resource_claim import DRIVER, GROUP, ResourceClaim

log = structlog.get_logger()

REFUSED = "ClaimRefused"
WAITING = 256
DENIED_SECONDS = 600.0  # without the right, until it is tried again
LONGEST_MESSAGE = 1024
MOST_TOLD = 1024  # claims that were refused: most are never prepared, and nobody says when they are gone


class ClusterClaimReports(ClaimReports):
    """Emitting never waits."""

    def __init__(self, api: KubeApi, events: EventRecorder) -> None:
        self._api = api
        self._events = events
        self._conditions: Mailbox[tuple[ClaimName, str]] = Mailbox(WAITING)  # with the problem, if any
        # UIDs of claims whose condition says that they were refused, the oldest first.
        self._told: dict[str, None] = {}
        self._denied_until = 0.0

    def refused(self, name: ClaimName, claim: ResourceClaim | None, problem: str) -> None:
        about = Regarding("ResourceClaim", name.name, name.namespace, name.uid, GROUP)
        self._events.emit(Event(about, REFUSED, problem, warning=True, key=problem))
        for pod in claim.status.reserved_for if claim else ():
            if pod.resource == "pods":
                regarding = Regarding("Pod", pod.name, name.namespace, pod.uid)
                self._events.emit(Event(regarding, REFUSED, problem, warning=True, key=problem))
        if claim:
            self._told[name.uid] = None
            if len(self._told) > MOST_TOLD:
                del self._told[next(iter(self._told))]
            self._conditions.offer((name, problem))

    def prepared(self, name: ClaimName, claim: ResourceClaim | None) -> None:
        if name.uid in self._told or (claim and claim.told):
            self._told.pop(name.uid, None)
            self._conditions.offer((name, ""))

    async def run(self) -> None:
        """Write conditions until cancelled."""
        async for name, problem in self._conditions:
            if anyio.current_time() < self._denied_until:
                continue
            try:
                await self._write(name, problem)
            except ApiError as error:
                if error.status == HTTPStatus.FORBIDDEN:
                    self._denied_until = anyio.current_time() + DENIED_SECONDS
                log.info("claim_condition_not_written", claim=name.name, problem=str(error))

    async def _write(self, name: ClaimName, problem: str) -> None:
        path = f"/apis/{GROUP}/namespaces/{name.namespace}/resourceclaims/{name.name}"
        claim = await self._api.read(path, dict[str, Any])
        status = claim.get("status") or {}
        if claim["metadata"]["uid"] != name.uid or not status.get("allocation"):
            return
        ours = [each for each in status["allocation"]["devices"]["results"] if each["driver"] == DRIVER]
        condition = {
            "type": "Ready",
            "status": "False" if problem else "True",
            "reason": "Refused" if problem else "Prepared",
            "message": problem[:LONGEST_MESSAGE],
            "lastTransitionTime": now(),
        }
        others = [each for each in status.get("devices") or () if each["driver"] != DRIVER]
        fields = ("driver", "pool", "device", "shareID")
        mine = [
            {**{key: each[key] for key in fields if each.get(key)}, "conditions": [condition]}
            for each in ours
        ]
        status["devices"] = [*others, *mine]
        # With the version that was read: one who writes meanwhile is not written over.
        await self._api.put(f"{path}/status", {**claim, "status": status})
