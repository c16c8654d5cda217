"""Storms in several processes at once, each in one of its own: nothing that a storm leaves lasts.

A child is forked when all modules are there and no loop runs yet. Its output is shown in one piece once it
has ended.
"""

import ctypes
import os
import selectors
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, NoReturn

import msgspec

from tests.storm.plan import Plan

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1  # prctl(2)


class Summary(msgspec.Struct, frozen=True):
    """The figures of a storm; see `storm.Outcome`."""

    seed: int
    steps: int = 0
    virtual_seconds: float = 0.0
    faults: int = 0
    checks: int = 0
    violation: str | None = None
    digest: str = ""
    families: list[str] = []  # of faults
    offers: tuple[int, int] = (0, 0)  # looks, and how many of them needed an excuse
    admissions: tuple[int, int] = (0, 0)
    refusals: tuple[int, int] = (0, 0)
    unwell: tuple[int, int] = (0, 0)  # pods, and how many fitted only where nobody could offer anything


Work = Callable[[Plan], Summary]


@dataclass
class _Child:
    pid: int
    plan: Plan
    said: IO[bytes]
    answer: bytes = b""

    def end(self) -> Summary:
        """Wait for it, and show its output."""
        _, status = os.waitpid(self.pid, 0)
        self.said.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(self.said.read())
        self.said.close()
        if status == 0:
            return msgspec.json.decode(self.answer, type=Summary)
        how = f"its process ended with {os.waitstatus_to_exitcode(status)}"
        print(f"seed {self.plan.seed}: {how}", flush=True)
        return Summary(self.plan.seed, violation=how)


def side_by_side(plans: Iterable[Plan], jobs: int, work: Work) -> Iterator[Summary]:
    """Storms as they end. The next one is begun where one has ended, for as long as results are taken."""
    with selectors.DefaultSelector() as waiting:
        for plan in plans:
            _begin(plan, work, waiting)
            if len(waiting.get_map()) >= jobs:
                yield _next(waiting)
        while waiting.get_map():
            yield _next(waiting)


def _begin(plan: Plan, work: Work, waiting: selectors.BaseSelector) -> None:
    sys.stdout.flush()  # or else the child would say it again
    said = tempfile.TemporaryFile()  # noqa: SIM115  closed by `_Child.end`
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _live(plan, work, writer, said.fileno())
    os.close(writer)
    waiting.register(reader, selectors.EVENT_READ, _Child(pid, plan, said))


def _live(plan: Plan, work: Work, writer: int, said: int) -> NoReturn:
    """The child."""
    code = 1
    try:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody waits for it then
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.stdout = sys.stderr = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        answer = msgspec.json.encode(work(plan))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer)
        code = 0
    except BaseException:  # noqa: BLE001  nothing of the parent's may run here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _next(waiting: selectors.BaseSelector) -> Summary:
    """The next that ends."""
    while True:
        for key, _ in waiting.select():
            child: _Child = key.data
            data = os.read(key.fd, 1 << 16)
            if data:
                child.answer += data
                continue
            waiting.unregister(key.fd)
            os.close(key.fd)
            return child.end()
