"""The substitutes for threads and the network in a storm, and the processes that are dead.

A process that was killed does nothing any more. Inside one process that is played so: the life of an agent is
marked dead, and from then on its files, its API calls and its calls to NVML end in an error before they have
an effect, while its tasks are cancelled.
"""

import asyncio
import contextvars
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.lowlevel
import anyio.to_thread
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from yarl import URL

import agent.cluster.api
import agent.cluster.reach
from agent._proto import v1
from agent.holdings.record import Checkpoint
from agent.nvml import event_watch
from agent.simulator.events import EventReader, RawEvent
from agent.simulator.faults import FaultTable
from agent.simulator.kubelet.devices import DeviceManager
from agent.simulator.kubelet.pod_specs import ContainerSpec, PodSpec
from agent.simulator.kubelet.podresources_server import PodResourcesServer
from tests.storm import direct_http


class Life:
    """One life of the agent's process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.dead = False


class Dead(Exception):
    """A process that was killed tried to do something."""


LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)


def check_alive() -> None:
    """Raises Dead where the caller belongs to a process that was killed."""
    life = LIFE.get()
    if life is not None and life.dead:
        raise Dead


async def _inline(func: Callable[..., Any], *args: Any, **_: Any) -> Any:
    await anyio.lowlevel.checkpoint()
    check_alive()
    found = func(*args)
    if KUBELET.reading and isinstance(getattr(func, "__self__", None), Checkpoint):
        await anyio.sleep(KUBELET.reading)
    return found


class Blocked(BaseException):
    """A simulated call to NVML would block: for so many seconds at most; None: until its fault is lifted."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds


class _Nvml:
    """Calls to NVML that wait for an event, and whether the one under way has waited long enough."""

    def __init__(self) -> None:
        self.expired = False
        self.waiting: dict[int, tuple[asyncio.TimerHandle, Callable[[], None], bool]] = {}

    def wake(self, *, lifted: bool = False) -> None:
        """Look again: something happened to a GPU, or all faults were `lifted`; else calls go on hanging."""
        for job, (handle, again, hangs) in list(self.waiting.items()):
            if lifted or not hangs:
                del self.waiting[job]
                handle.cancel()
                asyncio.get_running_loop().call_soon(again)


NVML = _Nvml()
HANG_LOOK_SECONDS = 3600.0


class _InlineWorker:
    """A thread's thread without a thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.jobs = self
        self._alive = True
        self._hangs = False

    def put(self, job: Any) -> None:
        """Take a job, as the thread's queue does."""
        if job is None:
            self._alive = False
            return
        job.loop.call_soon(self._work, job, None)

    def is_alive(self) -> bool:
        """Whether a thread would still be there: one that hangs is."""
        return self._alive or self._hangs

    def _work(self, job: Any, until: float | None) -> None:
        loop: asyncio.AbstractEventLoop = job.loop
        NVML.expired = until is not None and loop.time() >= until
        try:
            check_alive()
            job.work()
        except Blocked as blocked:
            self._hangs = blocked.seconds is None
            pause = HANG_LOOK_SECONDS if blocked.seconds is None else blocked.seconds
            until = loop.time() + pause if until is None or self._hangs else until

            def again() -> None:
                self._work(job, until)

            handle = loop.call_at(until, self._expire, job, until)
            NVML.waiting[id(job)] = (handle, again, self._hangs)
            return
        except BaseException as error:  # noqa: BLE001  carried to the caller whatever it is
            job.error = error
        self._hangs = False
        job.done.set()

    def _expire(self, job: Any, until: float) -> None:
        NVML.waiting.pop(id(job), None)
        self._work(job, until)


def _wait_for_event(self: EventReader, timeout_s: float | None) -> RawEvent | None:
    event = self._next()
    if event is None and not NVML.expired and timeout_s != 0:
        raise Blocked(timeout_s)
    return event


def _hang(self: FaultTable, ticket: int) -> None:
    if self.holds(ticket):
        raise Blocked(None)


CALLER = "X-Caller"  # the header that says whose request it is
AGENT = "agent"


class _Configured:
    host = "http://storm"
    refresh_api_key_hook = None

    async def auth_settings(self) -> dict[str, Any]:
        return {}


class _Rest:
    """The client's HTTP layer over a unix socket."""

    def __init__(self, socket_path: str, caller: str) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(socket_path), headers={CALLER: caller}
        )

    async def request(
        self,
        method: str,
        url: str,
        *,
        query_params: Any,
        headers: Any,
        body: Any,
        _preload_content: bool,
        _request_timeout: Any,
    ) -> Any:
        check_alive()
        data = None if body is None else aiohttp.JsonPayload(body)
        return await self._session.request(
            method, url, params=query_params, headers=headers, data=data, timeout=_request_timeout
        )

    async def close(self) -> None:
        await self._session.close()


class _DirectRest:
    """The client's HTTP layer without HTTP."""

    def __init__(self, server: direct_http.Server, caller: str) -> None:
        self._server = server
        self._caller = caller

    async def request(
        self,
        method: str,
        url: str,
        *,
        query_params: Any,
        headers: Any,
        body: Any,
        _preload_content: bool,
        _request_timeout: Any,
    ) -> Any:
        check_alive()
        headers = {**headers, CALLER: self._caller}
        return await self._server.request(method, URL(url), query_params, headers, body, _request_timeout)

    async def close(self) -> None:
        """Nothing is kept open between requests."""


def client(api_socket: str, caller: str) -> agent.cluster.api.KubeApi:
    """A client of the API server; `caller` is in the header CALLER of each request."""
    server = direct_http.Way.server
    rest = _Rest(api_socket, caller) if server is None else _DirectRest(server, caller)
    return agent.cluster.api.KubeApi(_Configured(), rest)


class _Kubelet:
    """How the kubelet is not well.

    `delay`: seconds that a container's admission takes before its devices are asked for. `records`: how
    PodResources is not well ("refuses", "late"); empty: it is. `answering`: seconds that it takes before and
    after it looks who holds what. `reading`: those between the checkpoint as it was and its reader.
    `lagging`: late answers of PodResources that are to come, also when it is well again; `lagged`: when the
    last one ended.
    """

    def __init__(self) -> None:
        self.delay = [0.0]
        self.lagging, self.lagged = 0, 0.0
        self.calm()

    def calm(self) -> None:
        """The records are at hand again."""
        self.records = ""
        self.answering = (0.0, 0.0)
        self.reading = 0.0


KUBELET = _Kubelet()
_allocate = DeviceManager.allocate


async def _allocate_later(
    self: DeviceManager, pod: PodSpec, uid: str, container: ContainerSpec, running: bool
) -> None:
    if KUBELET.delay[0]:
        await anyio.sleep(KUBELET.delay[0])
    await _allocate(self, pod, uid, container, running)


_list = PodResourcesServer.list
LATE_SECONDS = 7.0


async def _list_if_well(
    self: PodResourcesServer, message: v1.ListPodResourcesRequest
) -> v1.ListPodResourcesResponse:
    if KUBELET.records == "refuses":
        raise GRPCError(Status.UNAVAILABLE, "storm")
    before, after = KUBELET.answering
    if KUBELET.records == "late":
        before += LATE_SECONDS
    if not before + after:
        return await _list(self, message)
    KUBELET.lagging += 1
    try:
        await anyio.sleep(before)
        answer = await _list(self, message)
        await anyio.sleep(after)
        return answer
    finally:
        KUBELET.lagging, KUBELET.lagged = KUBELET.lagging - 1, anyio.current_time()


def install(api_socket: str) -> None:
    """Put the stand-ins in place, for this process."""

    async def connect(kubeconfig: Path | None) -> agent.cluster.api.KubeApi:
        del kubeconfig
        return client(api_socket, AGENT)

    NVML.waiting.clear()  # of a storm before
    KUBELET.lagging, KUBELET.lagged = 0, 0.0
    anyio.to_thread.run_sync = _inline  # type: ignore[assignment]
    event_watch._Worker = _InlineWorker  # type: ignore[assignment,misc]
    agent.cluster.reach.connect = connect  # type: ignore[attr-defined]
    DeviceManager.allocate = _allocate_later  # type: ignore[method-assign]
    PodResourcesServer.list = _list_if_well  # type: ignore[method-assign]
    EventReader.wait = _wait_for_event  # type: ignore[method-assign]
    FaultTable._hang = _hang  # type: ignore[method-assign]
