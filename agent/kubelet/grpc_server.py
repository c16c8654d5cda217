"""A gRPC server on a unix socket that can be stopped without leaving its clients in the dark.

grpclib's `close()` cancels handlers without a word to the peer, and on Python >= 3.12.1 its
`wait_closed()` waits for clients to leave by themselves. So the drain here is our own: streaming
handlers return first (the peer reads a clean end of stream), then the listener closes, then the
transports are dropped. This file alone touches private names of grpclib, whose version is pinned.
"""

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
import anyio.lowlevel
import anyio.to_thread
import structlog
from grpclib.const import Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.protocol import H2Protocol
from grpclib.server import Server, Stream

from agent.kit.tasks import describe
from agent.kubelet.wire import Codec, DataInRuns, ends_stream

# Frames of one turn of the event loop leave in one write.
#
# grpclib writes headers, message and trailers one by one. Each write is a system call, and wakes the other
# end for a piece that says nothing yet; where processors are busy every one of them may cost the agent its
# turn. The frame that ends a stream takes what is kept with it at once: others that the answer has woken
# run in the turn after, and the kubelet need not wait for them.

# More than this leaves at once, so that a peer that reads slowly is noticed before its list is copied.
LARGEST = 64 * 1024


class CorkedTransport(asyncio.Transport):
    """A transport as grpclib uses it."""

    def __init__(self, plain: asyncio.Transport) -> None:
        super().__init__()
        self._plain = plain
        self._kept: list[bytes | bytearray | memoryview] = []
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._kept:
            asyncio.get_running_loop().call_soon(self._release)
        self._kept.append(data)
        self._size += len(data)
        if self._size > LARGEST or ends_stream(data):
            self._release()

    def _release(self) -> None:
        if kept := self._kept:
            self._kept, self._size = [], 0
            self._plain.write(b"".join(kept))

    def close(self) -> None:
        self._release()
        self._plain.close()

    def abort(self) -> None:
        self._kept, self._size = [], 0
        self._plain.abort()

    def is_closing(self) -> bool:
        return self._plain.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._size + self._plain.get_write_buffer_size()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._plain.get_extra_info(name, default)


class CorkedProtocol(H2Protocol):
    transport: CorkedTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = CorkedTransport(cast("asyncio.Transport", transport))
        super().connection_made(self.transport)
        peer = self.connection._connection  # noqa: SLF001
        peer.incoming_buffer = DataInRuns(server=not peer.config.client_side)


log = structlog.get_logger()

M = TypeVar("M")

# For a call that is under way at the stop. One that waits for a kubelet that is busy for longer is given up.
DRAIN_SECONDS = 2.0
CLOSE_SECONDS = 0.5
# Of the event loop, that asyncio takes from accepting a connection to its protocol.
ACCEPTING_TURNS = 3


class Handlers:
    """RPC paths and their handlers, in the form that grpclib asks for."""

    def __init__(self, mapping: Mapping[str, Handler]) -> None:
        self._mapping = dict(mapping)

    def __mapping__(self) -> dict[str, Handler]:
        return self._mapping


class _Connection(CorkedProtocol):
    """A connection that its server knows of for as long as it is open."""

    def __init__(self, plain: H2Protocol, server: "_TrackingServer") -> None:
        super().__init__(plain.handler, plain.config, plain.h2_config)
        self._known = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._known.connections.add(self)
        if self._known.closing:  # it was accepted just before the listener closed
            self.transport.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._known.connections.discard(self)
        super().connection_lost(exc)

    def busy(self) -> bool:
        """Whether handlers run, or their answers have not left yet."""
        running = any(not task.done() for task in self.handler._tasks.values())  # type: ignore[attr-defined]  # noqa: SLF001
        return running or self.transport.get_write_buffer_size() > 0


class _TrackingServer(Server):
    # At each connection, those that have ended are dropped with their calls: by itself grpclib keeps ten.
    __gc_interval__ = 1

    def __init__(self, handlers: Handlers) -> None:
        super().__init__([handlers], codec=Codec())
        self.connections: set[_Connection] = set()
        self.closing = False

    def _protocol_factory(self) -> H2Protocol:
        return _Connection(super()._protocol_factory(), self)

    async def accept_no_more(self) -> None:
        """Until `close`. One that was accepted a moment ago is made known, to be closed with the others.

        A listener that closes while asyncio makes its transport leaves it open, with nobody to close it.
        """
        listening = self._server.sockets if self._server else ()  # type: ignore[attr-defined]
        for each in listening:
            asyncio.get_running_loop().remove_reader(each.fileno())
        for _ in range(ACCEPTING_TURNS):
            await anyio.lowlevel.checkpoint()


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
        # Cancelled halfway, a listener would stay behind that nobody knows of. Nothing here waits for others.
        with anyio.CancelScope(shield=True):
            listener = await anyio.to_thread.run_sync(_bound, hidden)
            try:
                server = _TrackingServer(self._handlers)
                await server.start(sock=listener)
            except BaseException:
                listener.close()
                await anyio.to_thread.run_sync(_remove, hidden)
                raise
            self._server = server
            try:
                self._inode = await anyio.to_thread.run_sync(_reveal, hidden, self.path)
            except BaseException:
                await self.stop()
                await anyio.to_thread.run_sync(_remove, hidden)
                raise

    async def in_place(self) -> bool:
        """Whether the socket at the path is still this server's."""
        return self._inode is not None and await anyio.to_thread.run_sync(_inode, self.path) == self._inode

    async def unlink(self) -> None:
        """Take the socket away from its path, if it is still ours; open connections stay."""
        if await self.in_place():
            # Where it cannot be removed it does no harm: nobody answers, and the next start replaces it.
            with contextlib.suppress(OSError):
                await anyio.to_thread.run_sync(_remove, self.path)
        self._inode = None

    async def stop(self) -> None:
        """Close. Streaming handlers must have been asked to return before (`DevicePluginService.drain`).

        Takes `DRAIN_SECONDS` and twice `CLOSE_SECONDS` at most, cancelled or not.
        """
        with anyio.CancelScope(shield=True):
            await self.unlink()
            server, self._server = self._server, None
            if server is None:
                return
            with anyio.move_on_after(DRAIN_SECONDS):
                while any(connection.busy() for connection in server.connections):
                    await anyio.sleep(0.005)
            server.closing = True
            await server.accept_no_more()
            server.close()
            for connection in tuple(server.connections):
                connection.transport.close()
            with anyio.move_on_after(CLOSE_SECONDS):
                while server.connections:
                    await anyio.sleep(0.005)
            # A peer that reads nothing keeps a polite close waiting for ever.
            for connection in tuple(server.connections):
                connection.transport.abort()
            with anyio.move_on_after(CLOSE_SECONDS):
                await server.wait_closed()


async def received(stream: Stream[M, Any], seconds: float) -> M:
    """The one message of a request. Raises GRPCError."""
    message: M | None = None
    try:
        with anyio.move_on_after(seconds) as waited:
            message = await stream.recv_message()
    # Whatever decoders and grpclib's framing say of broken bytes; the one is as much the caller's fault
    # as the other, and a traceback in our log would not help to find it.
    except Exception as error:
        raise GRPCError(Status.INVALID_ARGUMENT, f"the request cannot be read: {describe(error)}") from error
    if waited.cancelled_caught:
        raise GRPCError(Status.DEADLINE_EXCEEDED, f"no request came within {seconds:g} s")
    if message is None:
        raise GRPCError(Status.INVALID_ARGUMENT, "the request is empty")
    return message


async def send(stream: Stream[Any, M], message: M, seconds: float) -> None:
    """Send one message, to a peer that reads it: others must not keep a handler. Raises GRPCError."""
    with anyio.move_on_after(seconds) as waited:
        await stream.send_message(message)
    if waited.cancelled_caught:
        log.warning("peer_reads_nothing", waited_seconds=seconds)
        raise GRPCError(Status.DEADLINE_EXCEEDED, f"the answer was not read within {seconds:g} s")


def _bound(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
    except BaseException:
        listener.close()
        _remove(path)
        raise
    return listener


def _reveal(hidden: Path, path: Path) -> int:
    inode = hidden.lstat().st_ino
    hidden.rename(path)
    return inode


def _inode(path: Path) -> int | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else None


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
