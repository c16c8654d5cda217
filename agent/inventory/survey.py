"""One round over all GPUs in a worker thread: who is there, and whether each still answers.

A round is one trip to the thread, not one for each call. Should a call hang, what was found so far
stays readable, and the next round leaves that GPU out until the call came back.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from agent.inventory.snapshot import Unreadable
from agent.model.gpu import Gpu
from agent.nvml.errors import NvmlCode, NvmlDriverMismatch, NvmlError
from agent.nvml.port import NvmlPort, Probe

Step = int | str  # an enumeration index to describe, or a UUID to probe


@dataclass
class Findings:
    """What a round found. `fatal` ends it: NVML as a whole is not usable."""

    gpus: list[Gpu] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    probes: dict[str, Probe] = field(default_factory=dict)
    failures: dict[str, NvmlError] = field(default_factory=dict)  # by UUID
    fatal: NvmlError | None = None


class Survey:
    """A list of steps on its way through the thread. `current` is the step under way."""

    def __init__(self, nvml: NvmlPort, steps: Iterable[Step], findings: Findings) -> None:
        self._nvml = nvml
        self._steps = tuple(steps)
        self._findings = findings
        self.current: Step | None = None
        self.abandoned = False
        self._at = time.monotonic()

    def got_on(self) -> float:
        """When the newest step began, on `time.monotonic()`'s clock."""
        return self._at

    def rest(self) -> tuple[Step, ...]:
        """The steps behind the one under way."""
        return self._steps[self._steps.index(self.current) + 1 :] if self.current is not None else ()

    def run(self) -> None:
        """Take the steps; blocks. Errors of single GPUs go into the findings."""
        try:
            for step in self._steps:
                self._at = time.monotonic()
                self.current = step
                if not self._take(step):
                    return
        finally:
            self.current = None

    def _take(self, step: Step) -> bool:
        found: Gpu | Probe
        try:
            found = self._nvml.describe(step) if isinstance(step, int) else self._nvml.probe(step)
        except NvmlError as error:
            if not self.abandoned:
                self._note_failure(step, error)
        else:
            if not self.abandoned:
                self._note(step, found)
        return not self.abandoned and self._findings.fatal is None

    def _note(self, step: Step, found: Gpu | Probe) -> None:
        if isinstance(found, Gpu):
            self._findings.gpus.append(found)
        else:
            self._findings.probes[str(step)] = found

    def _note_failure(self, step: Step, error: NvmlError) -> None:
        if isinstance(error, NvmlDriverMismatch) or error.code == NvmlCode.UNINITIALIZED:
            self._findings.fatal = error
        elif isinstance(step, int):
            self._findings.unreadable.append(Unreadable(step, str(error)))
        else:
            self._findings.failures[step] = error
