"""Deadlines of tests are as much longer as the machine is slower than a quiet one.

Once in a session a piece of work is timed, time that others have the processors included. Workers of xdist
get the figure from the environment; where there are more of them than cores, they keep each other waiting.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any, Final

import anyio

VARIABLE: Final = "GNA_TEST_PACE"
PIECES: Final = 5
# A piece of work on the machine that deadlines were written on: 2 cores of an AMD EPYC, Python 3.11.
QUIET_SECONDS: Final = 0.05
LARGEST: Final = 30.0  # a deadline still comes


def slowdown(clock: Callable[[], float] = time.perf_counter) -> float:
    """How many times longer work takes here and now; 1 at least."""
    began = clock()
    for _ in range(PIECES):
        _work()
    return max(1.0, (clock() - began) / PIECES / QUIET_SECONDS)


def _work() -> None:
    total = 0
    for number in range(700_000):
        total += number * number & 0xFF


def measure(workers: int) -> None:
    """Take the figure for this session and its workers, unless somebody has."""
    if VARIABLE not in os.environ:
        crowd = max(1.0, workers / len(os.sched_getaffinity(0)))
        os.environ[VARIABLE] = f"{min(slowdown() * crowd, LARGEST):.2f}"


@cache
def pace() -> float:
    """The figure of this session; 1 outside of one."""
    return float(os.environ.get(VARIABLE, "1"))


def scaled(seconds: float) -> float:
    """A deadline for this machine."""
    return seconds * pace()


@contextmanager
def longer_deadlines() -> Iterator[None]:
    """Deadlines that tests give are scaled; those that the agent gives in the same process are not."""
    with ExitStack() as stack:
        for holder, name, argument in (
            (anyio, "fail_after", "delay"),
            (subprocess, "run", "timeout"),
            (subprocess.Popen, "communicate", "timeout"),
            (subprocess.Popen, "wait", "timeout"),
        ):
            plain = getattr(holder, name)
            setattr(holder, name, _scaling(plain, argument))
            stack.callback(setattr, holder, name, plain)
        yield


def _scaling(plain: Callable[..., Any], argument: str) -> Callable[..., Any]:
    """The same function with a longer deadline where a test calls it; it is `argument`, or comes first."""
    first = argument == "delay"

    @wraps(plain)
    def longer(*arguments: Any, **named: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("tests."):
            if named.get(argument) is not None:
                named[argument] = scaled(named[argument])
            elif first and arguments and arguments[0] is not None:
                arguments = (scaled(arguments[0]), *arguments[1:])
        return plain(*arguments, **named)

    return longer
