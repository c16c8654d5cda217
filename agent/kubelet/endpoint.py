"""The life of one resource's socket: bind, be found by the kubelet, stay registered, leave cleanly.

Two ways in, never both at once, because the kubelet keeps one connection for each resource name and
closes the newer one when the older ends:

- plugins_registry: the kubelet finds the socket by itself, at its own restart too;
- kubelet.sock: we call Register. Only for kubelets that do not look into plugins_registry.
"""

from enum import Enum
from pathlib import Path
from typing import Literal

import anyio
import structlog
from grpclib.client import Channel
from grpclib.exceptions import GRPCError, StreamTerminatedError

from agent._proto import v1beta1
from agent.kit.backoff import Backoff
from agent.kit.inotify import FolderGone, watching
from agent.kubelet.api import ResourcePlugin
from agent.kubelet.server import DrainableServer
from agent.kubelet.service import API_VERSION, DevicePluginService

log = structlog.get_logger()

REGISTER_SECONDS = 10.0  # the kubelet dials back within the call and allows itself as long
# A kubelet that restarts asks again by itself; one that dropped our stream and lives on never does.
SILENCE_SECONDS = 5.0
LOOK_SECONDS = 30.0  # inotify may miss a change (overflow, a folder made anew): look anyway
FOLDER_RETRY_SECONDS = 1.0


class Way(Enum):
    """How the kubelet comes to know a resource."""

    REGISTRY = "plugins_registry"
    SOCKET = "kubelet.sock"


class Endpoint:
    """Keeps one resource registered for as long as `run` runs."""

    def __init__(
        self,
        plugin: ResourcePlugin,
        kubelet_root: Path,
        device_plugins: Path,
        registration: Literal["auto", "registry", "socket"] = "auto",
        registry_wait_seconds: float = 10.0,
    ) -> None:
        self.plugin = plugin
        self.service = DevicePluginService(plugin)
        self.way = Way.SOCKET if registration == "socket" else Way.REGISTRY
        self._may_fall_back = registration == "auto"
        self._registry_wait = registry_wait_seconds
        self._folders = {Way.REGISTRY: kubelet_root / "plugins_registry", Way.SOCKET: device_plugins}
        self._obstacle: str | None = "it has not been tried yet"
        vendor, _, name = plugin.resource.partition("/")
        self._file = f"gna-{vendor.split('.')[0]}-{name}.sock"

    @property
    def path(self) -> Path:
        """Where the socket is, or will be."""
        return self._folders[self.way] / self._file

    @property
    def registered(self) -> bool:
        """Whether the kubelet listens to this resource's list right now."""
        return self.service.streams.value > 0

    @property
    def blocker(self) -> str | None:
        """Why this resource is not registered, in words; None when it is."""
        if self.registered:
            return None
        return f"{self.plugin.resource} is not registered with the kubelet: {self._obstacle}"

    async def run(self) -> None:
        """Serve and stay registered until cancelled; then end streams and remove the socket."""
        backoff = Backoff(first=0.01, longest=30.0, factor=3.0)
        while True:
            server = DrainableServer(self.service.handlers(), self.path)
            try:
                await self._folder_exists()
                await server.start()
                if await self._registered_once(server):
                    backoff.reset()
                    await self._while_registered(server)
            except OSError as error:
                self._hinder(f"{self.path}: {error.strerror or error}")
            except (GRPCError, StreamTerminatedError, TimeoutError) as error:
                self._hinder(f"Register on {self._kubelet_socket} failed: {_told(error)}")
            finally:
                self.service.drain()
                await server.stop()
            self.service.resume()
            await anyio.sleep(backoff.next())

    @property
    def _kubelet_socket(self) -> Path:
        return self._folders[Way.SOCKET] / "kubelet.sock"

    def _hinder(self, obstacle: str) -> None:
        if obstacle != self._obstacle:
            self._obstacle = obstacle
            log.warning("not_registered", resource=self.plugin.resource, obstacle=obstacle)

    async def _folder_exists(self) -> None:
        """Wait for the kubelet's folder: before its first start there is none, and we make none for it."""
        folder = anyio.Path(self.path.parent)
        while not await folder.is_dir():
            self._hinder(f"{folder} does not exist; is the kubelet running with this root folder?")
            await anyio.sleep(FOLDER_RETRY_SECONDS)

    async def _registered_once(self, server: DrainableServer) -> bool:
        """Wait until the kubelet listens. False: begin anew, perhaps the other way."""
        streams = self.service.streams
        if self.way is Way.SOCKET:
            self._hinder(f"waiting for {self._kubelet_socket}")
            await self._register()
            with anyio.move_on_after(SILENCE_SECONDS):
                await streams.wait_for(lambda open_now: open_now > 0)
                return True
            self._hinder("the kubelet accepted the registration but does not listen")
            return False
        infos = self.service.infos_given.value
        self._hinder(f"the kubelet has not asked {self.path} yet")
        while True:
            with anyio.move_on_after(self._registry_wait):
                await streams.wait_for(lambda open_now: open_now > 0)
                return True
            asked = self.service.infos_given.value != infos
            if asked or self.service.last_status_error or not server.in_place():
                self._hinder(self.service.last_status_error or "the kubelet asked but does not listen")
                return False
            if self._may_fall_back and await anyio.Path(self._kubelet_socket).is_socket():
                log.info("registry_unread", resource=self.plugin.resource, waited_seconds=self._registry_wait)
                self.way = Way.SOCKET
                return False

    async def _register(self) -> None:
        channel = Channel(path=str(self._kubelet_socket))
        try:
            await v1beta1.RegistrationStub(channel).register(
                v1beta1.RegisterRequest(
                    version=API_VERSION,
                    endpoint=self._file,
                    resource_name=self.plugin.resource,
                    options=v1beta1.DevicePluginOptions(
                        pre_start_required=self.plugin.needs_pre_start,
                        get_preferred_allocation_available=self.plugin.offers_preference,
                    ),
                ),
                timeout=REGISTER_SECONDS,
            )
        finally:
            channel.close()
        self.service.stats.registrations += 1
        log.info("registered", resource=self.plugin.resource, way=Way.SOCKET.value)

    async def _while_registered(self, server: DrainableServer) -> None:
        """Return when the kubelet stopped listening for good, or our socket is gone."""
        self._obstacle = "the kubelet stopped listening; it may be restarting"
        async with anyio.create_task_group() as group:
            group.start_soon(self._until_silent, group.cancel_scope)
            group.start_soon(self._until_socket_gone, server, group.cancel_scope)

    async def _until_silent(self, done: anyio.CancelScope) -> None:
        streams = self.service.streams
        while True:
            await streams.wait_for(lambda open_now: open_now == 0)
            with anyio.move_on_after(SILENCE_SECONDS):
                await streams.wait_for(lambda open_now: open_now > 0)
                continue
            done.cancel()
            return

    async def _until_socket_gone(self, server: DrainableServer, done: anyio.CancelScope) -> None:
        while server.in_place():
            try:
                with anyio.move_on_after(LOOK_SECONDS):
                    async with watching(self.path.parent) as folder:
                        if not server.in_place():
                            break
                        async for change in folder.changes():
                            if change.name in ("", self._file):
                                break
            except (FolderGone, OSError):
                break
        done.cancel()


def _told(error: BaseException) -> str:
    if isinstance(error, GRPCError):
        return f"{error.message} ({error.status.name})"
    if isinstance(error, TimeoutError):
        return f"no answer within {REGISTER_SECONDS:g} s"
    return str(error) or type(error).__name__
