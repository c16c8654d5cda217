"""An event loop whose clock jumps to the next timer when nothing is ready: hours of pauses in milliseconds.

For code that runs on the loop alone: what waits for a thread or another process is passed over.
"""

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

import anyio


class _Jumping(selectors.EpollSelector):
    """Never waits: either something is ready, or the clock moves."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "no task is ready and no timer is set"
            self.now += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._jumping.now


def run(main: Callable[[], Awaitable[Any]]) -> None:
    """Run a test to its end in virtual time."""
    anyio.run(main, backend_options={"loop_factory": _Loop})
