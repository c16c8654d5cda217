"""The worker thread: results, deadlines, hanging calls, cancellation."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any

import anyio
import pytest

from agent.nvml import event_watch as threads
from agent.nvml.event_watch import WorkerThread
from agent.nvml.port import NvmlGpuLost, NvmlHung

Logs = list[MutableMapping[str, Any]]


class Gate:
    """A call that hangs until the gate opens."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()
        self.calls = 0

    def hang(self, which: str = "") -> str:
        self.calls += 1
        self.entered.set()
        assert self._open.wait(30), "the test forgot to open the gate"
        return f"back {which}"

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Opened at the end, so that no thread outlives the test."""
    made = Gate()
    yield made
    made.open()


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():
            await anyio.sleep(0.005)


def lane_threads(name: str) -> int:
    return sum(thread.name == f"nvml-{name}" for thread in threading.enumerate())


async def test_a_call_runs_in_a_thread_of_its_own_and_answers() -> None:
    thread = WorkerThread("answers")

    def call(a: int, b: int) -> tuple[int, str, bool]:
        thread = threading.current_thread()
        return a + b, thread.name, thread.daemon

    assert await thread.run(call, 1, 2) == (3, "nvml-answers", True)
    assert await thread.run(call, 3, 4) == (7, "nvml-answers", True)
    assert lane_threads("answers") == 1
    thread.close()
    await until(lambda: lane_threads("answers") == 0)


async def test_errors_of_the_call_reach_the_caller() -> None:
    thread = WorkerThread("errors")

    def lost() -> None:
        raise NvmlGpuLost(15, "describe")

    with pytest.raises(NvmlGpuLost):
        await thread.run(lost)
    assert await thread.run(lambda: "well again") == "well again"
    thread.close()


async def test_calls_run_one_at_a_time_in_order() -> None:
    thread = WorkerThread("order")
    seen: list[str] = []

    def call(number: int) -> None:
        seen.append(f"{number} in")
        time.sleep(0.002)
        seen.append(f"{number} out")

    async with anyio.create_task_group() as group:
        for number in range(5):
            group.start_soon(thread.run, call, number)
    assert seen == [f"{number} {end}" for number in range(5) for end in ("in", "out")]
    thread.close()


async def test_a_hanging_call_is_given_up_and_the_lane_goes_on(gate: Gate, logs: Logs) -> None:
    thread = WorkerThread("hung", deadline=0.05)
    with pytest.raises(NvmlHung, match=r"NVML hang did not answer within 0\.05 s"):
        await thread.run(gate.hang)
    assert thread.stuck == 1
    assert await thread.run(lambda: "served", deadline=10) == "served"
    assert [event["call"] for event in logs if event["event"] == "nvml_call_hangs"] == ["hang"]
    gate.open()
    await until(lambda: thread.stuck == 0)
    thread.close()
    await until(lambda: lane_threads("hung") == 0)


async def test_the_same_call_is_not_tried_again_while_it_hangs(gate: Gate) -> None:
    thread = WorkerThread("same", deadline=0.05)
    for _ in range(20):
        with pytest.raises(NvmlHung):
            await thread.run(gate.hang, "gpu-0")
    await until(lambda: gate.calls > 0)  # the thread has begun
    assert (thread.stuck, gate.calls) == (1, 1)
    with pytest.raises(NvmlHung):
        await thread.run(gate.hang, "gpu-1")
    await until(lambda: gate.calls > 1)
    assert (thread.stuck, gate.calls) == (2, 2)
    gate.open()
    await until(lambda: thread.stuck == 0)
    assert await thread.run(gate.hang, "gpu-0", deadline=10) == "back gpu-0"
    thread.close()


async def test_too_many_hanging_calls_are_told_without_another_thread(gate: Gate) -> None:
    thread = WorkerThread("many", deadline=0.02)
    for number in range(threads.MOST_STUCK):
        with pytest.raises(NvmlHung):
            await thread.run(gate.hang, str(number))
    assert thread.stuck == threads.MOST_STUCK
    with pytest.raises(NvmlHung, match="8 NVML calls hang in thread many; the driver needs attention"):
        await thread.run(lambda: None)
    assert lane_threads("many") == threads.MOST_STUCK
    gate.open()
    await until(lambda: thread.stuck == 0)
    assert await thread.run(lambda: "served", deadline=10) == "served"
    thread.close()


async def test_one_gpu_whose_calls_all_hang_leaves_the_others_theirs(gate: Gate) -> None:
    thread = WorkerThread("one", deadline=0.02)
    for _ in range(2 * threads.MOST_STUCK):
        with pytest.raises(NvmlHung):
            await thread.run(partial(gate.hang), "gpu-0")  # each another call
    assert thread.stuck == lane_threads("one") == threads.MOST_OF_ONE
    with pytest.raises(NvmlHung, match="4 NVML calls about gpu-0 hang in thread one"):
        await thread.run(partial(gate.hang), "gpu-0")
    assert await thread.run("about {}".format, "gpu-1", deadline=10) == "about gpu-1"
    gate.open()
    await until(lambda: thread.stuck == 0)
    assert await thread.run(gate.hang, "gpu-0", deadline=10) == "back gpu-0"
    thread.close()


async def test_calls_that_say_which_gpu_they_are_about_count_against_that_one_alone(gate: Gate) -> None:
    thread = WorkerThread("told", deadline=0.02)
    for number in range(threads.MOST_OF_ONE):
        with pytest.raises(NvmlHung):
            await thread.run(gate.hang, f"place {number}", about=lambda: "gpu-0")
    assert await thread.run("place {}".format, 9, deadline=10, about=lambda: "gpu-1") == "place 9"
    assert await thread.run("of no one yet".title, deadline=10, about=lambda: None) == "Of No One Yet"
    with pytest.raises(NvmlHung, match="4 NVML calls about gpu-0 hang in thread told"):
        await thread.run(gate.hang, "place 9", about=lambda: "gpu-0")
    with pytest.raises(NvmlHung, match="4 NVML calls about gpu-0 hang in thread told"):
        await thread.run(gate.hang, "gpu-0")
    await until(lambda: gate.calls == threads.MOST_OF_ONE)
    assert thread.stuck == threads.MOST_OF_ONE
    gate.open()
    thread.close()


async def test_a_cancellation_waits_for_the_call_and_is_then_delivered(gate: Gate) -> None:
    thread = WorkerThread("cancelled", deadline=10)
    after = False
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                nonlocal after
                await thread.run(gate.hang)
                after = True

            group.start_soon(ask)
            await anyio.to_thread.run_sync(gate.entered.wait)
            scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.02)
                assert lane_threads("cancelled") == 1
                gate.open()
    assert scope.cancelled_caught
    assert not after
    assert thread.stuck == 0
    assert await thread.run(lambda: "served", deadline=10) == "served"
    thread.close()


async def test_a_waiting_caller_can_be_cancelled_without_a_call(gate: Gate) -> None:
    thread = WorkerThread("waiting", deadline=10)
    called = threading.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(thread.run, gate.hang, "first")
        await anyio.to_thread.run_sync(gate.entered.wait)
        with anyio.move_on_after(0.02) as scope:
            await thread.run(called.set)
        assert scope.cancelled_caught
        gate.open()
    assert not called.is_set()
    assert await thread.run(lambda: "served", deadline=10) == "served"
    thread.close()


async def test_an_agent_that_ends_gives_up_a_call_long_before_its_deadline(gate: Gate) -> None:
    thread = WorkerThread("ending", deadline=10)
    hung: list[str] = []
    called = threading.Event()

    async def ask(call: Callable[[], object]) -> None:
        with pytest.raises(NvmlHung) as caught:
            await thread.run(call, deadline=3600.0)
        hung.append(str(caught.value))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(ask, gate.hang)
            await anyio.to_thread.run_sync(gate.entered.wait)
            group.start_soon(ask, called.set)  # it waits for its turn, and nothing is called under the first
            thread.end_within(0.05)
    assert "did not answer" in hung[0]
    assert hung[1] == "NVML set is not called: the agent ends"
    assert not called.is_set()
    gate.open()
    thread.close()


async def test_an_agent_that_ends_makes_its_last_calls_while_none_hangs(gate: Gate) -> None:
    thread = WorkerThread("last", deadline=0.05)
    thread.end_within(3600.0)
    assert await thread.run(lambda: "closed", deadline=10) == "closed"
    with pytest.raises(NvmlHung, match="did not answer"):
        await thread.run(gate.hang)
    with pytest.raises(NvmlHung, match="is not called: the agent ends"):
        await thread.run(lambda: "closed")
    gate.open()
    await until(lambda: thread.stuck == 0)
    assert await thread.run(lambda: "closed", deadline=10) == "closed"
    thread.close()


@pytest.mark.timeout(30)
def test_a_hanging_call_does_not_keep_the_process_from_ending() -> None:
    script = """
import anyio, threading
from agent.nvml.port import NvmlHung
from agent.nvml.event_watch import WorkerThread

async def main():
    thread = WorkerThread("stuck", deadline=0.05)
    try:
        await thread.run(threading.Event().wait)
    except NvmlHung:
        print("given up")

anyio.run(main)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "given up" in ended.stdout
