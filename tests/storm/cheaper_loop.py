"""The turns of asyncio's loop, cheaper: the same callbacks in the same order.

A handle is made and run in one call each instead of three, and nobody asks whether the loop is closed or is
to be debugged. anyio asks the loop for the time and for the task that runs.
"""

import asyncio
import contextvars
import heapq
import sys
from asyncio import tasks
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.virtual_time import LONGEST_JUMP, Clock, VirtualLoop

# See `asyncio.base_events`: when cancelled timers are thrown away.
_MOST_TIMERS, _MOST_CANCELLED = 100, 0.5
_copy_context = contextvars.copy_context


class _Handle(asyncio.Handle):
    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: Any, context: contextvars.Context | None) -> None:
        self._context = _copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None


class _Timer(asyncio.TimerHandle):
    __slots__ = ()

    def __init__(
        self, when: float, callback: Any, args: Any, loop: Any, context: contextvars.Context | None
    ) -> None:
        self._context = _copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None
        self._when = when
        self._scheduled = True

    def __lt__(self, other: Any) -> bool:
        return bool(self._when < other._when)


class CheaperLoop(VirtualLoop):
    """A loop in virtual time, of one thread."""

    _ready: Any
    _scheduled: list[Any]
    _timer_cancelled_count: int
    _stopping: bool
    _selector: Any
    _process_events: Callable[[Any], None]
    _clock_resolution: float
    get_debug = staticmethod(bool)  # False; each future asks

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """See asyncio."""
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """See asyncio."""
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """See asyncio."""
        timer = _Timer(self._virtual.now + delay, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        return timer

    def _drop_cancelled(self) -> None:
        scheduled = self._scheduled
        count = len(scheduled)
        if count > _MOST_TIMERS and self._timer_cancelled_count / count > _MOST_CANCELLED:
            self._scheduled = [timer for timer in scheduled if not timer._cancelled]
            heapq.heapify(self._scheduled)
            self._timer_cancelled_count = 0
            return
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(scheduled)

    def _run_once(self) -> None:
        """See `asyncio.base_events.BaseEventLoop._run_once`."""
        self._drop_cancelled()
        ready, scheduled, clock = self._ready, self._scheduled, self._virtual
        timeout: float | None = None
        if ready or self._stopping:
            timeout = 0
        elif scheduled:
            timeout = min(max(0, scheduled[0]._when - clock.now), LONGEST_JUMP)
        if found := self._selector.select(timeout):
            self._process_events(found)
        end = clock.now + self._clock_resolution
        while scheduled and scheduled[0]._when < end:
            timer = heapq.heappop(scheduled)
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                try:
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001  as a handle does
                    context = {"message": f"Exception in {handle}", "exception": error, "handle": handle}
                    self.call_exception_handler(context)
        handle = None  # nothing is kept alive by what ran last


def _in_all_modules(name: str, of: Any, stand_in: Any) -> None:
    """Modules that have imported it by name have it, too."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is of:
            setattr(module, name, stand_in)


def install(loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
    """Put them in place, for as long as this loop is the only one of the process."""
    # Not before: modules that take their clock from `time` are imported once it is a virtual one.
    import anyio
    from anyio._backends import _asyncio as anyio_asyncio

    def now() -> float:
        return clock.now

    _in_all_modules("current_time", anyio.current_time, now)
    if sys.version_info < (3, 12):  # since then it is written in C
        anyio_asyncio.current_task = partial(tasks._current_tasks.get, loop)  # type: ignore[attr-defined]
    anyio_asyncio.AsyncIOBackend.current_time = staticmethod(now)  # type: ignore[method-assign]
