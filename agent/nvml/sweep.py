"""One blocking question put to many GPUs: on one trip to a worker thread, not on one for each.

A trip costs several turns of the event loop; a node asks its GPUs every second. Should a call hang, what
was answered so far counts, the GPUs behind it are asked on the next trip, and the culprit is left out
until its call has come back.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from agent.nvml.event_watch import WorkerThread
from agent.nvml.port import GpuProcess, NvmlCode, NvmlError, NvmlHung, NvmlPort

S = TypeVar("S")
R = TypeVar("R")

# A trip that took longer ends before its next step, so that other calls get their turn.
TRIP_SECONDS = 0.05

# Words for a step that `Sweep.over` answers as hanging.
HANGS = "NVML calls about this GPU do not return"


class Sweep(Generic[S, R]):
    """Puts `call` to one step after the other, a step being whatever names a GPU."""

    def __init__(self, thread: WorkerThread, call: Callable[[S], R]) -> None:
        self._thread = thread
        self._call = call
        self._hung: dict[S, _Trip[S, R]] = {}

    async def over(self, steps: Sequence[S], note: Callable[[S, R | NvmlError], bool]) -> set[S]:
        """Ask all; answers the steps whose call hangs, now or since an earlier sweep.

        `note` gets each answer or error, in the thread; when it returns False the sweep ends. Raises
        NvmlHung when the worker itself refuses, because too many calls hang in it.
        """
        self._hung = {step: trip for step, trip in self._hung.items() if trip.current == step}
        # Other sweeps may have put as many calls about one as are let hang.
        hung = {step for step in steps if step in self._hung or self._thread.hangs(step)}
        left = tuple(step for step in steps if step not in hung)
        while left:
            trip = _Trip(self._call, left, note)
            try:
                await self._thread.run(trip.run, progress=trip.got_on, about=trip.step)
            except NvmlHung:
                trip.abandoned = True
                if not trip.begun:
                    raise
                culprit = left[trip.begun - 1]
                self._hung[culprit] = trip
                hung.add(culprit)
            left = left[trip.begun :]
        return hung


class _Trip(Generic[S, R]):
    """Steps on their way through the thread. `current` is the one under way, `begun` counts them."""

    def __init__(
        self, call: Callable[[S], R], steps: Sequence[S], note: Callable[[S, R | NvmlError], bool]
    ) -> None:
        self._call = call
        self._steps = steps
        self._note = note
        self.current: S | None = None
        self.begun = 0
        self.abandoned = False
        self._at = time.monotonic()

    def got_on(self) -> float:
        """When the newest step began, on `time.monotonic()`'s clock."""
        return self._at

    def step(self) -> S | None:
        """The step under way."""
        return self.current

    def run(self) -> None:
        """Take the steps; blocks."""
        end = time.monotonic() + TRIP_SECONDS
        try:
            for step in self._steps:
                self._at = time.monotonic()
                if self.begun and self._at > end:
                    return
                self.current = step
                self.begun += 1
                if not self._take(step):
                    return
        finally:
            self.current = None

    def _take(self, step: S) -> bool:
        outcome: R | NvmlError
        try:
            outcome = self._call(step)
        except NvmlError as error:
            outcome = error
        if self.abandoned:
            return False
        if not self._note(step, outcome):
            self.begun = len(self._steps)
            return False
        return True


# The processes on GPUs, asked for at this moment rather than taken from the newest sampling round.

LIST = "nvmlDeviceGetComputeRunningProcesses"


class ProcessSweep:
    """Reads GPU by GPU in NVML's thread."""

    def __init__(self, nvml: NvmlPort, calls: WorkerThread) -> None:
        self._sweep = Sweep[str, tuple[GpuProcess, ...] | None](calls, nvml.processes)

    async def pids(self, uuids: Collection[str]) -> Mapping[str, Collection[int]]:
        """The processes of each GPU, none where it never says; one that cannot be read now is left out."""
        found: dict[str, Collection[int]] = {}

        def note(uuid: str, outcome: tuple[GpuProcess, ...] | NvmlError | None) -> bool:
            if not isinstance(outcome, NvmlError):
                found[uuid] = [each.pid for each in outcome or ()]
            elif (outcome.code, outcome.call) == (NvmlCode.NO_PERMISSION, LIST):
                # As of a GPU in MIG mode where the agent is not privileged. The list of MPS clients is asked
                # for after this one has answered: that it is refused does not say that there are none.
                found[uuid] = ()
            return True

        with suppress(NvmlHung):
            await self._sweep.over(tuple(uuids), note)
        return found
