"""Asks all GPUs in rounds whether each is there and answers; compares counters with the round before."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agent.inventory.reducer import Probed, Scanned
from agent.inventory.snapshot import Unreadable, boot_seconds
from agent.model.gpu import Driver, Gpu
from agent.model.health import Fault, FaultKind
from agent.nvml.event_watch import WorkerThread
from agent.nvml.port import NvmlCode, NvmlDriverMismatch, NvmlError, NvmlGpuLost, NvmlPort, Probe
from agent.nvml.sweep import HANGS, Sweep

# Identities are read again every so many rounds, or at once when the count changed or a probe failed: it
# costs nothing to learn some seconds late that GPUs have swapped indices, or that MIG was switched.
FULL_EVERY = 5

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


class Prober:
    """The rounds of one NVML session."""

    def __init__(self, nvml: NvmlPort, thread: WorkerThread, driver: Driver) -> None:
        self._nvml = nvml
        self._thread = thread
        self._driver = driver
        self._round = 0
        self._count = -1
        self._present: tuple[Gpu, ...] = ()
        self._unreadable = False
        self._sweep = Sweep[Step, Gpu | Probe](thread, self._ask)
        self._ecc: dict[str, int] = {}

    async def look(self, known: Iterable[str], *, full: bool = False) -> Scanned:
        """One round; `known` are UUIDs of the inventory. Raises NvmlError when NVML itself fails.

        `full`: identities are read in any case.
        """
        count = await self._thread.run(self._nvml.count)
        full = full or count != self._count or self._round % FULL_EVERY == 0 or self._unreadable
        self._round, self._count = self._round + 1, count
        findings = Findings()
        hung = await self._take(range(count) if full else (), findings)
        # An index that hangs is known by the GPU that had it; that one keeps its place.
        kept = [gpu for gpu in self._present if gpu.index in hung]
        mute = {gpu.uuid for gpu in kept}
        strangers = hung - {gpu.index for gpu in kept}
        findings.unreadable.extend(Unreadable(int(index), HANGS) for index in strangers)
        if full:
            self._present = (*findings.gpus, *kept)
        asked = dict.fromkeys((*(gpu.uuid for gpu in self._present), *known))
        hung |= await self._take([uuid for uuid in asked if uuid not in mute], findings)
        probes = tuple(self._judged(uuid, findings, uuid in mute or uuid in hung) for uuid in asked)
        self._unreadable = bool(findings.unreadable or findings.failures or hung)
        return Scanned(self._driver, self._present, tuple(findings.unreadable), probes, boot_seconds())

    async def _take(self, steps: Sequence[Step], findings: Findings) -> set[Step]:
        """Take the steps; answers those that hang."""
        hung = await self._sweep.over(steps, findings.note)
        if findings.fatal is not None:
            raise findings.fatal
        return hung

    def _ask(self, step: Step) -> Gpu | Probe:
        return self._nvml.describe(step) if isinstance(step, int) else self._nvml.probe(step)

    def _judged(self, uuid: str, findings: Findings, mute: bool) -> Probed:
        if mute:
            return Probed(uuid, Fault(FaultKind.HUNG), HANGS)
        if (probe := findings.probes.get(uuid)) is not None:
            return self._passed(uuid, probe)
        error = findings.failures[uuid]
        kind = FaultKind.LOST if isinstance(error, NvmlGpuLost) else FaultKind.PROBE
        return Probed(uuid, Fault(kind), _words(error))

    def _passed(self, uuid: str, probe: Probe) -> Probed:
        before, now = self._ecc.get(uuid), probe.ecc_uncorrected
        if now is not None:
            self._ecc[uuid] = now
        compared = before is not None and now is not None
        return Probed(
            uuid,
            ecc_risen=compared and now > before,  # type: ignore[operator]
            was_reset=compared and now < before,  # type: ignore[operator]
            obstacle=_obstacle(probe),
            remap_failed=bool(probe.remap_failed),
            action=probe.action,
        )


def _words(error: NvmlError) -> str:
    if isinstance(error, NvmlGpuLost):
        return f"the GPU is lost, fell off the bus or was removed ({error})"
    return f"the health probe fails ({error})"


def _obstacle(probe: Probe) -> str:
    if probe.remap_failed:
        return "a row remap failed: the GPU should be replaced"
    if probe.remap_pending:
        return "a row remap waits for a reset of the GPU"
    if probe.retirement_pending:
        return "a page retirement waits for a reset of the GPU"
    return ""
