"""Frames of one turn of the event loop leave in one write.

grpclib writes headers, message and trailers one by one. Each write is a system call, and wakes the other end
for a piece that says nothing yet; where processors are busy every one of them may cost the agent its turn.
"""

import asyncio
from typing import cast

from grpclib.protocol import H2Protocol

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
        if self._size > LARGEST:
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
