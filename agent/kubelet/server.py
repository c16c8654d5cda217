"""A gRPC server on a unix socket that can be stopped without leaving its clients in the dark.

grpclib's `close()` cancels handlers but tells the peer nothing, and on Python >= 3.12.1 its
`wait_closed()` waits for clients to leave by themselves. So the drain here is our own: streaming
handlers return first (the peer reads a clean end of stream), then the listener closes, then the
transports are dropped. This file alone touches private names of grpclib, whose version is pinned.
"""

import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

import anyio
from grpclib.const import Handler
from grpclib.protocol import H2Protocol
from grpclib.server import Server

from agent.kubelet.wire import Codec

DRAIN_SECONDS = 1.0


class Handlers:
    """RPC paths and their handlers, in the form that grpclib asks for."""

    def __init__(self, mapping: Mapping[str, Handler]) -> None:
        self._mapping = dict(mapping)

    def __mapping__(self) -> dict[str, Handler]:
        return self._mapping


class _TrackingServer(Server):
    """Remembers the connections that it accepted."""

    def __init__(self, handlers: Handlers) -> None:
        super().__init__([handlers], codec=Codec())
        self.connections: list[H2Protocol] = []

    def _protocol_factory(self) -> H2Protocol:
        protocol = super()._protocol_factory()
        self.connections = [known for known in self.connections if _open(known)]
        self.connections.append(protocol)
        return protocol


class DrainableServer:
    """Serves `handlers` on a unix socket at `path`."""

    def __init__(self, handlers: Handlers, path: Path) -> None:
        self.path = path
        self._handlers = handlers
        self._server: _TrackingServer | None = None
        self._inode: int | None = None

    async def start(self) -> None:
        """Listen. The socket appears at its path only once it accepts, so that a watcher can dial at once.

        A socket that a dead agent left there is replaced in the same step. Raises OSError.
        """
        # Folder watchers ignore names that begin with a dot, the kubelet's among them.
        hidden = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        hidden.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(str(hidden))
            hidden.chmod(0o600)
            self._server = _TrackingServer(self._handlers)
            await self._server.start(sock=listener)
            self._inode = hidden.stat().st_ino
            hidden.rename(self.path)
        except BaseException:
            listener.close()
            hidden.unlink(missing_ok=True)
            raise

    def in_place(self) -> bool:
        """Whether the socket at the path is still this server's."""
        try:
            found = self.path.lstat()
        except OSError:
            return False
        return stat.S_ISSOCK(found.st_mode) and found.st_ino == self._inode

    def unlink(self) -> None:
        """Take the socket away from its path, if it is still ours; open connections stay."""
        if self.in_place():
            self.path.unlink(missing_ok=True)

    async def stop(self) -> None:
        """Close. Streaming handlers must have been told to return before (`DevicePluginService.drain`)."""
        self.unlink()
        server, self._server = self._server, None
        if server is None:
            return
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(DRAIN_SECONDS):
                while any(_busy(connection) for connection in server.connections):
                    await anyio.sleep(0.005)
            server.close()
            for connection in server.connections:
                if _open(connection):
                    connection.connection._transport.close()  # noqa: SLF001  no public way; see the text above
            with anyio.move_on_after(DRAIN_SECONDS):
                await server.wait_closed()


def _open(protocol: H2Protocol) -> bool:
    connection = getattr(protocol, "connection", None)  # absent until the peer is connected
    return connection is not None and not connection.is_closing()  # a closed one has no `_transport`


def _busy(protocol: H2Protocol) -> bool:
    """Whether handlers run on a connection, or their answers have not left yet."""
    if not _open(protocol):
        return False
    handler = protocol.handler
    running = any(not task.done() for task in handler._tasks.values())  # type: ignore[attr-defined]  # noqa: SLF001
    return running or protocol.connection._transport.get_write_buffer_size() > 0  # noqa: SLF001
