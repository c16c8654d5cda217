"""Keeps the use of GPUs by container, worked out again with each sampling round in a thread of its own."""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import anyio
import anyio.to_thread

from agent.holdings.process_owners import Owners
from agent.inventory.snapshot import Snapshot
from agent.kit.tasks import Cell, Courtesy
from agent.model.holding import Growth, Place, Record
from agent.model.modes import Assignment, Mode
from agent.model.pod import Pod
from agent.telemetry.containers import (
    NO_GROWTH,
    NO_PODS,
    Attribution,
    ContainerShare,
    Use,
    attribute,
    by_gpu,
    shares_of,
)
from agent.telemetry.sampler import Samples, Span, TakenSample, Window

Pods = Callable[[], Mapping[str, Pod]]


@dataclass(frozen=True, slots=True)
class ContainerUse:
    """A container's use of one GPU, now and over the window.

    A span covers the readings of the window, None without any; its grade is that of the weakest.
    """

    use: Use
    memory: Span | None
    utilization: Span | None
    memory_grade: Attribution = Attribution.MEASURED
    utilization_grade: Attribution = Attribution.MEASURED
    # The GPU's time that it used since it was first seen: measured alone. None before the first such reading
    # and while the window holds an estimate: a counter that stood still would be the bill of one that idles.
    gpu_seconds: float | None = None


class GpuTotal(NamedTuple):
    """The work of all processes of a GPU in a round, as the driver measured it."""

    ratio: float  # 0..1 of the GPU
    others: bool  # processes of no holder are there, too, or nobody knows


@dataclass(frozen=True, slots=True)
class Uses:
    """The use of all containers, and the memory of each GPU, by UUID, that none of its holders uses."""

    containers: tuple[ContainerUse, ...] = ()
    # Bytes of processes outside pods, and of processes that cannot be attributed; of GPUs whose processes
    # can be read.
    other: Mapping[str, tuple[int, int]] = field(default_factory=lambda: MappingProxyType({}))
    work: Mapping[str, GpuTotal] = field(default_factory=lambda: MappingProxyType({}))


class _Known(NamedTuple):
    """The inputs of shares."""

    holdings: Record | None
    snapshot: Snapshot
    assignment: Assignment
    grown: Mapping[Place, Growth]


class ContainerWatch:
    """Publishes `uses`. Values exist from the moment that the kubelet records a container's devices."""

    def __init__(
        self,
        snapshot: Cell[Snapshot],
        samples: Cell[Samples],
        holdings: Cell[Record | None],
        owners: Owners,
        pods: Pods = lambda: NO_PODS,
        window_seconds: float = 60.0,
        *,
        assignment: Cell[Assignment] | None = None,
        grown: Cell[Mapping[Place, Growth]] | None = None,
        courtesy: Courtesy | None = None,
    ) -> None:
        """`assignment`: for the number of time slices. `grown`: beyond the kubelet's records.

        `courtesy`: to those who wait for this process, between two GPUs.
        """
        self._courtesy = courtesy or Courtesy()
        self._snapshot = snapshot
        self._assignment = assignment or Cell(Assignment())
        self._grown = grown or Cell(NO_GROWTH)
        self._samples = samples
        self._holdings = holdings
        self._owners = owners
        self._pods = pods
        self._window = window_seconds
        self._windows: dict[Place, tuple[_GradedWindow, _GradedWindow]] = {}
        self._seconds: dict[Place, float] = {}
        self._counted: dict[str, float] = {}  # UUID -> when the sample was taken whose work was counted last
        # Device IDs are taken apart only when the records changed: there may be thousands.
        self._read: _Known | None = None
        self._shares: tuple[ContainerShare, ...] = ()
        self.uses: Cell[Uses] = Cell(Uses())

    async def run(self) -> None:
        async for samples in self._samples.values():
            await self.look(samples)

    async def look(self, samples: Samples) -> None:
        holdings = self._holdings.value
        if (holdings is None or not holdings.holdings) and not _anybody(samples):
            # Nobody is there: not worth waking a thread.
            if self.uses.value != Uses():
                self._windows.clear()
                self._seconds.clear()
                self.uses.publish(Uses())
            return
        now, pods = anyio.current_time(), self._pods()
        known = _Known(holdings, self._snapshot.value, self._assignment.value, self._grown.value)
        uses = await anyio.to_thread.run_sync(self._work_out, known, samples, pods, now)
        self.uses.publish(uses)

    def _work_out(self, known: _Known, samples: Samples, pods: Mapping[str, Pod], now: float) -> Uses:
        if self._read is None or any(one is not other for one, other in zip(self._read, known, strict=True)):
            gpus = {state.uuid: state.gpu for state in known.snapshot.gpus}
            modes = known.assignment.gpus
            slices = {uuid: each.replicas for uuid, each in modes.items() if each.mode.row.slices}
            holdings = known.holdings
            self._shares = shares_of(holdings, gpus, slices, known.grown) if holdings else ()
            self._read = known
        # Kubelets before 1.34 list pods that have finished, and hold nothing, too.
        finished = {pod.key for pod in pods.values() if pod.finished}
        shares = by_gpu(share for share in self._shares if share.pod_key not in finished)
        owners = self._owners.of(_pids(samples))
        containers: list[ContainerUse] = []
        other: dict[str, tuple[int, int]] = {}
        worked: dict[str, GpuTotal] = {}
        for uuid in self._courtesy.in_pieces(dict.fromkeys((*shares, *samples.taken))):
            taken: TakenSample | None = samples.taken.get(uuid)
            sample, work = (taken.sample, taken.work) if taken else (None, None)
            found = attribute(shares.get(uuid, []), sample, work, owners, pods)
            if sample and sample.processes is not None:
                other[uuid] = (found.foreign_memory, found.unknown_memory)
            if sample and work is not None:
                # What rounds are shown of each process is spread over time: it does not add up to the GPU.
                rows = [ratio for _, ratio in sample.busy or ()] or work.values()
                worked[uuid] = GpuTotal(min(1.0, sum(rows)), found.others_work)
            elapsed = self._elapsed(uuid, taken) if taken else 0.0
            containers += [self.windowed(use, now, elapsed) for use in found.uses]
        present = {each.use.share.key for each in containers}
        for key in self._windows.keys() - present:
            del self._windows[key]
            self._seconds.pop(key, None)
        self._counted = {uuid: taken.at for uuid, taken in samples.taken.items()}
        return Uses(tuple(containers), other, worked)

    def _elapsed(self, uuid: str, taken: TakenSample) -> float:
        """The seconds that a sample's work stands for here: rounds that came while this was busy included."""
        before = self._counted.get(uuid)
        return taken.seconds if before is None else max(0.0, taken.at - before)

    def windowed(self, use: Use, now: float, elapsed: float = 0.0) -> ContainerUse:
        """The use of a round of so many seconds, with the figures of its window."""
        windows = self._windows.get(use.share.key)
        if windows is None:
            windows = (_GradedWindow(self._window), _GradedWindow(self._window))
            self._windows[use.share.key] = windows
        memory, utilization = windows
        memory.add(use.memory, use.memory_grade, now)
        utilization.add(use.utilization, use.utilization_grade, now)
        if use.utilization_grade is Attribution.MEASURED:
            self._seconds[use.share.key] = self._seconds.get(use.share.key, 0.0) + use.utilization * elapsed
        measured = utilization.grade is Attribution.MEASURED
        seconds = self._seconds.get(use.share.key) if measured else None
        return ContainerUse(use, memory.span, utilization.span, memory.grade, utilization.grade, seconds)


class _GradedWindow:
    """The readings of one figure of a container, and how far they can be trusted."""

    __slots__ = ("_estimates", "_readings")

    def __init__(self, seconds: float) -> None:
        self._readings = Window(seconds)
        self._estimates = Window(seconds)

    def add(self, value: float, grade: Attribution, now: float) -> None:
        """One more round. A GPU that could not be read adds nothing: it is not known to have been idle."""
        self._estimates.forget(now)
        if grade is Attribution.ALLOCATED:
            self._readings.forget(now)
            return
        self._readings.add(value, now)
        if grade is Attribution.ESTIMATED:
            self._estimates.add(value, now)

    @property
    def span(self) -> Span | None:
        return None if self._readings.empty else self._readings.span

    @property
    def grade(self) -> Attribution:
        if self._readings.empty:
            return Attribution.ALLOCATED
        return Attribution.MEASURED if self._estimates.empty else Attribution.ESTIMATED


def above_limit(uses: Uses, mode: Mode) -> Mapping[str, AbstractSet[str]]:
    """Pods (namespace/name) by GPU (UUID) of which a container's processes use more memory than it was given.

    Only figures that the driver reports by process count: an estimate never goes above a limit.
    """
    found: dict[str, set[str]] = {}
    for each in uses.containers:
        use, share = each.use, each.use.share
        if (
            share.mode is mode
            and use.memory_grade is Attribution.MEASURED
            and use.memory > share.memory_limit
        ):
            found.setdefault(share.gpu, set()).add(f"{share.namespace}/{share.pod}")
    return found


def _anybody(samples: Samples) -> bool:
    return any(taken.sample.processes or taken.work for taken in samples.taken.values())


def _pids(samples: Samples) -> Iterable[int]:
    pids: dict[int, None] = {}
    for taken in samples.taken.values():
        pids |= dict.fromkeys(each.pid for each in taken.sample.processes or ())
        pids |= dict.fromkeys(taken.work or ())
    return pids
