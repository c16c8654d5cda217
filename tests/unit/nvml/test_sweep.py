"""Asking many GPUs on one trip to the thread, and what becomes of calls that hang."""

import threading
import time

import anyio
import pytest

from agent.nvml import sweep as sweeping
from agent.nvml.event_watch import MOST_OF_ONE, MOST_STUCK, WorkerThread
from agent.nvml.port import NvmlCode, NvmlError, NvmlHung
from agent.nvml.sweep import Sweep
from tests.pace import scaled


class Gpus:
    """Answers with ten times the index, says in which thread it was asked, and hangs on demand."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.threads: set[int] = set()
        self.release: dict[int, threading.Event] = {}
        self.noted: dict[int, int | NvmlError] = {}

    def ask(self, index: int) -> int:
        self.asked.append(index)
        self.threads.add(threading.get_ident())
        if index in self.release:
            self.release[index].wait(10)
        if index == 9:
            raise NvmlError(NvmlCode.UNKNOWN, "ask", "no such GPU")
        return 10 * index

    def note(self, index: int, outcome: int | NvmlError) -> bool:
        self.noted[index] = outcome
        return index != 7


# A thread that has not begun by then has no step to blame.
HANGS_SECONDS = min(scaled(0.1), 1.0)


@pytest.fixture
def gpus() -> Gpus:
    return Gpus()


async def test_all_are_asked_in_order_in_one_thread_and_errors_are_answers(gpus: Gpus) -> None:
    thread = WorkerThread("test")
    assert await Sweep(thread, gpus.ask).over((0, 9, 2), gpus.note) == set()
    assert gpus.asked == [0, 9, 2]
    assert len(gpus.threads) == 1
    assert (gpus.noted[0], gpus.noted[2]) == (0, 20)
    assert isinstance(gpus.noted[9], NvmlError)
    thread.close()


async def test_a_note_of_false_ends_the_sweep(gpus: Gpus) -> None:
    thread = WorkerThread("test")
    assert await Sweep(thread, gpus.ask).over((1, 7, 2), gpus.note) == set()
    assert gpus.asked == [1, 7]
    thread.close()


async def test_a_call_that_hangs_is_left_out_until_it_came_back_and_its_answer_is_dropped(gpus: Gpus) -> None:
    thread = WorkerThread("test", deadline=HANGS_SECONDS)
    gpus.release[1] = threading.Event()
    sweep = Sweep(thread, gpus.ask)
    assert await sweep.over((0, 1, 2), gpus.note) == {1}
    assert await sweep.over((0, 1, 2), gpus.note) == {1}
    assert gpus.asked == [0, 1, 2, 0, 2]
    assert set(gpus.noted) == {0, 2}
    gpus.release.pop(1).set()
    with anyio.fail_after(5):
        while thread.stuck:
            await anyio.sleep(0.01)
    assert 1 not in gpus.noted
    assert await sweep.over((0, 1, 2), gpus.note) == set()
    assert gpus.noted[1] == 10
    thread.close()


async def test_one_that_hangs_in_all_sweeps_is_left_out_of_the_next(gpus: Gpus) -> None:
    """As of an agent that opens NVML again and again, and asks a sick GPU in ever new sweeps."""
    thread = WorkerThread("test", deadline=HANGS_SECONDS)
    gpus.release[1] = threading.Event()
    for _ in range(2 * MOST_STUCK):
        gpus.noted.clear()
        assert await Sweep(thread, gpus.ask).over((1, 2), gpus.note) == {1}
        assert gpus.noted == {2: 20}
    assert thread.stuck == gpus.asked.count(1) == MOST_OF_ONE
    gpus.release[1].set()
    thread.close()


async def test_a_lane_that_refuses_is_told(gpus: Gpus) -> None:
    thread = WorkerThread("test", deadline=HANGS_SECONDS)
    steps = tuple(range(20, 30))
    gpus.release = {step: threading.Event() for step in steps}
    with pytest.raises(NvmlHung, match="the driver needs attention"):
        await Sweep(thread, gpus.ask).over(steps, gpus.note)
    for event in gpus.release.values():
        event.set()
    thread.close()


async def test_a_long_trip_lets_others_have_their_turn(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "TRIP_SECONDS", 0.01)
    thread = WorkerThread("test")
    order: list[int] = []
    queued = threading.Event()

    def slow(index: int) -> int:
        time.sleep(0.02)  # in the thread's thread
        if index == 1:
            queued.wait(scaled(10))
        order.append(index)
        return index

    async def other() -> None:
        while not order:
            await anyio.sleep(0.001)
        queued.set()  # nothing runs in between: the loop is ours
        await thread.run(order.append, -1)

    async with anyio.create_task_group() as group:
        group.start_soon(other)
        assert await Sweep(thread, slow).over((0, 1, 2), gpus.note) == set()
    assert [index for index in order if index >= 0] == [0, 1, 2]
    assert order.index(-1) < order.index(2)
    thread.close()
