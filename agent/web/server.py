"""The agent's one HTTP server: the room of a route adds it, no other room knows of aiohttp.

It uses aiohttp's low-level server with a table of exact paths: routes are added while it serves, which an
application's router refuses.

Connections are accepted here, not by asyncio: each is counted before its TLS handshake, in which a caller
could stay for a minute otherwise.
"""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import structlog
from anyio.abc import TaskGroup, TaskStatus

from agent.kit import lean_aiohttp  # noqa: F401  before the first of aiohttp
from agent.web.connections import HEAD_SECONDS, Connection, ConnectionLimits, Connections, listen

# isort: split
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest
from aiohttp.web_response import Response
from aiohttp.web_server import Server

# The part of an HTTP server that knows aiohttp.
#
# aiohttp bounds lines, headers and pipelined requests by itself, and ends idle connections. It sets no
# deadline for the head of a request.

# Longer than the usual scrape interval, so that a scraper keeps its connection.
KEEP_ALIVE_SECONDS = 75.0
LINGER_SECONDS = 2.0  # the rest of a request that is answered already is read for so long

log = structlog.get_logger()


class Protocol(RequestHandler):
    """One connection: counted until it is lost, and dropped when the head of a request is late."""

    __slots__ = ("_connections", "_head", "connection")

    def __init__(self, server: Server, connections: Connections, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {"access_log": None, "lingering_time": LINGER_SECONDS}
        super().__init__(server, loop=loop, keepalive_timeout=KEEP_ALIVE_SECONDS, **options)
        self._connections = connections
        self.connection = connection
        self._head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.WriteTransport)
        self.connection.drop = transport.abort
        if self.connection.gone:  # during the TLS handshake
            transport.abort()
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of a head, unless a request is under way."""
        if self._current_request is None:
            self._expect_head()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._forget_head()
        self._connections.closed(self.connection)
        super().connection_lost(exc)

    def log_exception(self, *_: object, exc_info: BaseException | None = None) -> None:
        """Log bytes that are no HTTP for debugging only: anybody could fill the log with tracebacks."""
        caller = isinstance(exc_info, HttpProcessingError | ConnectionError)
        write = log.debug if caller else log.error
        write("http_connection_failed", address=self.connection.address, exc_info=exc_info)

    def begins(self) -> None:
        self._forget_head()

    def _expect_head(self) -> None:
        if self._head is None:
            self._head = self._loop.call_later(HEAD_SECONDS, self.connection.drop)

    def _forget_head(self) -> None:
        if self._head:
            self._head.cancel()
            self._head = None


HANDLER_SECONDS = 5.0
ANSWER_SECONDS = 10.0  # for the caller to take its answer
# aiohttp waits up to twice this for requests under way, so stopping stays under a second.
STOP_SECONDS = 0.4
SHORT_SECONDS = 0.05  # while descriptors or memory for another connection are short
BODIES = 2  # bodies of the greatest size that are held at one time


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request; names of headers are found in any case. `body` is empty but for POST."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    address: str = ""  # of the caller


@dataclass(frozen=True, slots=True)
class Reply:
    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "text/plain; charset=utf-8"})

    @classmethod
    def text(cls, text: str, status: int = 200) -> "Reply":
        """Plain text, ended by a line feed."""
        return cls(f"{text}\n".encode(), status)


Handler = Callable[[HttpRequest], Awaitable[Reply]]
# Why a caller with this certificate (as ssl.SSLSocket.getpeercert gives it) is not served; None: it is.
Refusal = Callable[[Mapping[str, Any], str], str | None]


class HttpServer:
    """Serves one address. Port 0 takes any free port; `port` says which, once bound."""

    def __init__(
        self,
        address: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        limits: ConnectionLimits | None = None,
        refusal: Refusal | None = None,
    ) -> None:
        """`tls`: serve HTTPS with it. `refusal` judges the callers' certificates for a path."""
        self.address = address
        self.port = port
        self.connections = Connections(limits or ConnectionLimits(), anyio.current_time)
        self._tls = tls
        self._refusal = refusal
        self._routes: dict[str, Handler] = {}
        self._announced: set[str] = set()
        self._posts: dict[str, int] = {}  # paths that take POST alone, and how many bytes at most
        self._probes: set[str] = set()
        self._body_bytes = 0  # of all requests under way

    def add_route(self, path: str, handler: Handler) -> None:
        """Answer GET and HEAD of `path` with `handler`, which runs under a deadline of `HANDLER_SECONDS`."""
        if path in self._routes:
            raise ValueError(f"HTTP route {path} is already taken")
        self._routes[path] = handler

    def announce(self, path: str) -> None:
        """Answer a path that is served later with 503 until then: it is neither missing nor wrong."""
        self._announced.add(path)

    def add_probe(self, path: str, handler: Handler) -> None:
        """Add a path whose requests are not counted as under way; its handler must be cheap."""
        self.add_route(path, handler)
        self._probes.add(path)

    def add_post(self, path: str, handler: Handler, most_bytes: int) -> None:
        """The same for POST; a longer body is answered with 400 and never kept."""
        self.add_route(path, handler)
        self._posts[path] = most_bytes

    async def serve(self, *, task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; starts with the port that was bound. Raises CannotListen."""
        listening = await listen(self.address, self.port)
        try:
            self.port = listening[0].getsockname()[1]
            log.info("http_listening", address=self.address, port=self.port)
            task_status.started(self.port)
            await self._serve_on(listening)
        finally:
            for one in listening:
                one.close()

    async def _serve_on(self, listening: Sequence[socket.socket]) -> None:
        http = Server(self._answer, handler_cancellation=True)
        try:
            async with anyio.create_task_group() as group:
                for one in listening:
                    group.start_soon(self._accept, one, http, group)
        finally:
            with anyio.CancelScope(shield=True):
                http.pre_shutdown()  # idle connections: nobody need wait for them
                await http.shutdown(STOP_SECONDS)

    async def _accept(self, listening: socket.socket, http: Server, group: TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await anyio.lowlevel.checkpoint()  # a flood must not keep others from running
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError as error:
                # Or it is an error of the new connection; see accept(2).
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self.connections.make_room()
                await anyio.sleep(SHORT_SECONDS)
                continue
            handshake = anyio.CancelScope()
            connection = Connection(address[0], handshake.cancel)
            self.connections.opened(connection)
            group.start_soon(self._connect, accepted, connection, http, handshake)

    async def _connect(
        self, accepted: socket.socket, connection: Connection, http: Server, handshake: anyio.CancelScope
    ) -> None:
        """Hand an accepted connection over to its protocol, past the TLS handshake if there is one."""
        made = False

        def protocol() -> Protocol:
            nonlocal made
            made = True  # and the socket is asyncio's from here on
            return Protocol(http, self.connections, connection)

        connected = False
        try:
            with handshake:
                await asyncio.get_running_loop().connect_accepted_socket(
                    protocol,
                    accepted,
                    ssl=self._tls,
                    ssl_handshake_timeout=HEAD_SECONDS if self._tls else None,
                    ssl_shutdown_timeout=STOP_SECONDS if self._tls else None,
                )
                connected = True
        except OSError as error:
            log.debug("http_handshake_failed", address=connection.address, problem=str(error))
        finally:
            if not made:
                accepted.close()
            if not connected:
                self.connections.closed(connection)

    async def _answer(self, request: BaseRequest) -> Response:
        protocol = request.protocol
        assert isinstance(protocol, Protocol)
        protocol.begins()
        try:
            if request.path in self._probes or self.connections.begins(protocol.connection):
                reply = await self._reply(request)
            else:
                reply = Reply.text("too many requests at once; try again", 503)
            response = Response(status=reply.status, headers=dict(reply.headers), body=reply.body)
            with contextlib.suppress(ConnectionError):  # the caller has left; aiohttp sees it, too
                with anyio.move_on_after(ANSWER_SECONDS) as sending:
                    await response.prepare(request)
                    await response.write_eof()
                if sending.cancelled_caught:
                    protocol.connection.drop()
            return response
        finally:
            self.connections.answered(protocol.connection)

    def _refused(self, request: BaseRequest) -> Reply | None:
        if self._refusal is None:
            return None
        transport = request.transport
        certificate = transport.get_extra_info("peercert") if transport else None
        why = self._refusal(certificate or {}, request.path)
        return Reply.text(why, 403) if why else None

    async def _reply(self, request: BaseRequest) -> Reply:
        if refused := self._refused(request):
            return refused
        handler = self._routes.get(request.path)
        if handler is None and request.path in self._announced:
            return Reply.text("the agent is starting; ask again", 503)
        if handler is None:
            return Reply.text(f"no such path; there are {' '.join(sorted(self._routes))}", 404)
        most = self._posts.get(request.path)
        allowed = ("GET", "HEAD") if most is None else ("POST",)
        if request.method not in allowed:
            plain = {"Content-Type": "text/plain; charset=utf-8", "Allow": ", ".join(allowed)}
            served = f"only {' and '.join(allowed)} are served" if most is None else "only POST is served"
            return Reply(f"{served}\n".encode(), 405, plain)
        body = bytearray()
        try:
            with anyio.fail_after(HANDLER_SECONDS):
                if most is not None and (refused := await self._read(request, body, most)):
                    return refused
                return await handler(
                    HttpRequest(
                        request.path, request.query, request.headers, bytes(body), request.remote or ""
                    )
                )
        except TimeoutError:
            log.error("http_handler_late", path=request.path, deadline_seconds=HANDLER_SECONDS)
            return Reply.text(f"no answer within {HANDLER_SECONDS:g} s", 503)
        except Exception:
            log.exception("http_handler_failed", path=request.path)
            return Reply.text("the agent failed to answer; its log says why", 500)
        finally:
            self._body_bytes -= len(body)

    async def _read(self, request: BaseRequest, body: bytearray, most: int) -> Reply | None:
        """Read a body into `body`; why it is not taken, which is found before it is read where it can be."""
        too_large = Reply.text(f"the request is larger than {most} bytes; nothing was done", 400)
        if (request.content_length or 0) > most:
            return too_large
        async for chunk in request.content.iter_any():
            body += chunk
            self._body_bytes += len(chunk)
            if len(body) > most:
                return too_large
            if self._body_bytes > BODIES * most:
                return Reply.text("too many large requests at once; try again", 503)
        return None
