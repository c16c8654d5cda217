"""DRA drivers that have registered: their connections, the health they report, the wipe of their slices.

Facts: kubelet 1.37, `pkg/kubelet/cm/dra/plugin`: slices of the node are deleted at the kubelet's start, and
those of a driver 30 s after the last connection to it ended.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import anyio
import structlog
from anyio.abc import TaskGroup
from grpclib.const import Cardinality
from grpclib.protocol import H2Protocol

from agent._proto import v1, v1alpha1
from agent._proto.k8s.io.kubelet.pkg.apis.dra import v1 as dra

from .api_server import Api
from .device_tables import CallFailed
from .grpc_peer import CALL_FAILURES, UnixChannel, go_error
from .plugin import translated
from .timings import Timings

logger = structlog.get_logger()
SERVICE: Final = "v1.DRAPlugin"
# The newest first; a kubelet of 1.36 knows the second only.
HEALTH_SERVICES: Final = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
Report = v1.DeviceHealth | v1alpha1.DeviceHealth


class _Watched(H2Protocol):
    """A connection whose end somebody waits for."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.ended = anyio.Event()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.ended.set()


class _Channel(UnixChannel):
    def _protocol_factory(self) -> H2Protocol:
        made = super()._protocol_factory()
        return _Watched(made.handler, made.config, made.h2_config)

    async def connected(self) -> anyio.Event:
        """Connect where that is not done yet; the event of the connection's end. Raises CALL_FAILURES."""
        protocol = await self.__connect__()
        assert isinstance(protocol, _Watched)
        return protocol.ended


class ClaimPlugin:
    """One endpoint of one driver."""

    def __init__(self, driver: str, socket: Path, health: str, timings: Timings) -> None:
        self.driver = driver
        self.socket = socket
        self.connected = False
        self.scope = anyio.CancelScope()
        self._health = health
        self._timings = timings
        self._channel = _Channel(socket)
        self._stub = dra.DraPluginStub(self._channel)

    async def watch_connection(self, changed: Callable[[], None]) -> None:
        """Connect, and again whenever the connection ended, for ever."""
        pause = 1.0
        while True:
            try:
                ended = await self._channel.connected()
            except CALL_FAILURES:
                await anyio.sleep(pause)
                pause = min(pause * 1.6, 120.0)
                continue
            self.connected, pause = True, 1.0
            changed()
            await ended.wait()
            self.connected = False
            changed()

    async def watch_health(self, on_report: Callable[[str, Report], None]) -> None:
        """Follow the health of the driver's devices, for ever."""
        if not self._health:
            return
        messages = v1 if self._health == HEALTH_SERVICES[0] else v1alpha1
        request, reply = messages.WatchDevicesRequest, messages.WatchDevicesResponse
        path = f"/{self._health}/NodeWatchResources"
        while True:
            try:
                async with self._channel.request(path, Cardinality.UNARY_STREAM, request, reply) as stream:
                    await stream.send_message(request(), end=True)
                    async for message in stream:
                        for report in message.devices:
                            on_report(self.driver, report)
            except CALL_FAILURES as error:
                logger.debug("health_stream_ended", driver=self.driver, error=go_error(error))
            await anyio.sleep(self._timings.health_retry)

    async def prepare(self, claims: list[dra.Claim]) -> dict[str, dra.PreparedClaim]:
        """Raises CallFailed."""
        with translated():
            request = dra.PrepareRequest(claims=claims)
            return (await self._stub.node_prepare_resources(request, timeout=self._timings.prepare)).claims

    async def unprepare(self, claims: list[dra.Claim]) -> dict[str, dra.UnpreparedClaim]:
        """Raises CallFailed."""
        with translated():
            request = dra.UnprepareRequest(claims=claims)
            return (await self._stub.node_unprepare_resources(request, timeout=self._timings.prepare)).claims

    def close(self) -> None:
        """Drop the connection for good."""
        self.scope.cancel()
        self._channel.close()


class ClaimPlugins:
    """All registered drivers, each with its endpoints in the order of their coming."""

    def __init__(self, group: TaskGroup, api: Api, timings: Timings, health: Sequence[str]) -> None:
        """`health`: the health services that the kubelet knows."""
        self._group = group
        self._api = api
        self._timings = timings
        self._services = health
        self._plugins: dict[str, list[ClaimPlugin]] = {}
        self._wipes: dict[str, anyio.CancelScope] = {}
        # Verdict and message by driver, pool and device.
        self.health: dict[tuple[str, str, str], tuple[int, str]] = {}
        group.start_soon(self._wipe, None)

    def fault(self, name: str, versions: list[str]) -> str | None:
        """The fault of a registration, in the kubelet's words."""
        if SERVICE in versions:
            return None
        return (
            f"invalid supported gRPC versions of DRA driver plugin {name}: none of services supported by the "
            f"plugin ({versions}) are supported by the kubelet ([{SERVICE}])"
        )

    async def connect(self, name: str, socket: Path, versions: list[str]) -> None:
        """Take a driver's endpoint up; its connection is made in the background. Raises CallFailed."""
        plugins = self._plugins.setdefault(name, [])
        if any(each.socket == socket for each in plugins):
            raise CallFailed(f"endpoint {socket} already registered for DRA driver plugin {name}")
        health = next((each for each in self._services if each in versions), "")
        plugin = ClaimPlugin(name, socket, health, self._timings)
        plugins.append(plugin)
        self._group.start_soon(self._run, plugin)
        self._sync(name)

    def disconnect(self, name: str, socket: Path) -> None:
        """Forget an endpoint."""
        known = self._plugins.get(name, [])
        for plugin in [each for each in known if each.socket == socket]:
            known.remove(plugin)
            plugin.close()
        self._sync(name)

    def plugin(self, driver: str) -> ClaimPlugin:
        """The newest endpoint of a driver, of those that are connected if there is one. Raises CallFailed."""
        plugins = self._plugins.get(driver, [])
        if not plugins:
            raise CallFailed(f"DRA driver {driver} is not registered")
        return next((each for each in reversed(plugins) if each.connected), plugins[-1])

    def close(self) -> None:
        """Drop every connection, as the end of the process does."""
        for plugins in self._plugins.values():
            for plugin in plugins:
                plugin.close()

    async def _run(self, plugin: ClaimPlugin) -> None:
        with plugin.scope:
            async with anyio.create_task_group() as group:
                group.start_soon(plugin.watch_health, self._reported)
                await plugin.watch_connection(lambda: self._sync(plugin.driver))

    def _reported(self, driver: str, report: Report) -> None:
        if report.device is not None:
            key = (driver, report.device.pool_name, report.device.device_name)
            self.health[key] = (int(report.health), report.message)

    def _sync(self, driver: str) -> None:
        if any(each.connected for each in self._plugins.get(driver, ())):
            if pending := self._wipes.pop(driver, None):
                pending.cancel()
        elif driver not in self._wipes:
            self._wipes[driver] = anyio.CancelScope()
            self._group.start_soon(self._wipe, driver)

    async def _wipe(self, driver: str | None) -> None:
        """Delete the node's slices, one driver's after a while or all at once; tried until it succeeds."""
        scope = self._wipes[driver] if driver else anyio.CancelScope()
        with scope:
            await anyio.sleep(self._timings.wiping if driver else 0)
            pause = 1.0
            while not self._api.reachable:
                await anyio.sleep(pause)
                pause = min(pause * 2, 300.0)
            self._api.resources.wipe(self._api.node_name, driver)
            logger.info("slices_wiped", driver=driver or "all")
        if driver and self._wipes.get(driver) is scope:
            del self._wipes[driver]
