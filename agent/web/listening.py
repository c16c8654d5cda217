"""Listening sockets of the HTTP server."""

import asyncio
import os
import socket
from collections.abc import Sequence

import anyio

from agent.kit.supervise import FatalError

BACKLOG = 1024


class CannotListen(FatalError):
    """The address or port of the HTTP server cannot be had; the message names the remedy."""


async def listen(name: str, port: int) -> list[socket.socket]:
    """A listening socket for every address that the name stands for. Raises CannotListen."""
    bound: list[socket.socket] = []
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, address in dict.fromkeys(found):
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


async def first_connection(listening: Sequence[socket.socket]) -> None:
    """Return when somebody has connected to one of the sockets; nothing is accepted yet."""

    async def watch(one: socket.socket) -> None:
        await anyio.wait_readable(one)
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for one in listening:
            group.start_soon(watch, one)
