"""The part of an HTTP server that knows aiohttp.

aiohttp bounds lines, headers and pipelined requests by itself, and ends idle connections. It sets no deadline
for the head of a request.
"""

import asyncio
from typing import Any

import structlog

from agent.kit import lean_aiohttp  # noqa: F401  before the first of aiohttp
from agent.web.connections import HEAD_SECONDS, Connection, Connections

# isort: split
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest
from aiohttp.web_response import Response
from aiohttp.web_server import Server

# Longer than the usual scrape interval, so that a scraper keeps its connection.
KEEP_ALIVE_SECONDS = 75.0
LINGER_SECONDS = 2.0  # the rest of a request that is answered already is read for so long

log = structlog.get_logger()

__all__ = ["BaseRequest", "Protocol", "Response", "Server"]


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
