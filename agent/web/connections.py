"""Listening sockets of the HTTP server, and how many connections it holds.

Pods of the cluster reach the server, and any of them may open connections without end. None is refused for
that: where a caller comes from proves nothing (the kubelet's probe comes from the node's own address, as does
what the node forwards for others), so that a cap which refuses would shut the probe out together with the
flood. The connection that has waited longest for its caller goes instead. A probe sends its request with the
connection, and is answered long before as many others as there are places have come after it.

Requests under way are counted apart, and are fewer than the places: there is always a connection that waits.
"""

import asyncio
import ipaddress
import os
import socket
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import structlog

from agent.kit.tasks import FatalError

# Listening sockets of the HTTP server.

BACKLOG = 1024


class CannotListen(FatalError):
    """The address or port of the HTTP server cannot be had; the message names the remedy."""


async def listen(name: str, port: int) -> list[socket.socket]:
    """A listening socket for every address that the name stands for. Raises CannotListen."""
    bound: list[socket.socket] = []
    try:
        for family, address in await _addresses(name, port):
            taken = bound[0].getsockname()[1] if bound else port
            bound.append(_listening(family, (address[0], taken, *address[2:])))
        return bound
    except socket.gaierror as error:
        remedy = f"{name!r} is no address: {error.strerror}; correct http.address"
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else str(error)
        remedy = f"{cause}; stop what holds it, or change http.address or http.port"
    for one in bound:
        one.close()
    raise CannotListen(f"HTTP cannot listen on {name} port {port}: {remedy}")


async def _addresses(name: str, port: int) -> Iterable[tuple[int, tuple[Any, ...]]]:
    """Family and socket address of each address that the name stands for. Raises socket.gaierror."""
    try:
        # A plain address, the usual case, needs no resolver: its thread, and the codec of international
        # names that Python loads for any name, stay in memory (0.6 MiB).
        address = ipaddress.ip_address(name)
    except ValueError:
        pass
    else:
        if address.version == 4:
            return [(socket.AF_INET, (name, port))]
        if not address.scope_id:
            return [(socket.AF_INET6, (name, port, 0, 0))]
    found = await asyncio.get_running_loop().getaddrinfo(
        name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return dict.fromkeys((family, address) for family, _, _, _, address in found)


def _listening(family: int, address: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made


# How many connections an HTTP server holds, and which one goes where there is no room: pure.

log = structlog.get_logger()

HEAD_SECONDS = 5.0  # for the whole head of a request, and for the TLS handshake before it
QUIET_SECONDS = 10.0  # without a connection that had to go: the flood is over


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Connections, and requests under way at one time: in all, and of one address."""

    connections: int = 256
    connections_per_address: int = 32
    requests: int = 64
    requests_per_address: int = 24

    def __post_init__(self) -> None:
        if self.requests >= self.connections or self.requests_per_address >= self.connections_per_address:
            raise ValueError("fewer requests than connections: one that waits must be there to make room")


@dataclass(eq=False, slots=True)
class Connection:
    """One of them. `drop` ends it at once, in whatever state it is."""

    address: str
    drop: Callable[[], None]
    busy: bool = False  # a request that counts is under way
    gone: bool = False


@dataclass
class Connections:
    """The connections of one server. `clock` is in seconds."""

    limits: ConnectionLimits
    clock: Callable[[], float]
    dropped: int = 0  # for want of room, since the start
    _of: Counter[str] = field(default_factory=Counter)
    _requests_of: Counter[str] = field(default_factory=Counter)
    # Those without a request that counts, the longest first: by address, and all of them.
    _waiting_of: dict[str, OrderedDict[Connection, None]] = field(default_factory=dict)
    _waiting: OrderedDict[Connection, None] = field(default_factory=OrderedDict)
    _flood: tuple[float, int] | None = None  # when the last one had to go, and how many had before the first

    def __len__(self) -> int:
        return self._of.total()

    def opened(self, connection: Connection) -> None:
        """Take a connection in; the one of its address, or of all, that has waited longest may have to go."""
        limits, address = self.limits, connection.address
        self._of[address] += 1
        self._wait(connection)
        if self._of[address] > limits.connections_per_address:
            self._drop(next(iter(self._waiting_of[address])))
        elif len(self) > limits.connections:
            self.make_room()
        elif self._flood and self.clock() - self._flood[0] > QUIET_SECONDS:
            log.info("http_connections_fit_again", dropped=self.dropped - self._flood[1])
            self._flood = None

    def make_room(self) -> bool:
        """Drop the connection that has waited longest; whether there was one."""
        longest = next(iter(self._waiting), None)
        if longest:
            self._drop(longest)
        return longest is not None

    def closed(self, connection: Connection) -> None:
        """A connection has ended; one that was dropped is known to have."""
        if connection.gone:
            return
        connection.gone = True
        if connection.busy:
            _less(self._requests_of, connection.address)
        else:
            self._wait_no_more(connection)
        _less(self._of, connection.address)

    def begins(self, connection: Connection) -> bool:
        """A request that counts begins; whether there is a place for it."""
        limits, address = self.limits, connection.address
        free = (
            self._requests_of.total() < limits.requests
            and self._requests_of[address] < limits.requests_per_address
        )
        if free and not connection.gone:
            connection.busy = True
            self._requests_of[address] += 1
            self._wait_no_more(connection)
        return free

    def answered(self, connection: Connection) -> None:
        """A request, counted or not, is over: the connection begins to wait again."""
        if connection.gone:
            return
        if connection.busy:
            connection.busy = False
            _less(self._requests_of, connection.address)
        else:
            self._wait_no_more(connection)
        self._wait(connection)

    def _wait(self, connection: Connection) -> None:
        self._waiting[connection] = None
        self._waiting_of.setdefault(connection.address, OrderedDict())[connection] = None

    def _wait_no_more(self, connection: Connection) -> None:
        del self._waiting[connection]
        of_address = self._waiting_of[connection.address]
        del of_address[connection]
        if not of_address:
            del self._waiting_of[connection.address]

    def _drop(self, connection: Connection) -> None:
        if self._flood is None:
            log.warning(
                "http_connections_dropped",
                address=connection.address,
                connections=len(self),
                of_address=self._of[connection.address],
                remedy="see who opens so many; a NetworkPolicy keeps others out",
            )
        self._flood = (self.clock(), self._flood[1] if self._flood else self.dropped)
        self.dropped += 1
        self.closed(connection)
        connection.drop()


def _less(counts: Counter[str], address: str) -> None:
    counts[address] -= 1
    if not counts[address]:
        del counts[address]
