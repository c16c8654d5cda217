"""Waiting for the outside world: always with a deadline, always saying what was last seen."""

import time
from collections.abc import Callable
from typing import TypeVar

from tests.pace import scaled

T = TypeVar("T")


class RigError(Exception):
    """The test cluster did not do what a test needs of it."""


class RigTimeout(RigError, TimeoutError):
    """Something did not come about within its deadline."""


class NotYet(Exception):
    """Raised by a condition that does not hold yet; its text is what was seen instead.

    Where that text has to be asked for, it is a function, which is called at the deadline only.
    """

    def __init__(self, seen: str | Callable[[], str]) -> None:
        super().__init__(seen)
        self._seen = seen

    def __str__(self) -> str:
        return self._seen if isinstance(self._seen, str) else self._seen()


def eventually(condition: Callable[[], T], *, timeout: float, what: str, interval: float = 0.05) -> T:
    """Return the first result of `condition` that is not raised as NotYet.

    `timeout` and `interval` are in seconds; a slow machine has longer. Raises RigTimeout naming `what` and
    the last NotYet.
    """
    seconds = scaled(timeout)
    deadline = time.monotonic() + seconds
    while True:
        try:
            return condition()
        except NotYet as reason:
            if time.monotonic() >= deadline:
                raise RigTimeout(f"{what}: not within {seconds:g} s; last seen: {reason}") from None
        time.sleep(interval)
