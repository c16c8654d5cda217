"""The DRA driver as the kubelet sees it: its socket, its RPCs, and its registration."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import anyio
import structlog
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from agent._proto import pluginregistration, v1, v1alpha1
from agent._proto.k8s.io.kubelet.pkg.apis.dra import v1 as dra
from agent.kit.tasks import Backoff, Cell, describe
from agent.kubelet.grpc_server import DrainableServer, Handlers, received, send

# The RPCs that the kubelet calls on a DRA driver: DRAPlugin v1, health of devices, and registration.

log = structlog.get_logger()

SERVICE = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/"
# By the names of kubelets of 1.36 and later; the newest of each that both sides have counts.
VERSIONS = ["v1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"]
RECEIVE_SECONDS = 5.0
SEND_SECONDS = 5.0
# The kubelet takes a report for unknown that is older than 30 s.
HEALTH_SECONDS = 10.0
LONGEST_MESSAGE = 1024


@dataclass(frozen=True, slots=True)
class ClaimName:
    """A ResourceClaim as the kubelet names it: what is allocated to it the API server knows."""

    namespace: str
    uid: str
    name: str


@dataclass(frozen=True, slots=True)
class PreparedShare:
    """A device of a claim, ready for containers."""

    requests: tuple[str, ...]
    pool: str
    device: str
    share_id: str
    cdi: tuple[str, ...]  # qualified names


@dataclass(frozen=True, slots=True)
class DeviceVerdict:
    """The health of a device; `cause`: why it is not well, in words."""

    pool: str
    device: str
    well: bool
    cause: str = ""


class ClaimDriver(Protocol):
    """A DRA driver: both calls answer for each claim, and neither takes longer than 40 s."""

    name: str
    health: Cell[Sequence[DeviceVerdict]]

    async def prepare(self, claims: Sequence[ClaimName]) -> Mapping[str, Sequence[PreparedShare] | str]:
        """The devices of each claim, by UID, or why there are none."""

    async def unprepare(self, claims: Sequence[ClaimName]) -> None:
        """Nothing uses these claims any more."""


class ClaimService:
    """Serves one driver. Holds no state of claims: that is the driver's."""

    def __init__(self, driver: ClaimDriver) -> None:
        self._driver = driver
        self._streams: set[anyio.CancelScope] = set()
        self._draining = False
        self.registered: Cell[bool] = Cell(False)
        self.problem = "the kubelet has not asked yet"  # while it is not registered

    def handlers(self) -> Handlers:
        unary, streaming = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        watcher, registration = pluginregistration, "/pluginregistration.Registration/"

        def health(version: Any) -> Handler:  # noqa: ANN401  a module of messages
            async def watch(stream: Stream[Any, Any]) -> None:
                await self._watch(stream, version)

            return Handler(watch, streaming, version.WatchDevicesRequest, version.WatchDevicesResponse)

        return Handlers(
            {
                SERVICE + "NodePrepareResources": Handler(
                    self._prepare, unary, dra.PrepareRequest, dra.PrepareResponse
                ),
                SERVICE + "NodeUnprepareResources": Handler(
                    self._unprepare, unary, dra.UnprepareRequest, dra.UnprepareResponse
                ),
                "/v1.DRAResourceHealth/NodeWatchResources": health(v1),
                "/v1alpha1.DRAResourceHealth/NodeWatchResources": health(v1alpha1),
                registration + "GetInfo": Handler(self._info, unary, watcher.InfoRequest, watcher.PluginInfo),
                registration + "NotifyRegistrationStatus": Handler(
                    self._notified, unary, watcher.RegistrationStatus, watcher.RegistrationStatusResponse
                ),
            }
        )

    def drain(self) -> None:
        """Let streams of health return, so that the kubelet reads a clean end; new ones end at once."""
        self._draining = True
        self.registered.publish(False)
        for scope in tuple(self._streams):
            scope.cancel()

    def resume(self) -> None:
        self._draining = False

    async def _prepare(self, stream: Stream[dra.PrepareRequest, dra.PrepareResponse]) -> None:
        request = await received(stream, RECEIVE_SECONDS)
        names = [ClaimName(each.namespace, each.uid, each.name) for each in request.claims]
        try:
            found = await self._driver.prepare(names)
        except Exception as error:
            log.exception("prepare_failed", claims=[each.name for each in names])
            raise GRPCError(Status.INTERNAL, f"the agent failed: {describe(error)}; see its log") from error
        claims = {each.uid: _encoded(found[each.uid]) for each in names}
        await send(stream, dra.PrepareResponse(claims=claims), SEND_SECONDS)

    async def _unprepare(self, stream: Stream[dra.UnprepareRequest, dra.UnprepareResponse]) -> None:
        request = await received(stream, RECEIVE_SECONDS)
        names = [ClaimName(each.namespace, each.uid, each.name) for each in request.claims]
        await self._driver.unprepare(names)
        claims = {each.uid: dra.UnpreparedClaim() for each in names}
        await send(stream, dra.UnprepareResponse(claims=claims), SEND_SECONDS)

    async def _watch(self, stream: Stream[Any, Any], version: Any) -> None:  # noqa: ANN401  as above
        await received(stream, RECEIVE_SECONDS)
        health = self._driver.health
        with anyio.CancelScope() as scope:
            self._streams.add(scope)
            try:
                while not self._draining:
                    seen, now = health.version, int(time.time())
                    await send(stream, _report(version, health.value, now), SEND_SECONDS)
                    with anyio.move_on_after(HEALTH_SECONDS):
                        await health.wait_change(seen)
            finally:
                self._streams.discard(scope)

    async def _info(
        self, stream: Stream[pluginregistration.InfoRequest, pluginregistration.PluginInfo]
    ) -> None:
        await received(stream, RECEIVE_SECONDS)
        await send(
            stream,
            pluginregistration.PluginInfo(
                type="DRAPlugin", name=self._driver.name, endpoint="", supported_versions=VERSIONS
            ),
            SEND_SECONDS,
        )

    async def _notified(
        self,
        stream: Stream[pluginregistration.RegistrationStatus, pluginregistration.RegistrationStatusResponse],
    ) -> None:
        status = await received(stream, RECEIVE_SECONDS)
        await send(stream, pluginregistration.RegistrationStatusResponse(), SEND_SECONDS)
        if status.plugin_registered:
            log.info("registered", driver=self._driver.name, way="plugins_registry")
        else:
            self.problem = f"the kubelet refused it: {status.error or 'no reason given'}"
            log.error("registration_refused", driver=self._driver.name, reason=status.error)
        self.registered.publish(status.plugin_registered)


def _encoded(found: Sequence[PreparedShare] | str) -> dra.PreparedClaim:
    if isinstance(found, str):
        return dra.PreparedClaim(error=found)
    return dra.PreparedClaim(
        devices=[
            dra.PreparedDevice(
                request_names=list(each.requests),
                pool_name=each.pool,
                device_name=each.device,
                cdi_device_ids=list(each.cdi),
                share_id=each.share_id or None,
            )
            for each in found
        ]
    )


def _report(version: Any, verdicts: Sequence[DeviceVerdict], now: int) -> Any:  # noqa: ANN401  as above
    return version.WatchDevicesResponse(
        devices=[
            version.DeviceHealth(
                device=version.DeviceName(pool_name=each.pool, device_name=each.device),
                health=version.Verdict.HEALTHY if each.well else version.Verdict.UNHEALTHY,
                last_updated_time=now,
                message=each.cause[:LONGEST_MESSAGE],
            )
            for each in verdicts
        ]
    )


# The life of the DRA driver's socket: in plugins_registry, where the kubelet finds it and calls it too.

LOOK_SECONDS = 1.0  # the kubelet looks as often
SOCKET = "gna-dra.sock"


class ClaimEndpoint:
    """Keeps a driver registered for as long as `run` runs. A kubelet that restarts asks again by itself."""

    def __init__(self, driver: ClaimDriver, kubelet_root: Path) -> None:
        self.service = ClaimService(driver)
        self.path = kubelet_root / "plugins_registry" / SOCKET

    @property
    def blocker(self) -> str | None:
        """Why it is not registered, in words; None: it is."""
        if self.service.registered.value:
            return None
        return f"the DRA driver is not registered with the kubelet: {self.service.problem}"

    async def run(self) -> None:
        """Serve until cancelled; then end streams and remove the socket."""
        backoff = Backoff(first=0.1, longest=30.0)
        while True:
            self.service.resume()
            server = DrainableServer(self.service.handlers(), self.path)
            try:
                await server.start()
                backoff.reset()
                while await server.in_place():
                    await anyio.sleep(LOOK_SECONDS)
                log.warning("socket_gone", socket=str(self.path))
            except OSError as error:
                problem = f"{self.path}: {error.strerror or error}; is the kubelet running?"
                if problem != self.service.problem:
                    log.warning("registration_waits", driver=self.path.name, obstacle=problem)
                self.service.problem = problem
            finally:
                self.service.drain()
                await server.stop()
            await anyio.sleep(backoff.next())
