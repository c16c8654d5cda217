"""How fast and how busy this machine is at the moment: two fixed pieces of work that are none of the agent's.

Figures of different machines, or of one machine at different loads, can be compared only after that. A piece
of pure Python shows what work of some milliseconds takes, time that others have the processors included; an
empty gRPC call on the C core shows what a question to another process and its answer take.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from tests.bench.client import timed
from tests.bench.registry import percentile

PIECES = 40
CALLS = 200
WARM_UP = 20
START_SECONDS = 60.0
# A budget below this many milliseconds is about a call or two, one above about work.
LONG_MS = 4.0
# From here on a budget says nothing: the machine is occupied by others.
LARGEST_SLOWDOWN = 8.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Milliseconds of the two pieces of work: the median, and what one in twenty takes longer than.

    `python_cpu`: processor time of the first, which a busy neighbour hardly changes.
    """

    python: float
    python_tail: float
    call: float
    call_tail: float
    python_cpu: float

    def slowdown(self, budget_ms: float, *, tail: bool) -> float:
        """How many times longer something takes here than on the quiet machine that budgets were set on.

        `tail`: for a high percentile rather than a median.
        """
        if budget_ms >= LONG_MS:
            return self.python_tail / QUIET.python_tail if tail else self.python / QUIET.python
        return self.call_tail / QUIET.call_tail if tail else self.call / QUIET.call

    @property
    def cpu_slowdown(self) -> float:
        """How many times more processor time the same work takes here."""
        return self.python_cpu / QUIET.python_cpu

    def together(self, other: "Calibration") -> "Calibration":
        """The mean of two: what was measured between them took place on such a machine."""
        return Calibration(
            (self.python + other.python) / 2,
            (self.python_tail + other.python_tail) / 2,
            (self.call + other.call) / 2,
            (self.call_tail + other.call_tail) / 2,
            (self.python_cpu + other.python_cpu) / 2,
        )

    def __str__(self) -> str:
        return (
            f"pure Python {self.python:.2f} ms, 95 % within {self.python_tail:.2f} "
            f"(quiet {QUIET.python:g}, {QUIET.python_tail:g}), {self.python_cpu:.2f} ms of a processor "
            f"(quiet {QUIET.python_cpu:g}); "
            f"null gRPC call {self.call:.3f} ms, 95 % within {self.call_tail:.3f} "
            f"(quiet {QUIET.call:g}, {QUIET.call_tail:g})"
        )


# The machine that the budgets were set on with nothing else running: 2 cores of an AMD EPYC, Python 3.11.
QUIET = Calibration(python=2.6, python_tail=3.0, call=0.3, call_tail=0.45, python_cpu=2.52)


class Calibrator:
    """Takes both pieces of work; blocks for some tenths of a second, on a busy machine for seconds."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __call__(self) -> Calibration:
        used: list[float] = []

        def piece() -> None:
            began = time.thread_time()
            _piece()
            used.append((time.thread_time() - began) * 1000)

        pieces, calls = timed(piece, PIECES, 1), timed(self._call, CALLS, WARM_UP)
        return Calibration(
            python=percentile(pieces, 0.5),
            python_tail=percentile(pieces, 0.95),
            call=percentile(calls, 0.5),
            call_tail=percentile(calls, 0.95),
            python_cpu=percentile(used, 0.5),
        )


@contextmanager
def calibrator() -> Iterator[Calibrator]:
    """With a server for the null call in a process of its own, as the agent is one."""
    with tempfile.TemporaryDirectory(prefix="gnb-") as folder:
        address = f"unix:{folder}/null.sock"
        command = [sys.executable, "-m", "tests.bench.calibration", address]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as server:
            # Its standard input ends with the context: then it ends, too.
            with grpc.insecure_channel(address) as channel:
                call = channel.unary_unary("/bench.Null/Call")
                yield Calibrator(lambda: call(b"", wait_for_ready=True, timeout=START_SECONDS))
            assert server.stdin
            server.stdin.close()


def _piece() -> None:
    counts: dict[str, int] = {}
    for number in range(20_000):
        key = str(number % 97)
        counts[key] = counts.get(key, 0) + number
    ",".join(f"{key}={count}" for key, count in sorted(counts.items()))


def _serve(address: str) -> None:
    handler = grpc.unary_unary_rpc_method_handler(lambda _request, _context: b"")
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bench.Null", {"Call": handler})])
    server.add_insecure_port(address)
    server.start()
    sys.stdin.read()
    server.stop(None).wait()


if __name__ == "__main__":
    _serve(sys.argv[1])
