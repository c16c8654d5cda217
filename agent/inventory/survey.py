"""What a round over all GPUs found: who is there, and whether each still answers."""

from dataclasses import dataclass, field

from agent.inventory.snapshot import Unreadable
from agent.model.gpu import Gpu
from agent.nvml.errors import NvmlCode, NvmlDriverMismatch, NvmlError
from agent.nvml.port import Probe

Step = int | str  # an enumeration index to describe, or a UUID to probe


@dataclass
class Findings:
    """Errors of single GPUs are findings, too. `fatal` ends the round: NVML as a whole is not usable."""

    gpus: list[Gpu] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    probes: dict[str, Probe] = field(default_factory=dict)
    failures: dict[str, NvmlError] = field(default_factory=dict)  # by UUID
    fatal: NvmlError | None = None

    def note(self, step: Step, outcome: Gpu | Probe | NvmlError) -> bool:
        """Keep what one step came to; whether the round goes on."""
        if isinstance(outcome, NvmlError):
            self._note_failure(step, outcome)
        elif isinstance(outcome, Gpu):
            self.gpus.append(outcome)
        else:
            self.probes[str(step)] = outcome
        return self.fatal is None

    def _note_failure(self, step: Step, error: NvmlError) -> None:
        if isinstance(error, NvmlDriverMismatch) or error.code == NvmlCode.UNINITIALIZED:
            self.fatal = error
        elif isinstance(step, int):
            self.unreadable.append(Unreadable(step, str(error)))
        else:
            self.failures[step] = error
