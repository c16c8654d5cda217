"""Kubernetes events: what people see with `kubectl describe node`."""

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

import anyio
import structlog

from agent.cluster.api import ApiError, ApiRefused, ApiUnavailable, KubeApi, now
from agent.kit.tasks import Backoff, Mailbox

log = structlog.get_logger()

REPORTER = "gpu-node-agent"
WAITING = 64  # events that wait for the API server; more are dropped, and the log still has them
WAITING_OF_PODS = 48  # of these; tenants' pods, however many, leave room for what happens to the node
NODE_EVENTS_NAMESPACE = "default"  # where events of objects without a namespace live
KEPT_SECONDS = 3600.0  # --event-ttl of the API server: after it an event is gone and may be written again
TRIES = 5  # for an event that the API server does not answer to; one that it refuses is given up
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 5.0
# What a container can bring about again and again, in other figures each time: of one reason on one pod so
# many in a row, and then one in so long, as client-go has it. Of all else, as of sizes, the newest holds.
ONES_OWN_DOING = frozenset({"MemoryCapExceeded", "ContainerEnded", "ContainerNotEnded"})
IN_A_ROW, SPARE_SECONDS = 25, 300.0
REMEMBERED = 4096  # keys that were written; of older ones the API server still knows the name
MOST_SENDERS = 1024  # whose events are counted: a node has some hundred pods at a time


@dataclass(frozen=True, slots=True)
class Regarding:
    kind: Literal["Node", "Pod", "ResourceClaim"]
    name: str
    namespace: str = ""
    uid: str = ""
    api_version: str = "v1"


@dataclass(frozen=True, slots=True)
class Event:
    """One event; equal ones are counted on one object instead of piling up."""

    regarding: Regarding
    reason: str  # CamelCase, one of docs/names.md
    message: str
    warning: bool = False
    # With one: the object has at most one event of this reason and key while the API server keeps it, from
    # any writer and however often. For what is found again with each attempt, in other figures.
    key: str = ""


class EventRecorder:
    """Sends events in the background; emitting never waits."""

    def __init__(self, api: KubeApi, node: str, reporter: str = REPORTER) -> None:
        """`node`: the node or pod that reports, `reporter`: the component."""
        self._api = api
        self._node = node
        self._reporter = reporter
        self._once: OrderedDict[str, float] = OrderedDict()  # names of events, and when they were written
        self._mailbox: Mailbox[Event] = Mailbox(WAITING)
        self._counts: dict[Event, tuple[int, str]] = {}
        self._crowded = 0  # of pods, dropped while others had room
        # Of each object and reason: how many were sent, less those that time has paid for, and when that was.
        self._sent: OrderedDict[tuple[Regarding, str], tuple[float, float]] = OrderedDict()

    @property
    def dropped(self) -> int:
        """Events that were given up because too many waited, or came from one pod or claim."""
        return self._mailbox.dropped + self._crowded

    def node(self, reason: str, message: str, warning: bool = False) -> None:
        # The kubelet uses the node's name as its UID in events; kubectl describe looks for that.
        self.emit(Event(Regarding("Node", self._node, uid=self._node), reason, message, warning))

    def emit(self, event: Event) -> None:
        """Hand an event over; dropped when too many wait, or come from one pod or claim."""
        node = event.regarding.kind == "Node"
        if not node and (self._mailbox.depth >= WAITING_OF_PODS or (not event.key and self._is_flood(event))):
            self._crowded += 1
        else:
            self._mailbox.offer(event)

    def _is_flood(self, event: Event) -> bool:
        """Whether its object has had too many of its reason; counts it where it has not."""
        if event.reason not in ONES_OWN_DOING:
            return False
        about, now = (event.regarding, event.reason), time.monotonic()
        sent, at = self._sent.pop(about, (0.0, now))
        sent = max(0.0, sent - (now - at) / SPARE_SECONDS)
        flood = sent > IN_A_ROW - 1
        self._sent[about] = (sent if flood else sent + 1, now)
        if len(self._sent) > MOST_SENDERS:
            self._sent.popitem(last=False)
        return flood

    async def run(self) -> None:
        """Send what is handed over until cancelled; what the server refuses is logged once each."""
        async for event in self._mailbox:
            try:
                await self._send(event)
            except ApiError as error:
                log.warning("event_not_sent", reason=event.reason, message=event.message, problem=str(error))

    async def _send(self, event: Event) -> None:
        """Raises ApiError once the server has refused it, or was silent `TRIES` times."""
        digest = hashlib.sha256(f"{event}{time.time_ns()}".encode()).hexdigest()[:16]
        pauses = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        for _ in range(TRIES - 1):
            try:
                await self._write(event, digest)
            except ApiUnavailable:
                await anyio.sleep(pauses.next())
            else:
                return
        await self._write(event, digest)

    async def _write(self, event: Event, digest: str) -> None:
        namespace = event.regarding.namespace or NODE_EVENTS_NAMESPACE
        path = f"/api/v1/namespaces/{namespace}/events"
        if event.key:
            await self._send_once(event, path, namespace)
            return
        count, name = self._counts.get(event, (0, ""))
        if count:
            try:
                await self._api.merge_patch(f"{path}/{name}", {"count": count + 1, "lastTimestamp": now()})
            except ApiRefused as error:
                if error.status != 404:  # events live for an hour
                    raise
            else:
                self._counts[event] = (count + 1, name)
                return
        name = f"{event.regarding.name[:200]}.{digest}"
        try:
            await self._api.post(path, self._body(event, name, namespace))
        except ApiRefused as error:
            if error.status != HTTPStatus.CONFLICT:  # written by a try whose answer did not come in time
                raise
        if len(self._counts) >= WAITING:
            self._counts.clear()
        self._counts[event] = (1, name)

    async def _send_once(self, event: Event, path: str, namespace: str) -> None:
        about = event.regarding
        identity = f"{about.kind}/{about.uid}/{event.reason}/{event.key}"
        name = f"{about.name[:200]}.{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
        written = self._once.get(name)
        if written is not None and time.monotonic() - written < KEPT_SECONDS:
            return
        try:
            await self._api.post(path, self._body(event, name, namespace))
        except ApiRefused as error:
            if error.status != HTTPStatus.CONFLICT:  # this or another process wrote it before
                raise
        self._once[name] = now = time.monotonic()
        self._once.move_to_end(name)
        while len(self._once) > REMEMBERED or next(iter(self._once.values())) <= now - KEPT_SECONDS:
            self._once.popitem(last=False)

    def _body(self, event: Event, name: str, namespace: str) -> dict[str, object]:
        about, moment = event.regarding, now()
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": about.api_version,
                "kind": about.kind,
                "name": about.name,
                **({"namespace": about.namespace} if about.namespace else {}),
                **({"uid": about.uid} if about.uid else {}),
            },
            "reason": event.reason,
            "message": event.message[:1024],
            "type": "Warning" if event.warning else "Normal",
            "count": 1,
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "source": {"component": self._reporter, "host": self._node},
            "reportingComponent": self._reporter,
            "reportingInstance": self._node,
        }
