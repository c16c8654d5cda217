"""The agent's part in shares of compute, for containers of the GPU tier: each second it corrects.

It goes by the driver's figures of the processes. Where it runs in another PID namespace than the driver it
finds none of them and corrects nothing: the factors stay 1.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import anyio.to_thread

from agent.nvml.binding import NvmlBinding
from agent.nvml.port import NvmlError, SampleRequest
from agent.vgpu.compute import corrected, rivals
from tests.gpu.limits import Capped

SECONDS = 1.0


@dataclass(eq=False)
class Held:
    """A container that is held to a share, with its processes."""

    container: Capped
    percent: float
    pids: tuple[int, ...] = ()
    factor: float = 1.0
    rivals: float | None = None
    waited_ns: int = 0


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
        working = {each: [busy[pid] * 100 for pid in each.pids if busy.get(pid)] for each in self._held}
        total, everybody = sum(map(sum, working.values())), sum(map(len, working.values()))
        for each in self._held:
            waited = each.container.usage.waited_ns
            percents = [busy[pid] * 100 for pid in each.pids if pid in busy]
            own = working[each]
            others = rivals(sum(own), len(own), total, everybody)
            throttled = waited > each.waited_ns
            each.waited_ns = waited
            factor = each.factor
            if percents:
                factor = corrected(factor, each.percent, sum(percents), throttled=throttled)
            if (factor, others) != (each.factor, each.rivals):
                each.factor, each.rivals = factor, others
                each.container.hold(each.percent, factor, others)
