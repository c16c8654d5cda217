"""The agent's part in shares of compute, for containers of the GPU tier: each second it corrects.

It goes by the driver's figures of the processes. Where it runs in another PID namespace than the driver they
are all strangers to it and it corrects nothing: the factors stay 1.
"""

import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import anyio
import anyio.to_thread

from agent.nvml.binding import NvmlBinding
from agent.nvml.port import NvmlError, SampleRequest
from agent.vgpu.compute import SAMPLED_SECONDS
from agent.vgpu.correction import Corrections, Second, learned
from tests.gpu.limits import Capped

SECONDS = 1.0


@dataclass(eq=False)
class Held:
    """A container that is held to a share, with its processes."""

    container: Capped
    percent: float
    pids: tuple[int, ...] = ()
    factor: float = 1.0
    written: tuple[float, float] | None = None  # the factor and rivals
    waited_ns: int = 0
    next_ns: int = 0
    moved: float = float("-inf")  # when it last did something, by the clock of next_ns in seconds
    since: float = float("-inf")  # when it began to work


class Observer:
    """All containers on one GPU."""

    def __init__(self, nvml: NvmlBinding, gpu: str, held: Sequence[Held]) -> None:
        self._nvml = nvml
        self._gpu = gpu
        self._held = held
        self._since_us = time.time_ns() // 1000

    async def run(self) -> None:
        """Correct, for ever."""
        await anyio.to_thread.run_sync(self._nvml.open)
        try:
            while True:
                await anyio.sleep(SECONDS)
                await anyio.to_thread.run_sync(self._correct)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._nvml.close)

    def _correct(self) -> None:
        try:
            sample = self._nvml.sample(self._gpu, SampleRequest(self._since_us, counters=False))
        except NvmlError:
            return
        self._since_us = max(self._since_us, sample.newest_us)
        busy = dict(sample.busy or ())
        there = busy.keys() | {each.pid for each in sample.processes or ()}
        seconds = [self._second(each, busy, there) for each in self._held]
        strangers = there - {pid for each in self._held for pid in each.pids}
        others = sample.processes is None or bool(strangers)
        found = learned(seconds, min(100.0, sum(busy.values()) * 100), others=others)
        for number, each in enumerate(self._held):
            self._write(each, found, number)

    @staticmethod
    def _second(each: Held, busy: Mapping[int, float], there: AbstractSet[int]) -> Second:
        usage, now = each.container.usage, time.monotonic()
        processes = sum(busy.get(pid, 0.0) > 0 for pid in each.pids)
        if usage.next_ns != each.next_ns or usage.next_ns / 1e9 > now:
            each.since = now if now - each.moved > SAMPLED_SECONDS else each.since
            each.moved = now
        throttled = usage.waited_ns > each.waited_ns
        each.waited_ns, each.next_ns = usage.waited_ns, usage.next_ns
        working = processes > 0 or now - each.moved < SAMPLED_SECONDS
        steady = now - each.since > SECONDS / 2  # the first second is that in which functions are learned
        listed = not there.isdisjoint(each.pids)
        return Second(each.factor, each.percent, working, throttled, steady, max(1, processes), listed)

    @staticmethod
    def _write(each: Held, found: Corrections, number: int) -> None:
        each.factor = found.factors[number]
        wanted = (found.factors[number], found.rivals[number])
        if wanted != each.written:
            each.written = wanted
            each.container.hold(each.percent, *wanted)
