"""The life of one resource's socket: bind, be found by the kubelet, stay registered, leave cleanly.

The kubelet finds the socket in plugins_registry by itself, at its own restart too: each since 1.25 gives its
plugin manager a handler for device plugins without a condition (`initializeRuntimeDependentModules`).
kubelet.sock, the older way in, is only looked at, to distinguish a kubelet that is down from one that
dropped us.
"""

from collections.abc import Callable
from pathlib import Path

import anyio
import structlog

from agent.kit.files import FolderGone, watching
from agent.kit.tasks import Backoff
from agent.kubelet.grpc_server import DrainableServer
from agent.kubelet.podresources import KubeletSocket
from agent.kubelet.service import NOTHING_READ, DevicePluginService
from agent.kubelet.wire import ResourcePlugin
from agent.model.holding import Record

log = structlog.get_logger()

# A kubelet that restarts asks again by itself; one that dropped our stream and lives on never does.
SILENCE_SECONDS = 5.0
LOOK_SECONDS = 30.0  # inotify may miss a change (overflow, a folder made again): look anyway
BLIND_LOOK_SECONDS = 1.0  # without inotify: many nodes run out of its instances
FOLDER_RETRY_SECONDS = 0.5
ASKED_SECONDS = 10.0  # the kubelet looks once a second; one that restarts may take longer


class Endpoint:
    """Keeps one resource registered for as long as `run` runs."""

    def __init__(
        self,
        plugin: ResourcePlugin,
        kubelet_root: Path,
        device_plugins: Path,
        allocated: Callable[[], None] = lambda: None,
        read: Callable[[], Record] = lambda: NOTHING_READ,
    ) -> None:
        """`allocated`, `read`: as `DevicePluginService` has them."""
        self.plugin = plugin
        self.service = DevicePluginService(plugin, allocated, read)
        self._kubelet = KubeletSocket(device_plugins / "kubelet.sock")
        self._obstacle: str | None = "it has not been tried yet"
        self._again = anyio.Event()  # set: it is to be registered again
        self._logged: set[str] = set()  # the obstacles since the kubelet listened last
        vendor, _, name = plugin.resource.partition("/")
        self.path = kubelet_root / "plugins_registry" / f"gna-{vendor.split('.')[0]}-{name}.sock"

    @property
    def registered(self) -> bool:
        """Whether the kubelet listens to this resource's list right now."""
        return self.service.streams.value > 0

    @property
    def blocker(self) -> str | None:
        """Why this resource is not registered, in words; None when it is."""
        if self.registered:
            return None
        refusal = self.service.last_status_error
        why = f"the kubelet refused it: {refusal}" if refusal else self._obstacle
        return f"{self.plugin.resource} is not registered with the kubelet: {why}"

    def register_again(self) -> None:
        """Take the socket away and put it back, so that the kubelet registers the resource again."""
        self._again.set()

    async def run(self) -> None:
        """Serve and stay registered until cancelled; then end streams and remove the socket."""
        backoff = Backoff(first=0.01, longest=30.0, factor=3.0)
        while True:
            self.service.resume()
            server = DrainableServer(self.service.handlers(), self.path)
            try:
                await self._folder_exists()
                await server.start()
                if await self._registered_once(server):
                    backoff.reset()
                    await self._while_registered(server)
            except OSError as error:
                self._hinder(f"{self.path}: {error.strerror or error}")
            finally:
                self.service.drain()
                await server.stop()
            await anyio.sleep(backoff.next())

    def _hinder(self, obstacle: str, *, usual: bool = False) -> None:
        """Remember what stands in the way; `usual`: it does at every start, for a moment."""
        self._obstacle = obstacle
        # Each is logged once until the kubelet listens: two that take turns would fill the log.
        if obstacle not in self._logged:
            self._logged.add(obstacle)
            write = log.info if usual else log.warning
            write("registration_waits", resource=self.plugin.resource, obstacle=obstacle)

    async def _folder_exists(self) -> None:
        """Wait for the kubelet's folder: before its first start there is none, and we make none for it."""
        folder = anyio.Path(self.path.parent)
        while not await folder.is_dir():
            self._hinder(f"{folder} does not exist; is the kubelet running with this root folder?")
            await anyio.sleep(FOLDER_RETRY_SECONDS)

    async def _registered_once(self, server: DrainableServer) -> bool:
        """Wait until the kubelet listens. False: start over."""
        streams, service = self.service.streams, self.service
        infos = service.infos_given.value
        self._hinder(f"the kubelet has not asked {self.path} yet", usual=True)
        while True:
            with anyio.move_on_after(ASKED_SECONDS):
                await streams.wait_for(lambda open_now: open_now > 0)
                return True
            if service.infos_given.value != infos or service.last_status_error:
                with anyio.move_on_after(SILENCE_SECONDS):  # it may have asked just now
                    await streams.wait_for(lambda open_now: open_now > 0)
                    return True
                self._hinder(service.last_status_error or "the kubelet asked but does not listen")
                return False
            if not await server.in_place():
                self._hinder(f"{self.path} was removed")
                return False
            state = "serves, but has" if await self._kubelet.serves() else "does not serve, and has"
            self._hinder(f"the kubelet {state} not asked {self.path} within {ASKED_SECONDS:g} s")

    async def _while_registered(self, server: DrainableServer) -> None:
        """Return when the kubelet stopped listening for good, or our socket is gone."""
        self._obstacle = "the kubelet stopped listening; it may be restarting"
        self._again = anyio.Event()
        self._logged.clear()
        async with anyio.create_task_group() as group:
            group.start_soon(self._until_silent, group.cancel_scope)
            group.start_soon(self._until_socket_gone, server, group.cancel_scope)
            await self._again.wait()
            log.warning("registered_again", resource=self.plugin.resource)
            group.cancel_scope.cancel()

    async def _until_silent(self, done: anyio.CancelScope) -> None:
        """One kubelet lived all the time and did not listen: it has dropped us and will not ask again.

        One that is down asks when it is back, and finds the socket where it was.
        """
        streams = self.service.streams
        while True:
            await streams.wait_for(lambda open_now: open_now == 0)
            before = await self._kubelet.serves()
            with anyio.move_on_after(SILENCE_SECONDS):
                await streams.wait_for(lambda open_now: open_now > 0)
                continue
            lived = before is not None and await self._kubelet.serves() == before
            if lived or await self._kubelet.identity() is None:  # without kubelet.sock nobody knows
                log.warning("kubelet_silent", resource=self.plugin.resource, silent_seconds=SILENCE_SECONDS)
                done.cancel()
                return

    async def _until_socket_gone(self, server: DrainableServer, done: anyio.CancelScope) -> None:
        while await server.in_place():
            await self._folder_changed(server)
        log.warning("socket_gone", resource=self.plugin.resource, socket=str(self.path))
        done.cancel()

    async def _folder_changed(self, server: DrainableServer) -> None:
        """Return soon after our entry of the socket's folder changed, and after a while anyway.

        Looks again once the watch stands: nothing that happened before it is missed.
        """
        try:
            with anyio.move_on_after(LOOK_SECONDS):
                async with watching(self.path.parent) as folder:
                    if not await server.in_place():
                        return
                    async for change in folder.changes():
                        if change.name in ("", self.path.name):
                            return
        except (FolderGone, OSError):
            await anyio.sleep(BLIND_LOOK_SECONDS)
