"""A cell holds the newest value: one writer, any number of readers, no lock, nothing queues up."""

from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

import anyio

T = TypeVar("T")


class Cell(Generic[T]):
    """The newest value of something, with a version that grows at each `publish`.

    Slow readers skip values and always end on the newest. `publish` is synchronous, so that a
    writer can change its state and publish it without a point of cancellation in between.
    """

    def __init__(self, value: T) -> None:
        self._value = value
        self._version = 0
        self._changed = anyio.Event()

    @property
    def value(self) -> T:
        return self._value

    @property
    def version(self) -> int:
        """How often the cell was published."""
        return self._version

    def publish(self, value: T) -> None:
        """Replace the value and wake all readers. Only the owner of the cell calls this."""
        self._value = value
        self._version += 1
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def wait_change(self, seen: int) -> int:
        """Return the version as soon as it differs from `seen`; bound it with a cancel scope."""
        while self._version == seen:
            await self._changed.wait()
        return self._version

    async def wait_for(self, predicate: Callable[[T], bool]) -> T:
        """Return the first published value (the present one counts) that satisfies `predicate`."""
        while not predicate(self._value):
            await self._changed.wait()
        return self._value

    async def values(self) -> AsyncIterator[T]:
        """The present value, then each newest one; never ends. Holds no cancel scope: may be dropped."""
        seen = self._version
        yield self._value
        while True:
            seen = await self.wait_change(seen)
            yield self._value
