"""The agent's one HTTP server: whoever owns a route adds it, nobody else knows of aiohttp.

It uses aiohttp's low-level server with a table of exact paths: a router, an application and static files
would cost 1.3 MiB of resident memory for a handful of GET routes. The address is bound at once, so that a
fault shows at the start, but aiohttp comes in with the first connection: importing it is a quarter of the
time that the agent needs until its resources are served.
"""

import asyncio
import importlib
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import structlog
from anyio.abc import TaskStatus

from agent.kit.supervise import FatalError

if TYPE_CHECKING:
    from aiohttp.web_request import BaseRequest
    from aiohttp.web_response import Response

log = structlog.get_logger()

HANDLER_SECONDS = 5.0
# aiohttp waits up to twice this for requests under way, so stopping stays under a second.
STOP_SECONDS = 0.4
# Longer than the usual scrape interval, so that a scraper keeps its connection.
KEEP_ALIVE_SECONDS = 75.0


@dataclass(frozen=True, slots=True)
class Request:
    """A request; names of headers are found in any case. `body` is empty but for POST."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a route answers."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "text/plain; charset=utf-8"})

    @classmethod
    def text(cls, text: str, status: int = 200) -> "Reply":
        """Plain text, ended by a line feed."""
        return cls(f"{text}\n".encode(), status)


Handler = Callable[[Request], Awaitable[Reply]]


class CannotListen(FatalError):
    """The address or port of the HTTP server cannot be had; the message names the remedy."""


class HttpServer:
    """Serves one address. Port 0 takes any free port; `port` tells which, once bound."""

    def __init__(self, address: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: serve HTTPS with it."""
        self.address = address
        self.port = port
        self._tls = tls
        self._routes: dict[str, Handler] = {}
        self._posts: dict[str, int] = {}  # paths that take POST alone, and how many bytes at most

    def add_route(self, path: str, handler: Handler) -> None:
        """Answer GET and HEAD of `path` with `handler`, which runs under a deadline of `HANDLER_SECONDS`."""
        if path in self._routes:
            raise ValueError(f"HTTP route {path} is already taken")
        self._routes[path] = handler

    def add_post(self, path: str, handler: Handler, most_bytes: int) -> None:
        """The same for POST; a longer body is answered with 400 and never kept."""
        self.add_route(path, handler)
        self._posts[path] = most_bytes

    async def serve(self, *, task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; starts with the port that was bound. Raises CannotListen."""
        listening = await self._bind()
        try:
            self.port = listening[0].getsockname()[1]
            log.info("http_listening", address=self.address, port=self.port)
            task_status.started(self.port)
            await _first_connection(listening)
            await anyio.to_thread.run_sync(_load)
            await self._serve_on(listening)
        finally:
            for one in listening:
                one.close()

    async def _serve_on(self, listening: Sequence[socket.socket]) -> None:
        from aiohttp.web_server import Server  # noqa: PLC0415  loaded by now

        http = Server(
            self._answer, handler_cancellation=True, access_log=None, keepalive_timeout=KEEP_ALIVE_SECONDS
        )
        loop = asyncio.get_running_loop()
        listeners = [await loop.create_server(http, sock=one, ssl=self._tls) for one in listening]
        try:
            await anyio.sleep_forever()
        finally:
            for listener in listeners:
                listener.close()
            with anyio.CancelScope(shield=True):
                http.pre_shutdown()  # idle connections: nobody need wait for them
                await http.shutdown(STOP_SECONDS)

    async def _bind(self) -> list[socket.socket]:
        """A listening socket for every address that the name stands for."""
        bound: list[socket.socket] = []
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                self.address, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            for family, _, _, _, address in dict.fromkeys(found):
                port = bound[0].getsockname()[1] if bound else self.port
                bound.append(_listening(family, (address[0], port, *address[2:])))
            return bound
        except socket.gaierror as error:
            remedy = f"{self.address!r} is no address: {error.strerror}; correct http.address"
        except OSError as error:
            cause = os.strerror(error.errno) if error.errno else str(error)
            remedy = f"{cause}; stop what holds it, or change http.address or http.port"
        for one in bound:
            one.close()
        raise CannotListen(f"HTTP cannot listen on {self.address} port {self.port}: {remedy}")

    async def _answer(self, request: "BaseRequest") -> "Response":
        from aiohttp.web_response import Response  # noqa: PLC0415  loaded by now

        reply = await self._reply(request)
        return Response(status=reply.status, headers=dict(reply.headers), body=reply.body)

    async def _reply(self, request: "BaseRequest") -> Reply:
        handler = self._routes.get(request.path)
        if handler is None:
            return Reply.text(f"no such path; there are {' '.join(sorted(self._routes))}", 404)
        most = self._posts.get(request.path)
        allowed = ("GET", "HEAD") if most is None else ("POST",)
        if request.method not in allowed:
            plain = {"Content-Type": "text/plain; charset=utf-8", "Allow": ", ".join(allowed)}
            served = f"only {' and '.join(allowed)} are served" if most is None else "only POST is served"
            return Reply(f"{served}\n".encode(), 405, plain)
        try:
            with anyio.fail_after(HANDLER_SECONDS):
                body = b""
                if most is not None:
                    read = await _bounded(request, most)
                    if read is None:
                        return Reply.text(f"the request is larger than {most} bytes; nothing was done", 400)
                    body = read
                return await handler(Request(request.path, request.query, request.headers, body))
        except TimeoutError:
            log.error("http_handler_late", path=request.path, deadline_seconds=HANDLER_SECONDS)
            return Reply.text(f"no answer within {HANDLER_SECONDS:g} s", 503)
        except Exception:
            log.exception("http_handler_failed", path=request.path)
            return Reply.text("the agent failed to answer; its log tells why", 500)


async def _bounded(request: "BaseRequest", most: int) -> bytes | None:
    """The body; None if it is longer than `most` bytes, which is found before it is read where it can be."""
    if (request.content_length or 0) > most:
        return None
    found = bytearray()
    async for chunk in request.content.iter_any():
        found += chunk
        if len(found) > most:
            return None
    return bytes(found)


def _listening(family: int, address: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(128)
    except OSError:
        made.close()
        raise
    return made


async def _first_connection(listening: Sequence[socket.socket]) -> None:
    """Return when somebody has connected to one of the sockets; nothing is accepted yet."""

    async def watch(one: socket.socket) -> None:
        await anyio.wait_readable(one)
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for one in listening:
            group.start_soon(watch, one)


def _load() -> None:
    importlib.import_module("agent.kit.lean_aiohttp")
    importlib.import_module("aiohttp.web_server")
