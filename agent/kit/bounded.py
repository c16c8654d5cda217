"""Calls that another's process can keep from returning: made in threads for which nobody waits for long.

What /proc shows of a process's memory waits for locks of that process, and it holds them for as long as it
likes: it only needs a file server of its own that does not answer. Recent kernels (6.18) take such a lock
for its `stat`, descriptors and namespaces, too. The call returns once the process has ended at the latest, so
that a PID is enough to know a call by. All of it blocks, for a bounded time.
"""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

log = structlog.get_logger()

SECONDS = 2.0  # of a busy machine
MOST_LATE = 64  # threads that wait; beyond these nothing is begun
CHUNK = 1 << 16
T = TypeVar("T")


class Late(TimeoutError):
    """It did not return in time; `again`: nor has it since an earlier call."""

    def __init__(self, text: str, *, again: bool = False) -> None:
        super().__init__(text)
        self.again = again


class _Calls:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._late: set[Hashable] = set()

    def call(self, key: Hashable, act: Callable[[], T], seconds: float) -> T:
        with self._lock:
            if key in self._late:
                raise Late("it has not returned since an earlier look", again=True)
            if len(self._late) >= MOST_LATE or seconds <= 0:
                raise Late("too many looks have not returned, or there is no time left")
        future: Future[T] = Future()
        # No thread of the loop's: an agent that stops waits for those.
        thread = threading.Thread(target=self._run, args=(key, act, future), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the process may have no further one now
            raise Late(str(error)) from error
        with suppress(TimeoutError):
            return future.result(seconds)
        with self._lock:
            late = not future.done()
            if late:
                self._late.add(key)
        if late:
            log.warning("look_not_answered", at=str(key), seconds=seconds)
            raise Late(f"there was no answer within {seconds:g} s")
        return future.result()

    def _run(self, key: Hashable, act: Callable[[], T], future: Future[T]) -> None:
        try:
            result = act()
        except BaseException as error:  # noqa: BLE001  it is the caller's
            with self._lock:
                self._late.discard(key)
                future.set_exception(error)
        else:
            with self._lock:
                self._late.discard(key)
                future.set_result(result)


_calls = _Calls()


def call(key: Hashable, act: Callable[[], T], seconds: float = SECONDS) -> T:
    """The result of a call; one that is late is not made again before it has returned.

    Raises Late, and whatever the call raises.
    """
    return _calls.call(key, act, seconds)


def read(process: Path, name: str, most: int, seconds: float = SECONDS) -> bytes:
    """The beginning of a file in a process's folder of /proc. Raises OSError, Late among them."""
    return call(str(process / name), partial(read_bytes, process / name, most), seconds)


def read_bytes(file: Path, most: int) -> bytes:
    """The beginning of a file, however small the parts are that it comes in. Raises OSError."""
    with file.open("rb", buffering=0) as opened:
        found = bytearray()  # bytes would be copied whole for each part
        while len(found) < most and (data := opened.read(min(CHUNK, most - len(found)))):
            found += data
        return bytes(found)
