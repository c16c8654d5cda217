"""Deadlines of calls that make many calls into NVML: they count from when the call last got on."""

import threading
import time

import pytest

from agent.nvml.event_watch import WorkerThread
from agent.nvml.port import NvmlHung
from tests.pace import scaled


class Steps:
    """A long call of short steps; a gate in `hang` stops it."""

    def __init__(self, seconds: float, count: int, hang: threading.Event | None = None) -> None:
        self._seconds, self._count, self._hang = seconds, count, hang
        self._at = time.monotonic()
        self.taken = 0

    def got_on(self) -> float:
        return self._at

    def run(self) -> int:
        for _ in range(self._count):
            self._at = time.monotonic()
            if self._hang is not None and self.taken == 1:
                self._hang.wait()
            time.sleep(self._seconds)
            self.taken += 1
        return self.taken


async def test_a_call_that_gets_on_may_take_longer_than_its_deadline() -> None:
    thread = WorkerThread("calls")
    deadline = min(scaled(0.3), 3.0)
    steps = Steps(deadline / 6, 8)
    assert await thread.run(steps.run, deadline=deadline, progress=steps.got_on) == 8
    thread.close()


async def test_without_progress_the_same_call_is_late() -> None:
    thread = WorkerThread("calls")
    with pytest.raises(NvmlHung):
        await thread.run(Steps(0.1, 10).run, deadline=0.3)
    thread.close()


async def test_a_call_that_stops_getting_on_is_given_up() -> None:
    thread, gate = WorkerThread("calls"), threading.Event()
    steps = Steps(0.01, 8, gate)
    with pytest.raises(NvmlHung):
        await thread.run(steps.run, deadline=0.2, progress=steps.got_on)
    assert thread.stuck == 1
    assert await thread.run(Steps(0.0, 3).run) == 3  # others go on, in a thread of their own
    gate.set()
    thread.close()
