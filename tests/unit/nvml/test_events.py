"""The event loop against an NVML that fails in every way."""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import anyio

from agent.nvml.event_watch import EventWatch, WorkerThread
from agent.nvml.port import EventKind, NvmlCode, NvmlError, NvmlEvent, NvmlGpuLost, NvmlNotSupported, NvmlPort


class FakeNvml:
    """An event set; `failing` answers what a wait raises."""

    def __init__(self) -> None:
        self.registered: list[str] = []
        self.sets = 0
        self.waits = 0
        self.events: list[NvmlEvent] = []
        self.lost: set[str] = set()
        self.failing: Callable[[], NvmlError | None] = lambda: None
        self.gate: threading.Event | None = None

    def watch(self, uuid: str) -> frozenset[EventKind]:
        if uuid in self.lost:
            raise NvmlGpuLost(NvmlCode.GPU_IS_LOST, "watch")
        if uuid.startswith("mute"):
            raise NvmlNotSupported(NvmlCode.NOT_SUPPORTED, "watch")
        assert uuid not in self.registered
        self.registered.append(uuid)
        return frozenset({EventKind.XID})

    def unwatch_all(self) -> None:
        self.sets += 1
        self.registered.clear()

    def wait(self, timeout_ms: int) -> NvmlEvent | None:
        self.waits += 1
        if self.gate is not None:
            self.gate.wait()
        if error := self.failing():
            raise error
        if self.events:
            return self.events.pop(0)
        threading.Event().wait(min(timeout_ms, 20) / 1000)
        return None


class Bench:
    def __init__(self) -> None:
        self.nvml = FakeNvml()
        self.thread = WorkerThread("events")
        self.targets = frozenset({"a", "b"})
        self.got: list[NvmlEvent] = []
        self.watch = EventWatch(
            cast("NvmlPort", self.nvml), self.thread, lambda: self.targets, self._changed, self._deliver
        )

    async def _changed(self) -> None:
        await anyio.sleep(0.01)

    async def _deliver(self, event: NvmlEvent) -> None:
        self.got.append(event)

    async def until(self, reached: Callable[[], object]) -> None:
        with anyio.fail_after(30):
            while not reached():
                await anyio.sleep(0.005)


@asynccontextmanager
async def running() -> AsyncIterator[Bench]:
    bench = Bench()
    async with anyio.create_task_group() as group:
        group.start_soon(bench.watch.run)
        try:
            yield bench
        finally:
            group.cancel_scope.cancel()
    bench.thread.close()


async def test_events_are_handed_on_and_the_set_is_freed_at_the_end() -> None:
    async with running() as bench:
        await bench.until(lambda: len(bench.watch.watched) == 2)
        bench.nvml.events.append(NvmlEvent("a", EventKind.XID, 48))
        await bench.until(lambda: bench.got)
        before = bench.nvml.sets
    assert bench.nvml.sets == before + 1
    assert bench.got == [NvmlEvent("a", EventKind.XID, 48)]


async def test_a_new_gpu_is_registered_without_touching_the_others() -> None:
    async with running() as bench:
        await bench.until(lambda: len(bench.watch.watched) == 2)
        sets = bench.nvml.sets
        bench.targets |= {"c", "mute"}
        await bench.until(lambda: len(bench.watch.watched) == 3)
        assert bench.nvml.sets == sets


async def test_a_gpu_that_left_and_returned_gets_a_new_set_and_no_event_is_lost() -> None:
    async with running() as bench:
        await bench.until(lambda: len(bench.watch.watched) == 2)
        bench.targets = frozenset({"a"})
        await bench.until(lambda: bench.watch.watched == {"a"})
        sets = bench.nvml.sets
        bench.nvml.events += [NvmlEvent("a", EventKind.XID, number) for number in range(3)]
        bench.targets = frozenset({"a", "b"})
        await bench.until(lambda: bench.watch.watched == {"a", "b"})
        assert bench.nvml.sets == sets + 1
        assert [event.data for event in bench.got] == [0, 1, 2]


async def test_a_lost_gpu_in_the_set_does_not_starve_the_others() -> None:
    async with running() as bench:
        await bench.until(lambda: len(bench.watch.watched) == 2)
        bench.nvml.lost.add("b")
        bench.nvml.failing = lambda: (
            NvmlGpuLost(NvmlCode.GPU_IS_LOST, "wait") if "b" in bench.nvml.registered else None
        )
        await bench.until(lambda: bench.watch.watched == {"a"})
        bench.nvml.events.append(NvmlEvent("a", EventKind.XID, 79))
        await bench.until(lambda: bench.got)


async def test_a_wait_that_fails_for_ever_is_tried_ever_less_often() -> None:
    async with running() as bench:
        bench.nvml.failing = lambda: NvmlError(NvmlCode.UNKNOWN, "wait")
        await bench.until(lambda: bench.nvml.waits >= 2)
        waits = bench.nvml.waits
        await anyio.sleep(1.5)
        assert bench.nvml.waits <= waits + 4
        assert bench.watch.problem
        assert bench.watch.watched == frozenset()


async def test_a_wait_that_hangs_is_left_alone_until_it_comes_back() -> None:
    async with running() as bench:
        await bench.until(lambda: len(bench.watch.watched) == 2)
        gate = bench.nvml.gate = threading.Event()
        sets = bench.nvml.sets
        await bench.until(lambda: bench.thread.stuck == 1)
        waits = bench.nvml.waits
        await anyio.sleep(0.5)
        assert bench.nvml.waits == waits
        assert bench.nvml.sets == sets  # freeing a set that is waited for is undefined
        bench.nvml.gate = None
        gate.set()
        await bench.until(lambda: len(bench.watch.watched) == 2)
