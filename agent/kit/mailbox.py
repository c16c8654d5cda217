"""A bounded mailbox: many senders, one actor that reads."""

from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import anyio

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Messages for one actor, in order.

    `post` waits while the box is full: for what must not be lost. `offer` drops instead and counts
    the drop: for what the next reading will replace anyway. There is nothing to close (an anyio
    memory stream would warn when it is forgotten).
    """

    def __init__(self, size: int) -> None:
        self._messages: deque[T] = deque()
        self._places = anyio.Semaphore(size)
        self._arrived = anyio.Event()
        self.size = size
        self.dropped = 0

    @property
    def depth(self) -> int:
        return len(self._messages)

    async def post(self, message: T) -> None:
        """Put a message in the box, waiting for a place behind those who wait already."""
        await self._places.acquire()
        self._put(message)

    def offer(self, message: T) -> bool:
        """Put a message in the box if there is a place; answers whether there was."""
        try:
            self._places.acquire_nowait()
        except anyio.WouldBlock:
            self.dropped += 1
            return False
        self._put(message)
        return True

    async def __aiter__(self) -> AsyncIterator[T]:
        """The messages, for ever; for the one actor."""
        while True:
            while not self._messages:
                self._arrived = anyio.Event()
                await self._arrived.wait()
            message = self._messages.popleft()
            self._places.release()
            yield message

    def _put(self, message: T) -> None:
        self._messages.append(message)
        self._arrived.set()
