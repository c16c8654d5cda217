"""The plugin manager: sockets that appear in and vanish from `plugins_registry`.

Facts: kubelet 1.36, `pkg/kubelet/pluginmanager`: reconciled once a second, each registration in a task of its
own, failures retried with pauses that double.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import anyio
import anyio.to_thread
import structlog
from anyio.abc import TaskGroup

from agent._proto import pluginregistration as registration

from .device_tables import CallFailed
from .grpc_peer import UnixChannel
from .plugin import translated
from .timings import Timings

logger = structlog.get_logger()
DEVICE_PLUGIN: Final = "DevicePlugin"
DRA_PLUGIN: Final = "DRAPlugin"


class Handler(Protocol):
    """Plugins of one type, by name and socket."""

    def fault(self, name: str, versions: list[str]) -> str | None:
        """The fault of a registration, in the kubelet's words."""

    async def connect(self, name: str, socket: Path, versions: list[str]) -> None:
        """Take a plugin up. Raises CallFailed."""

    def disconnect(self, name: str, socket: Path) -> None:
        """Forget a plugin."""


@dataclass
class _Known:
    """A socket file: which one it is (inode and time of making) and what became of it."""

    identity: tuple[int, int]
    busy: bool = False
    plugin: tuple[str, str, Path] | None = None  # type, name and socket of calls, once registered
    not_before: float = 0.0
    pause: float = field(default=0.0)


class RegistryWatcher:
    """Keeps the registered plugins equal to the sockets that are there."""

    def __init__(
        self, folder: Path, handlers: Mapping[str, Handler], group: TaskGroup, timings: Timings
    ) -> None:
        """`handlers`: by type."""
        self._folder = folder
        self._handlers = handlers
        self._group = group
        self._timings = timings
        self._known: dict[Path, _Known] = {}
        self.first_pass_done = anyio.Event()

    async def run(self) -> None:
        """Reconcile for ever."""
        while True:
            await self.reconcile()
            await anyio.sleep(self._timings.registry_poll)

    async def reconcile(self) -> None:
        """One pass: plugins without their socket go first, then new sockets are registered."""
        found = dict(await anyio.to_thread.run_sync(lambda: list(_sockets(self._folder))))
        for path, known in tuple(self._known.items()):
            if found.get(path) != known.identity and not known.busy:
                del self._known[path]
                if known.plugin is not None:
                    kind, name, socket = known.plugin
                    logger.info("plugin_socket_gone", resource=name, socket=str(path))
                    self._handlers[kind].disconnect(name, socket)
        now = anyio.current_time()
        for path, identity in found.items():
            known = self._known.setdefault(path, _Known(identity))
            if known.plugin is None and not known.busy and now >= known.not_before:
                known.busy = True
                self._group.start_soon(self._register, path, known)
        if not any(known.busy for known in self._known.values()):
            self.first_pass_done.set()

    async def _register(self, path: Path, known: _Known) -> None:
        try:
            known.plugin = await self._introduce(path)
        except CallFailed as error:
            shortest, longest = self._timings.registry_retry, self._timings.registry_retry_longest
            known.pause = min(longest, known.pause * 2 or shortest)
            known.not_before = anyio.current_time() + known.pause
            logger.info(
                "plugin_registration_failed", socket=str(path), error=str(error), retry_in=known.pause
            )
        finally:
            known.busy = False
            if not any(each.busy for each in self._known.values()):
                self.first_pass_done.set()

    async def _introduce(self, path: Path) -> tuple[str, str, Path]:
        """GetInfo, check, connect, notify; type, name and socket of the plugin. Raises CallFailed."""
        channel = UnixChannel(path, authority=None)
        try:
            try:
                await channel.dial(self._timings.dial)
            except OSError as error:
                raise CallFailed(f"dial failed at socket {path}, err: {error}") from error
            stub = registration.RegistrationStub(channel)
            with translated():
                info = await stub.get_info(timeout=self._timings.get_info)
            fault = self._fault(info)
            socket = Path(info.endpoint) if info.endpoint else path
            if fault is None:
                try:
                    await self._handlers[info.type].connect(info.name, socket, info.supported_versions)
                except CallFailed as error:
                    fault = f"plugin registration failed with err: {error}"
            status = registration.RegistrationStatus(plugin_registered=fault is None, error=fault or "")
            try:
                with translated():
                    await stub.notify_registration_status(status, timeout=self._timings.notify)
            except CallFailed:
                if fault is None:
                    self._handlers[info.type].disconnect(info.name, socket)
                raise
            if fault:
                raise CallFailed(fault)
            return info.type, info.name, socket
        finally:
            channel.close()

    def _fault(self, info: registration.PluginInfo) -> str | None:
        if info.type not in self._handlers:
            return f"no handler registered for plugin type: {info.type}"
        fault = self._handlers[info.type].fault(info.name, info.supported_versions)
        return fault and f"plugin validation failed with err: {fault}"


def _sockets(folder: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    """Sockets in the folder and below, except hidden ones. Blocks."""
    for entry in os.scandir(folder):
        if entry.name.startswith("."):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                yield from _sockets(Path(entry.path))
            elif stat.S_ISSOCK(status.st_mode):
                yield Path(entry.path), (status.st_ino, status.st_mtime_ns)
        except FileNotFoundError:
            continue  # gone since the folder was read
