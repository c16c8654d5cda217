"""A Service: one address in front of all replicas that are ready. The rig has no kube-proxy."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

CHUNK = 1 << 16
DIAL_SECONDS = 2.0


class Service:
    """Forwards TCP connections to the port that `ready` names when they come; without one they are closed."""

    def __init__(self, port: int, ready: Callable[[], int | None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=64)
        self._ready = ready
        self._thread = threading.Thread(target=self._accept, name="service")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing alone would leave the thread in accept().
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="connection", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            port = self._ready()
            if port is None:
                return
            with socket.create_connection(("127.0.0.1", port), DIAL_SECONDS) as server:
                server.settimeout(None)
                back = threading.Thread(target=_pump, args=(server, client), name="answers", daemon=True)
                back.start()
                _pump(client, server)
                back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(CHUNK):
            target.sendall(data)
    # The end of one way ends both: the other side may be dead without a word.
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
