"""Listening sockets of the HTTP server."""

import asyncio
import ipaddress
import os
import socket
from collections.abc import Iterable
from typing import Any

from agent.kit.supervise import FatalError

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
