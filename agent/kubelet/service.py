"""The RPCs that the kubelet calls on a resource's socket: DevicePlugin v1beta1 and the plugin watcher's."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import structlog
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from agent._proto import pluginregistration, v1beta1
from agent.kit.tasks import Cell, describe
from agent.kubelet import wire
from agent.kubelet.grpc_server import Handlers, received, send
from agent.kubelet.wire import Reason, Refused, ResourcePlugin
from agent.model.holding import Record, Source
from agent.model.modes import SEPARATOR

log = structlog.get_logger()

M = TypeVar("M")
NOTHING_READ = Record()

API_VERSION = "v1beta1"
# The kubelet sets no deadline on calls that hold up every pod of the node, so the agent does: on the request,
# which names each free unit and is hundreds of KB long: a node whose processors are busy may take seconds to
# pass it on, and the pod of a request that is given up is lost,
REQUEST_SECONDS = 20.0
# and on the answer, which may have to wait for a busy kubelet's own answer (`podresources.PATIENCE_SECONDS`).
ANSWER_SECONDS = 20.0
PRE_START_SECONDS = 28.0  # the kubelet gives up after 30
SEND_SECONDS = 30.0
# The kubelet knows who got something some milliseconds after Allocate: this is ample. What it writes down so
# much later shows whether they came to anybody. PodResources never show what plain init containers hold.
GRANT_SECONDS = 2.0
# It writes when a container has all its devices, or with a list of a plugin, if its disk lets it: it may be
# that it never does, and a reading that began so much later is believed without.
UNWRITTEN_SECONDS = 20.0
# A pod takes two calls for each resource, one right after the other.
FOLLOWED_SECONDS = 0.005


@dataclass
class ServiceStats:
    """Counters of one resource's socket; read by metrics."""

    lists_sent: int = 0
    bytes_sent: int = 0
    last_list_bytes: int = 0
    streams_opened: int = 0
    registrations: int = 0
    registration_failures: int = 0
    calls: dict[tuple[str, str], int] = field(default_factory=dict)  # (RPC, "ok" or gRPC status) -> count
    seconds: dict[str, float] = field(default_factory=dict)  # RPC -> sum of durations

    def count(self, call: str, outcome: str, seconds: float) -> None:
        self.calls[call, outcome] = self.calls.get((call, outcome), 0) + 1
        self.seconds[call] = self.seconds.get(call, 0.0) + seconds


class DevicePluginService:
    """Serves one resource. Holds no state of devices: that is the plugin's."""

    def __init__(
        self,
        plugin: ResourcePlugin,
        allocated: Callable[[], None] = lambda: None,
        read: Callable[[], Record] = lambda: NOTHING_READ,
    ) -> None:
        """`allocated` is called after each Allocate that was granted.

        `read` answers who holds what, by the newest reading of the kubelet's record.
        """
        self.plugin = plugin
        self._allocated = allocated
        self._read = read
        self.stats = ServiceStats()
        # Changes of what the kubelet did: the endpoint's task waits on these.
        self.infos_given: Cell[int] = Cell(0)
        self.streams: Cell[int] = Cell(0)
        self.last_status_error: str | None = None
        self._waiting: set[anyio.CancelScope] = set()
        self._delivered: Cell[tuple[int, ...]] = Cell(())  # newest list version sent on each open stream
        # Device IDs that no reading could show yet, with the time of the grant, the oldest first, and
        # those of calls under way.
        self._granted: dict[str, float] = {}
        self._before = NOTHING_READ  # who held what when the newest of them was granted
        self._judged = NOTHING_READ  # the reading by which these were looked at last
        self._sent_again = -math.inf  # when the list was, for the checkpoint
        self._asked: list[tuple[str, ...]] = []
        self._draining = False
        self._serving = 0  # calls whose pods wait
        self._answered = -math.inf  # when the newest of them ended, by the monotonic clock

    @property
    def busy(self) -> bool:
        """Whether a pod waits for an answer, or had one this moment and is about to ask for more."""
        return self._serving > 0 or time.monotonic() < self._answered + FOLLOWED_SECONDS

    def handlers(self) -> Handlers:
        plugin, registration = "/v1beta1.DevicePlugin/", "/pluginregistration.Registration/"
        unary, streaming = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        api, watcher = v1beta1, pluginregistration
        return Handlers(
            {
                plugin + "GetDevicePluginOptions": Handler(
                    self._options, unary, api.Empty, api.DevicePluginOptions
                ),
                plugin + "ListAndWatch": Handler(
                    self._list_and_watch, streaming, api.Empty, api.ListAndWatchResponse
                ),
                plugin + "GetPreferredAllocation": Handler(
                    self._preferred, unary, wire.PreferenceRequests, api.PreferredAllocationResponse
                ),
                plugin + "Allocate": Handler(
                    self._allocate, unary, wire.AllocationRequests, api.AllocateResponse
                ),
                plugin + "PreStartContainer": Handler(
                    self._pre_start, unary, api.PreStartContainerRequest, api.PreStartContainerResponse
                ),
                registration + "GetInfo": Handler(self._info, unary, watcher.InfoRequest, watcher.PluginInfo),
                registration + "NotifyRegistrationStatus": Handler(
                    self._notified, unary, watcher.RegistrationStatus, watcher.RegistrationStatusResponse
                ),
            }
        )

    def drain(self) -> None:
        """Let every ListAndWatch return, so that the kubelet reads a clean end; new ones end at once."""
        self._draining = True
        for scope in tuple(self._waiting):
            scope.cancel()

    def resume(self) -> None:
        """Serve again after `drain`; what the kubelet refused before does not count any more."""
        self._draining = False
        self.last_status_error = None

    async def delivered(self) -> None:
        """Return once the list as it is now has left on every open stream; bound it with a cancel scope."""
        version = self.plugin.lists.version
        await self._delivered.wait_for(lambda sent: all(each >= version for each in sent))

    def _touch(self, containers: Iterable[Iterable[str]]) -> None:
        self._before = self._forget()
        now = time.monotonic()
        for device in (device for ids in containers for device in ids):
            self._granted.pop(device, None)
            self._granted[device] = now

    def granted_lately(self) -> frozenset[str]:
        """Device IDs that are being handed out, or were and stand in no reading yet."""
        return self.given_lately().union(*self._asked)

    def given_lately(self) -> frozenset[str]:
        """Those of them that were."""
        record = self._forget()
        if self._granted and record is not self._judged:
            self._judged = record
            self._forget_shown(record)
            self._have_it_written(record.began)
        return frozenset(self._granted)

    def _forget(self) -> Record:
        """Let go of grants that the newest reading would show; no age alone ends one."""
        record = self._read()
        oldest = max(record.written - GRANT_SECONDS, record.began - UNWRITTEN_SECONDS)
        while self._granted and self._granted[first := next(iter(self._granted))] < oldest:
            del self._granted[first]
        if not self._granted:
            self._before = NOTHING_READ
        return record

    def _forget_shown(self, record: Record) -> None:
        """Let go of grants that a reading shows which began afterwards: it speaks for them from now on.

        A holding that was there before a grant is one of before: the checkpoint is written later.
        """
        later = {device for device, granted in self._granted.items() if granted < record.began}
        earlier = set(map(id, self._before.holdings)) if later else ()
        for each in record.holdings if later else ():
            # What a container holds it was granted in one call.
            if each.ids and each.ids[0] in later and each.resource == self.plugin.resource:
                known = each.source is not Source.FORGOTTEN and id(each) not in earlier
                for device in later & each.id_set if known else ():
                    self._granted.pop(device, None)  # a later container of the pod may have it, too

    def _have_it_written(self, began: float) -> None:
        """Send the list again where a reading left open who has got something.

        The kubelet writes its checkpoint with each.
        """
        waits = any(granted < began - GRANT_SECONDS for granted in self._granted.values())
        if waits and began > self._sent_again + GRANT_SECONDS:
            self._sent_again = time.monotonic()
            self.plugin.lists.publish(self.plugin.lists.value)

    @contextmanager
    def _handing_out(self, containers: Iterable[Iterable[str]]) -> Iterator[None]:
        """Inside, these IDs count as granted: to find out who asks may take seconds."""
        asked = [tuple(ids) for ids in containers]
        self._asked += asked
        try:
            yield
        finally:
            for ids in asked:
                self._asked.remove(ids)

    async def _hand_out(
        self, stream: Stream[Any, M], message: M, containers: Sequence[Sequence[str]]
    ) -> None:
        """Send an answer; its IDs count as granted until a reading that began after it had left."""
        with self._handing_out(containers):
            try:
                await send(stream, message, SEND_SECONDS)
            finally:
                self._touch(containers)

    async def _options(self, stream: Stream[v1beta1.Empty, v1beta1.DevicePluginOptions]) -> None:
        await received(stream, REQUEST_SECONDS)
        await send(
            stream,
            v1beta1.DevicePluginOptions(
                pre_start_required=self.plugin.needs_pre_start,
                get_preferred_allocation_available=self.plugin.offers_preference,
            ),
            SEND_SECONDS,
        )

    async def _list_and_watch(self, stream: Stream[v1beta1.Empty, bytes]) -> None:
        await received(stream, REQUEST_SECONDS)
        lists = self.plugin.lists
        self.stats.streams_opened += 1
        self.streams.publish(self.streams.value + 1)
        log.info("kubelet_listening", resource=self.plugin.resource, bytes=len(lists.value))
        mine = -1
        self._count_delivered(None, mine)
        try:
            while not self._draining:
                sent = lists.version
                message = lists.value
                await send(stream, message, SEND_SECONDS)
                self.stats.lists_sent += 1
                self.stats.bytes_sent += len(message)
                self.stats.last_list_bytes = len(message)
                self._count_delivered(mine, sent)
                mine = sent
                # Only this wait is given up by `drain`: a message is never cut in half.
                with anyio.CancelScope() as waiting:
                    self._waiting.add(waiting)
                    try:
                        await lists.wait_change(sent)
                    finally:
                        self._waiting.discard(waiting)
        finally:
            self._count_delivered(mine, None)
            self.streams.publish(self.streams.value - 1)
            log.info("kubelet_stopped_listening", resource=self.plugin.resource, draining=self._draining)

    def _count_delivered(self, before: int | None, after: int | None) -> None:
        versions = list(self._delivered.value)
        if before is not None:
            versions.remove(before)
        if after is not None:
            versions.append(after)
        self._delivered.publish(tuple(versions))

    async def _preferred(self, stream: Stream[wire.PreferenceRequests, bytes]) -> None:
        requests = await received(stream, REQUEST_SECONDS)

        chosen: list[Sequence[str]] = []

        async def answer() -> bytes:
            chosen.extend([await self.plugin.prefer(request) for request in requests.containers])
            return wire.preferences(chosen)

        # The kubelet takes our choice without another look at its list: none may leave that meanwhile.
        with self._handing_out([*each.must_include, *each.available] for each in requests.containers):
            message = await self._bounded("GetPreferredAllocation", ANSWER_SECONDS, answer)
            await self._hand_out(stream, message, chosen)

    async def _allocate(self, stream: Stream[wire.AllocationRequests, bytes]) -> None:
        requests = await received(stream, REQUEST_SECONDS)

        async def answer() -> bytes:
            return wire.allocations([await self.plugin.allocate(ids) for ids in requests.containers])

        with self._handing_out(requests.containers):
            message = await self._bounded("Allocate", ANSWER_SECONDS, answer)
            await self._hand_out(stream, message, requests.containers)
        self._allocated()
        # In a turn of the loop of its own: the answer leaves first.
        asyncio.get_running_loop().call_soon(self._report, requests.containers)

    def _report(self, containers: Sequence[Sequence[str]]) -> None:
        for ids in containers:
            gpus = sorted({device.partition(SEPARATOR)[0] for device in ids})
            log.info("allocated", resource=self.plugin.resource, devices=len(ids), gpus=gpus)

    async def _pre_start(
        self, stream: Stream[v1beta1.PreStartContainerRequest, v1beta1.PreStartContainerResponse]
    ) -> None:
        request = await received(stream, REQUEST_SECONDS)

        async def answer() -> v1beta1.PreStartContainerResponse:
            await self.plugin.pre_start(request.devices_ids)
            return v1beta1.PreStartContainerResponse()

        await send(stream, await self._bounded("PreStartContainer", PRE_START_SECONDS, answer), SEND_SECONDS)

    async def _info(
        self, stream: Stream[pluginregistration.InfoRequest, pluginregistration.PluginInfo]
    ) -> None:
        await received(stream, REQUEST_SECONDS)
        await send(
            stream,
            pluginregistration.PluginInfo(
                type="DevicePlugin", name=self.plugin.resource, endpoint="", supported_versions=[API_VERSION]
            ),
            SEND_SECONDS,
        )
        self.infos_given.publish(self.infos_given.value + 1)

    async def _notified(
        self,
        stream: Stream[pluginregistration.RegistrationStatus, pluginregistration.RegistrationStatusResponse],
    ) -> None:
        status = await received(stream, REQUEST_SECONDS)
        await send(stream, pluginregistration.RegistrationStatusResponse(), SEND_SECONDS)
        if status.plugin_registered:
            self.last_status_error = None
            self.stats.registrations += 1
            log.info("registered", resource=self.plugin.resource, way="plugins_registry")
        else:
            self.last_status_error = status.error or "no reason given"
            self.stats.registration_failures += 1
            log.error("registration_refused", resource=self.plugin.resource, reason=self.last_status_error)

    async def _bounded(self, call: str, seconds: float, answer: Callable[[], Awaitable[M]]) -> M:
        """Run one RPC under a deadline; every refusal is logged, counted and explained."""
        started = time.perf_counter()
        outcome = "INTERNAL"
        self._serving += 1
        try:
            with anyio.move_on_after(seconds):
                result = await answer()
                outcome = "ok"
                return result
            outcome = Reason.LATE.value
            text = f"{call} of {self.plugin.resource} took longer than {seconds:g} s; see the agent's log"
            log.error("request_late", resource=self.plugin.resource, call=call, deadline_seconds=seconds)
            raise GRPCError(Status.DEADLINE_EXCEEDED, text)
        except Refused as refusal:
            outcome = refusal.reason.value
            log.warning("request_refused", resource=self.plugin.resource, call=call, reason=str(refusal))
            raise GRPCError(Status[outcome], str(refusal)) from refusal
        except GRPCError:
            raise
        except Exception as error:
            log.exception("request_failed", resource=self.plugin.resource, call=call)
            text = f"{call} of {self.plugin.resource} failed in the agent: {describe(error)}; see its log"
            raise GRPCError(Status.INTERNAL, text) from error
        finally:
            self._serving -= 1
            self._answered = time.monotonic()
            self.stats.count(call, outcome, time.perf_counter() - started)
