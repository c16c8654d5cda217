"""Tests in virtual time: where nothing is left to do but wait, the clock jumps.

For code that waits on nothing outside the event loop: no sockets, no threads, no processes.
"""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, Final, ParamSpec

P = ParamSpec("P")

LONGEST_JUMP: Final = 24 * 3600.0


class Stuck(RuntimeError):
    """Nothing is ready and no timer is set: the program under test would wait for ever."""


class Clock:
    """Seconds since the beginning."""

    def __init__(self) -> None:
        self.now = 0.0


class JumpingSelector(selectors.DefaultSelector):
    """Never waits: either something is ready, or the clock moves."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None:
            raise Stuck("no task is ready and no timer is set")
        # An idle loop may jump far: the agent's longest pause is an hour.
        self.clock.now += min(timeout, LONGEST_JUMP)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer as soon as nothing is ready."""

    def __init__(self, selector: JumpingSelector | None = None) -> None:
        selector = selector or JumpingSelector(Clock())
        self._virtual = selector.clock
        super().__init__(selector)

    def time(self) -> float:
        """The virtual clock."""
        return self._virtual.now


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test on a loop of its own that has a virtual clock."""

    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*arguments, **named))

    return run
