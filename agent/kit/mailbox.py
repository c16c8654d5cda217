"""A bounded mailbox: many senders, one actor that reads."""

from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import anyio

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Messages for one actor, in order.

    `post` waits while the box is full: for what must not be lost. `offer` drops instead and counts
    the drop: for what the next reading will replace anyway.
    """

    def __init__(self, size: int) -> None:
        self._send, self._receive = anyio.create_memory_object_stream[T](size)
        self.size = size
        self.dropped = 0

    @property
    def depth(self) -> int:
        """How many messages wait."""
        return self._send.statistics().current_buffer_used

    async def post(self, message: T) -> None:
        """Put a message in the box, waiting for room."""
        await self._send.send(message)

    def offer(self, message: T) -> bool:
        """Put a message in the box if there is room; answers whether there was."""
        try:
            self._send.send_nowait(message)
        except anyio.WouldBlock:
            self.dropped += 1
            return False
        return True

    async def __aiter__(self) -> AsyncIterator[T]:
        while True:
            yield await self._receive.receive()

    def close(self) -> None:
        """Let go of both ends; messages that were not read are lost."""
        self._send.close()
        self._receive.close()
