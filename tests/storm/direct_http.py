"""The API server without HTTP: requests of the agent and of the extenders go to its handlers as objects.

A request and its answer are the bytes that a socket would carry, and end as there: in a deadline, in a lost
connection, in a handler that is cancelled once its client has gone. What HTTP itself does is left to the
storms that have real sockets (`plan.Plan.sockets`).
"""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from agent.simulator.kubelet import http_api, http_serving

Handler = Callable[[Any], Awaitable[Any]]


class _Request:
    """As much of `web.Request` as handlers ask for."""

    def __init__(
        self, exchange: "Exchange", match: dict[str, str], headers: dict[str, str], body: bytes
    ) -> None:
        self.exchange = exchange
        self.method, self.path, self.query = exchange.method, exchange.url.path, exchange.query
        self.match_info, self.headers, self._body = match, headers, body
        self.content_type = headers["Content-Type"]
        self.transport = SimpleNamespace(abort=exchange.abort)

    async def json(self) -> Any:
        """The body."""
        return msgspec.json.decode(self._body)


class _Answer:
    """As much of `web.Response` as is looked at here."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.body = status, body


class _Stream:
    """As much of `web.StreamResponse` as handlers use."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        del headers
        self.status, self.body = 200, b""

    async def prepare(self, request: _Request) -> None:
        """Begin."""
        self._exchange = request.exchange
        request.exchange.begin(self.status)

    async def write(self, data: bytes) -> None:
        """Go on. Raises ConnectionResetError."""
        self._exchange.send(data)


def _json_response(data: object, *, status: int = 200) -> _Answer:
    return _Answer(status, msgspec.json.encode(data))


class _Web:
    """In place of `aiohttp.web` in the API server's room."""

    StreamResponse = _Stream
    json_response = staticmethod(_json_response)

    def __getattr__(self, name: str) -> Any:
        return getattr(web, name)


class Exchange:
    """A request and its answer, as the client sees it: as much of `aiohttp.ClientResponse` as it uses."""

    connection = None
    reason = ""

    def __init__(self, method: str, url: URL, query: dict[str, str], timeout: aiohttp.ClientTimeout) -> None:
        self.method, self.url, self.query = method, url, query
        self.headers: dict[str, str] = {}
        self.status = 0
        self.content = self
        self.task: asyncio.Task[None] | None = None
        self._read_seconds = timeout.sock_read
        now = asyncio.get_running_loop().time()
        self._deadline = None if timeout.total is None else now + timeout.total
        self._data = bytearray()
        self._ended = self._lost = False
        self._news = asyncio.Event()

    # The server's side

    def begin(self, status: int) -> None:
        """The status line has been sent."""
        self.status = status
        self._news.set()

    def send(self, data: bytes) -> None:
        """A part of the body. Raises ConnectionResetError."""
        if self._lost or self._ended:
            raise aiohttp.ClientConnectionResetError("the client has gone")
        self._data += data
        self._news.set()

    def end(self) -> None:
        """The answer is complete."""
        self._ended = True
        self._news.set()

    def abort(self) -> None:
        """The connection is lost."""
        self._lost = True
        self._news.set()

    # The client's side

    async def _heard(self, ready: Callable[[], bool]) -> None:
        while not ready():
            if self._lost:
                raise aiohttp.ServerDisconnectedError
            self._news.clear()
            now = asyncio.get_running_loop().time()
            ends = [] if self._deadline is None else [self._deadline]
            ends += [] if self._read_seconds is None else [now + self._read_seconds]
            async with asyncio.timeout_at(min(ends, default=None)):
                await self._news.wait()

    async def answered(self) -> None:
        """Until the status is known. Raises aiohttp.ClientError and TimeoutError."""
        await self._heard(lambda: bool(self.status))

    async def read(self) -> bytes:
        """The whole body. Raises aiohttp.ClientError and TimeoutError."""
        await self._heard(lambda: self._ended)
        return bytes(self._data)

    async def iter_any(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises aiohttp.ClientError and TimeoutError."""
        while True:
            await self._heard(lambda: bool(self._data or self._ended))
            if not self._data:
                return
            data = bytes(self._data)
            self._data.clear()
            yield data

    def close(self) -> None:
        """The client has gone: the handler is cancelled, as `handler_cancellation` has it."""
        self._lost = True
        if self.task is not None:
            self.task.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Server:
    """The API server, as long as it serves."""

    def __init__(self) -> None:
        self._routes: list[tuple[str, list[str], Handler]] = []
        self._middleware: Callable[[Any, Handler], Awaitable[Any]] | None = None
        self._context = contextvars.copy_context()
        self._open: dict[Exchange, None] = {}

    @asynccontextmanager
    async def serving(self, app: web.Application, path: Path | None = None) -> AsyncIterator[int]:
        """In place of `http_serving.serving`."""
        del path
        self._context = contextvars.copy_context()  # of no life
        self._middleware = app.middlewares[0]
        for route in app.router.routes():
            resource = route.resource
            assert resource is not None
            self._routes.append((route.method, resource.canonical.split("/"), route.handler))
        try:
            yield 0
        finally:
            self._routes.clear()
            for each in tuple(self._open):
                each.abort()
                each.close()

    async def request(
        self, method: str, url: URL, query: Any, headers: dict[str, str], body: Any, timeout: Any
    ) -> Exchange:
        """Ask. Raises aiohttp.ClientError and TimeoutError."""
        data = b"" if body is None else msgspec.json.encode(body)
        exchange = Exchange(method, url, dict(query or ()), timeout)
        if not self._routes:
            raise aiohttp.ClientConnectionError("nobody serves")
        match, handler = self._found(method, url.path)
        request = _Request(exchange, match, headers, data)
        self._open[exchange] = None
        exchange.task = asyncio.get_running_loop().create_task(
            self._answer(request, handler), context=self._context.copy()
        )
        try:
            await exchange.answered()
        except BaseException:
            exchange.close()
            raise
        return exchange

    def _found(self, method: str, path: str) -> tuple[dict[str, str], Handler]:
        parts = path.split("/")
        for verb, pattern, handler in self._routes:
            if verb == method and len(pattern) == len(parts):
                pairs = list(zip(pattern, parts, strict=True))
                if all(each[0] == "{" if each[:1] == "{" else each == part for each, part in pairs):
                    return {each[1:-1]: part for each, part in pairs if each[:1] == "{"}, handler
        raise AssertionError(f"the API server has no {method} {path}")

    async def _answer(self, request: _Request, handler: Handler) -> None:
        exchange = request.exchange
        try:
            assert self._middleware is not None
            try:
                answer = await self._middleware(request, handler)
            except web.HTTPException as error:
                answer = error
            if not exchange.status:
                exchange.send(answer.body or b"")
                exchange.begin(answer.status)
            exchange.end()
        except ConnectionResetError:
            pass  # the client has gone
        finally:
            self._open.pop(exchange, None)
            if not exchange._ended:
                exchange.abort()


class Way:
    """How clients of a storm reach the API server."""

    server: Server | None = None  # None: by a socket


def install(*, sockets: bool) -> None:
    """Put it in place, for this process; with `sockets` what is there without it."""
    Way.server = None if sockets else Server()
    room: Any = http_api
    room.serving = http_serving.serving if Way.server is None else Way.server.serving
    room.web = web if Way.server is None else _Web()
