"""Virtual time: an asyncio loop whose clock jumps to the next timer as soon as nothing is ready.

Everything runs in one thread: what the agent gives to worker threads runs at once, on the loop (`seams`).
Local sockets hand bytes over inside the system call, so a selector that finds nothing ready is right: only a
timer can bring news. `time.monotonic`, `time.time`, `datetime.now` and the clock since boot follow the same
clock, so this module is imported before the agent is.
"""

import asyncio
import contextvars
import datetime as dt
import select
import selectors
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from tests.storm import cheaper_loop
from tests.virtual_time import Clock, JumpingSelector, Stuck

__all__ = ["CLOCK", "EPOCH", "Stuck", "install", "run"]

T = TypeVar("T")

EPOCH: Final = 1_767_225_600.0  # 2026-01-01T00:00:00Z, when every storm begins
UPTIME: Final = 3600.0  # seconds since boot, then
ROUND_SECONDS: Final = 1e-6
# A second in which the loop turns more often is one in which somebody spins.
MOST_ROUNDS_A_SECOND: Final = 50_000


class StormClock(Clock):
    """Seconds since the storm began."""

    stepped = 0.0  # seconds by which somebody has set the clock of the wall

    def monotonic(self) -> float:
        """In place of `time.monotonic`."""
        return self.now

    def time(self) -> float:
        """In place of `time.time`."""
        return EPOCH + self.now + self.stepped

    def gettime(self, clock: int) -> float:
        """In place of `time.clock_gettime`."""
        match clock:
            case time.CLOCK_BOOTTIME:
                return UPTIME + self.now
            case time.CLOCK_REALTIME:
                return self.time()
            case time.CLOCK_MONOTONIC:
                return self.now
        raise ValueError(f"storms have no clock {clock}")


CLOCK: Final = StormClock()


_Moment = dt.datetime


class _Kind(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Moment)


class _Datetime(_Moment, metaclass=_Kind):
    """`datetime.datetime`, but for the present, whose moments are `datetime`'s own."""

    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> _Moment:  # type: ignore[override]
        return _Moment.fromtimestamp(CLOCK.time(), tz)


def install() -> None:
    """Have all modules that are imported from now on read the virtual clock. For a process of its own."""
    time.monotonic = CLOCK.monotonic
    time.time = CLOCK.time
    time.time_ns = lambda: int(CLOCK.time() * 1e9)
    time.clock_gettime = CLOCK.gettime
    dt.datetime = _Datetime  # type: ignore[misc]


class _StormSelector(JumpingSelector):
    """Work takes time, and who spins is found."""

    _rounds = 0
    _since = 0.0

    _selector: Any
    _fd_to_key: dict[int, selectors.SelectorKey]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._rounds += 1
        if CLOCK.now - self._since >= 1.0:
            self._rounds, self._since = 0, CLOCK.now
        elif self._rounds > MOST_ROUNDS_A_SECOND:
            raise Stuck(f"{self._rounds} rounds of the loop within a second of virtual time")
        # Without this, a pause that is too short for the clock's precision would never end.
        CLOCK.now += ROUND_SECONDS
        # As `JumpingSelector` and epoll's selector do, in one call.
        found = self._selector.poll(0, len(self._fd_to_key) or 1)
        if not found:
            if timeout is None:
                raise Stuck("no task is ready and no timer is set")
            CLOCK.now += timeout
            return found  # type: ignore[no-any-return]
        ready = []
        for descriptor, events in found:
            key = self._fd_to_key.get(descriptor)
            if key is not None:
                kind = selectors.EVENT_WRITE if events & ~select.EPOLLIN else 0
                kind |= selectors.EVENT_READ if events & ~select.EPOLLOUT else 0
                ready.append((key, kind & key.events))
        return ready


class StormLoop(cheaper_loop.CheaperLoop):
    """The loop. Executors run their work at once."""

    def __init__(self) -> None:
        super().__init__(_StormSelector(CLOCK))
        self._clock_resolution = 1e-6

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """Run it now; a future that is done."""
        del executor
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  carried to the caller, as an executor does
            future.set_exception(error)
        return future

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        """Without a thread; only loopback is asked for."""
        return socket.getaddrinfo(host, port, **options)


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function to its end in virtual time. Raises Stuck."""
    CLOCK.now = 0.0
    runner = asyncio.Runner(loop_factory=StormLoop)
    cheaper_loop.install(runner.get_loop(), CLOCK)
    try:
        result = runner.run(main(), context=contextvars.copy_context())
    except Stuck:
        raise  # the loop is left as it is: nothing in it can be ended in an orderly way
    except BaseException:
        runner.close()
        raise
    runner.close()
    return result
