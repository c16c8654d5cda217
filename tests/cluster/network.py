"""A cluster with a network of its own, in which a pod on the node's network reaches the API server.

Nothing but loopback is in it: the service address of the API server is an address of that loopback, since
there is no kube-proxy, and a second one is the node's, since a kubelet wants one that is not 127.0.0.1.
"""

import ctypes
import http.client
import os
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

from tests.cluster.waiting import RigError

NODE_ADDRESS = "192.0.2.9"  # of a range for documentation (RFC 5737)
CLONE_NEWNET = 0x40000000

Dial = Callable[[int, float], socket.socket]


def commands(service_address: str) -> list[list[str]]:
    """Commands that make the network; to be run inside."""
    addresses = [
        ["ip", "address", "add", f"{each}/32", "dev", "lo"] for each in (NODE_ADDRESS, service_address)
    ]
    route = ["ip", "route", "add", "default", "dev", "lo", "src", NODE_ADDRESS]
    return [["ip", "link", "set", "lo", "up"], *addresses, route]


def dial(port: int, timeout: float) -> socket.socket:
    """A connection to a port of loopback."""
    return socket.create_connection(("127.0.0.1", port), timeout=timeout)


def dial_inside(pid: int) -> Dial:
    """The same in the network namespace of a process: a socket stays in the one it was made in."""

    def inside(port: int, timeout: float) -> socket.socket:
        made: list[socket.socket | OSError] = []

        def connect() -> None:
            try:
                _enter(Path(f"/proc/{pid}/ns/net"))
                made.append(dial(port, timeout))
            except OSError as error:
                made.append(error)

        # A thread of its own, since it cannot leave that namespace any more.
        thread = threading.Thread(target=connect)
        thread.start()
        thread.join()
        (found,) = made
        if isinstance(found, OSError):
            raise found
        return found

    return inside


def _enter(namespace: Path) -> None:
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"{namespace}: {os.strerror(number)}")
    finally:
        os.close(descriptor)


class Connection(http.client.HTTPSConnection):
    """HTTPS to a port of loopback, wherever `dial` finds it."""

    def __init__(self, port: int, tls: ssl.SSLContext, timeout: float, how: Dial) -> None:
        super().__init__("127.0.0.1", port, timeout=timeout, context=tls)
        self._tls, self._how, self._seconds = tls, how, timeout

    def connect(self) -> None:
        """See http.client."""
        if self.port is None:
            raise RigError("no port")
        raw = self._how(self.port, self._seconds)
        self.sock = self._tls.wrap_socket(raw, server_hostname="127.0.0.1")
