"""Kubernetes events: what people see with `kubectl describe node`."""

import datetime as dt
import hashlib
import time
from dataclasses import dataclass
from typing import Literal

import structlog

from agent.cluster.api import ApiError, ApiRefused, KubeApi
from agent.kit.mailbox import Mailbox

log = structlog.get_logger()

REPORTER = "gpu-node-agent"
WAITING = 64  # events that wait for the API server; more are dropped, and the log still has them
NODE_EVENTS_NAMESPACE = "default"  # where events of objects without a namespace live


@dataclass(frozen=True, slots=True)
class Regarding:
    """The object that an event is about."""

    kind: Literal["Node", "Pod"]
    name: str
    namespace: str = ""
    uid: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """One event; equal ones are counted on one object instead of piling up."""

    regarding: Regarding
    reason: str  # CamelCase, one of docs/names.md
    message: str
    warning: bool = False


class EventRecorder:
    """Sends events in the background. Whoever emits never waits."""

    def __init__(self, api: KubeApi, node: str) -> None:
        self._api = api
        self._node = node
        self._mailbox: Mailbox[Event] = Mailbox(WAITING)
        self._counts: dict[Event, tuple[int, str]] = {}

    @property
    def dropped(self) -> int:
        """Events that were given up because too many waited."""
        return self._mailbox.dropped

    def node(self, reason: str, message: str, warning: bool = False) -> None:
        """An event about the own node."""
        # The kubelet uses the node's name as its UID in events; kubectl describe looks for that.
        self.emit(Event(Regarding("Node", self._node, uid=self._node), reason, message, warning))

    def emit(self, event: Event) -> None:
        """Hand an event over; dropped when too many wait."""
        self._mailbox.offer(event)

    async def run(self) -> None:
        """Send what is handed over until cancelled; what the server refuses is logged once each."""
        async for event in self._mailbox:
            try:
                await self._send(event)
            except ApiError as error:
                log.warning("event_not_sent", reason=event.reason, message=event.message, problem=str(error))

    async def _send(self, event: Event) -> None:
        namespace = event.regarding.namespace or NODE_EVENTS_NAMESPACE
        path = f"/api/v1/namespaces/{namespace}/events"
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        count, name = self._counts.get(event, (0, ""))
        if count:
            try:
                await self._api.merge_patch(f"{path}/{name}", {"count": count + 1, "lastTimestamp": now})
            except ApiRefused as error:
                if error.status != 404:  # events live for an hour
                    raise
            else:
                self._counts[event] = (count + 1, name)
                return
        digest = hashlib.sha256(f"{event}{time.time_ns()}".encode()).hexdigest()[:16]
        name = f"{event.regarding.name[:200]}.{digest}"
        await self._api.post(path, self._body(event, name, namespace, now))
        if len(self._counts) >= WAITING:
            self._counts.clear()
        self._counts[event] = (1, name)

    def _body(self, event: Event, name: str, namespace: str, now: str) -> dict[str, object]:
        about = event.regarding
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": about.kind,
                "name": about.name,
                **({"namespace": about.namespace} if about.namespace else {}),
                **({"uid": about.uid} if about.uid else {}),
            },
            "reason": event.reason,
            "message": event.message[:1024],
            "type": "Warning" if event.warning else "Normal",
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": REPORTER, "host": self._node},
            "reportingComponent": REPORTER,
            "reportingInstance": self._node,
        }
