"""Reads the moving figures of every GPU that answers at a steady pace; scrapes read the last round."""

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import anyio
import structlog

from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.tasks import Cell, Courtesy
from agent.nvml.event_watch import WorkerThread
from agent.nvml.port import NvmlCode, NvmlError, NvmlHung, NvmlPort, Sample, SampleRequest
from agent.nvml.sweep import HANGS, Sweep

# Mean and maximum over a sliding window, in bounded memory.
#
# A scrape every minute sees one reading out of sixty. Not "since the last scrape": two scrapers would then
# take each other's peaks away.

BUCKETS = 12


@dataclass(frozen=True, slots=True)
class Span:
    mean: float
    most: float


class Window:
    """Readings of one figure. It covers `seconds` and up to a twelfth more, since it forgets in steps."""

    __slots__ = ("_buckets", "_closed", "_seconds", "_width")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._width = seconds / BUCKETS
        self._buckets: deque[list[float]] = deque()  # start, sum, count, maximum
        self._closed: tuple[float, float, float] | None = None  # sum, count and maximum of all but the newest

    def add(self, value: float, now: float) -> None:
        """One more reading, at `now` in seconds of any steady clock."""
        self.forget(now)
        buckets = self._buckets
        if not buckets or now - buckets[-1][0] >= self._width:
            buckets.append([now, value, 1, value])
            self._closed = None
            return
        newest = buckets[-1]
        newest[1] += value
        newest[2] += 1
        newest[3] = max(newest[3], value)

    def forget(self, now: float) -> None:
        """Drop the readings that are too old at `now`: for a round without a reading."""
        buckets = self._buckets
        while buckets and buckets[0][0] <= now - self._seconds - self._width:
            buckets.popleft()
            self._closed = None

    @property
    def empty(self) -> bool:
        """Whether no reading lies within the window."""
        return not self._buckets

    @property
    def span(self) -> Span:
        """Mean and maximum. There must have been a reading."""
        if self._closed is None:  # asked for in each round, for figures of all GPUs
            older = list(self._buckets)[:-1]
            most = max((bucket[3] for bucket in older), default=-math.inf)
            self._closed = sum(bucket[1] for bucket in older), sum(bucket[2] for bucket in older), most
        total, count, most = self._closed
        _, newest, more, highest = self._buckets[-1]
        return Span((total + newest) / (count + more), max(most, highest))


# The work of a GPU's processes, round by round, from the samples that the driver keeps of busy ones.
#
# The driver leaves a process out while it is idle, and its samples come at a pace of their own: a round may
# find none of a busy process, and two in the next. So each sample stands for the time since the one before
# it, for one driver period at most, and is paid out over the rounds that follow: what is shown, added up over
# time, is what the driver saw, however its samples and the rounds fall.

NO_WORK: Mapping[int, float] = MappingProxyType({})
# NVIDIA names "between 1 second and 1/6 second, depending on the product", and no call says which.
DRIVER_SECONDS = 1.0
SHORTEST_SECONDS = 1 / 6
# Less than this of a sample is rounding.
NOTHING_SECONDS = 0.001


@dataclass(slots=True)
class _Owed:
    """A process's work that was sampled and not shown yet: `ratio` of the GPU (0..1) for so many seconds."""

    ratio: float = 0.0
    seconds: float = 0.0
    stamp: int | None = None  # of its newest sample, microseconds since 1970
    stood_for: float = 0.0  # seconds
    read: float = 0.0  # when it was read

    def add(self, ratio: float, stamps: tuple[int, ...], now: float) -> None:
        """`ratio` is the mean of the samples with these time stamps, the newest last."""
        covered = 0.0
        for number, stamp in enumerate(stamps):
            part = DRIVER_SECONDS
            gap = part if self.stamp is None else (stamp - self.stamp) / 1e6
            if gap < 0:
                self.seconds = 0.0  # the clock was set back: what is not shown yet is of before
            elif gap < part:
                part = max(gap, SHORTEST_SECONDS)
                # The sample before stood for a longer period than this driver has.
                excess = max(0.0, self.stood_for - gap)
                if number:
                    covered -= excess
                else:
                    self.seconds -= excess
            covered += part
            self.stamp, self.stood_for = stamp, part
        left = self.seconds if self.seconds > NOTHING_SECONDS else 0.0
        self.ratio = (self.ratio * left + ratio * covered) / (left + covered) if left else ratio
        self.seconds, self.read = left + covered, now

    def pay(self, elapsed: float) -> float:
        """The process's share of a round of so many seconds."""
        # It cannot have worked for longer than it took until this round, and a period before.
        owed = min(self.seconds, elapsed + DRIVER_SECONDS)
        paid = min(owed, elapsed)
        self.seconds = owed - paid
        return self.ratio * (paid / elapsed) if paid > NOTHING_SECONDS else 0.0


class ProcessWork:
    """The processes of one GPU."""

    def __init__(self) -> None:
        self._owed: dict[int, _Owed] = {}
        self._at: float | None = None

    def round(self, sample: Sample, now: float, interval: float) -> tuple[Mapping[int, float], float]:
        """Each busy process's share (0..1) of the time since the round before, and that time in seconds.

        All of them together never have more than the GPU. `interval`: the length of the first round.
        """
        elapsed = interval if self._at is None else max(now - self._at, NOTHING_SECONDS)
        self._at = now
        if not sample.busy and not self._owed:
            return NO_WORK, elapsed
        busy = sample.busy or ()
        stamps = sample.busy_us or ((sample.newest_us,),) * len(busy)
        for (pid, ratio), read in zip(busy, stamps, strict=True):
            self._owed.setdefault(pid, _Owed()).add(ratio, read, now)
        self._forget(sample, now, elapsed)
        work = {pid: share for pid, owed in self._owed.items() if (share := owed.pay(elapsed))}
        total = sum(work.values())
        if total > 1.0:  # clients of an MPS server run at once, and each may seem to have the whole GPU
            work = {pid: share / total for pid, share in work.items()}
        return work, elapsed

    def _forget(self, sample: Sample, now: float, elapsed: float) -> None:
        """Drop processes that ended, and those whose last sample is too old to tell the next one's length."""
        busy = {pid for pid, _ in sample.busy or ()}
        alive = None if sample.processes is None else busy | {each.pid for each in sample.processes}
        for pid, owed in list(self._owed.items()):
            ended = alive is not None and pid not in alive
            if ended or (owed.seconds <= NOTHING_SECONDS and now - owed.read > elapsed + DRIVER_SECONDS):
                del self._owed[pid]


log = structlog.get_logger()

NO_SPANS: Mapping[str, Span] = MappingProxyType({})
# How far ahead of the clock the driver's time stamps may be before the clock must have been set back.
CLOCK_SLACK_US = 1_000_000
# Limits and counters are read less often than once a second: nobody scrapes faster.
COUNTERS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class TakenSample:
    """One reading and when it was taken, in seconds of the event loop's clock."""

    sample: Sample
    at: float
    # Over the window, by figure: utilization, memory_used, power, temperature; those that the GPU has.
    spans: Mapping[str, Span] = field(default_factory=lambda: NO_SPANS)
    # 0..1 of the GPU by PID; None: the GPU has no such figures. Processes that are idle are left out.
    work: Mapping[int, float] | None = field(default_factory=lambda: NO_WORK)
    seconds: float = 0.0  # since the reading before, for which `work` stands


@dataclass(frozen=True, slots=True)
class Samples:
    """By UUID: the readings of the last round, GPUs that failed left out; how many failed so far."""

    taken: Mapping[str, TakenSample] = field(default_factory=lambda: MappingProxyType({}))
    failures: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


class Sampler:
    """The task that samples. A GPU that fails loses its own sample and no other."""

    def __init__(
        self,
        nvml: NvmlPort,
        thread: WorkerThread,
        snapshot: Cell[Snapshot],
        interval_seconds: float,
        window_seconds: float = 60.0,
        pcie: bool = False,
        activity: bool = False,
        courtesy: Courtesy | None = None,
    ) -> None:
        """`courtesy`: to those who wait for this process, before it reads and before it publishes."""
        self._courtesy = courtesy or Courtesy()
        self._nvml = nvml
        self._sweep = Sweep[str, Sample](thread, self.sample)
        self._snapshot = snapshot
        self._interval = interval_seconds
        self._window = window_seconds
        self._pcie = pcie
        self._activity = activity
        self._failures: dict[str, int] = {}
        self._problems: dict[str, str] = {}
        self._since: dict[str, int] = {}  # UUID -> microseconds since 1970
        self._counted: dict[str, tuple[float, Sample]] = {}  # UUID -> when to count again, the last counts
        self._windows: dict[tuple[str, str], Window] = {}
        self._work: dict[str, ProcessWork] = {}
        self.samples: Cell[Samples] = Cell(Samples())

    @property
    def fresh_seconds(self) -> float:
        """How old a sample may be before it is worthless: the sampler itself must be held up then."""
        return 5.0 + 3 * self._interval

    def fresh(self) -> Mapping[str, TakenSample]:
        """The readings of the last round that are worth something still, by UUID."""
        oldest = anyio.current_time() - self.fresh_seconds
        return {uuid: taken for uuid, taken in self.samples.value.taken.items() if taken.at >= oldest}

    async def run(self) -> None:
        """Sample for ever. Rounds start at even intervals; one that overran is not made up for."""
        due = anyio.current_time()
        while True:
            await self._round()
            due = max(due + self._interval, anyio.current_time())
            await anyio.sleep_until(due)

    async def _round(self) -> None:
        await self._courtesy.calm()
        snapshot = self._snapshot.value
        asked = [state.uuid for state in snapshot.gpus if _answers(state)] if snapshot.problem is None else []
        found: dict[str, Sample | NvmlError] = {}

        def note(uuid: str, outcome: Sample | NvmlError) -> bool:
            found[uuid] = outcome
            return True

        try:
            hung = await self._sweep.over(asked, note)
        except NvmlHung as error:  # the thread itself refuses
            found = dict.fromkeys(asked, error)
        else:
            found |= {uuid: NvmlHung(NvmlCode.TIMEOUT, "sample", HANGS) for uuid in hung}
        taken = {uuid: sample for uuid in asked if (sample := self.taken(uuid, found[uuid]))}
        await self._courtesy.calm()
        self.samples.publish(Samples(MappingProxyType(taken), MappingProxyType(dict(self._failures))))

    def sample(self, uuid: str) -> Sample:
        """One reading; blocks, for the thread."""
        present = time.time_ns() // 1000
        since = self._since.get(uuid)
        # At first, and once the clock was set back, since when nothing is newer than what was read last.
        if since is None or since > present + CLOCK_SLACK_US:
            # Kept until something newer is found: the next round may be late, and must not begin after it.
            since = self._since[uuid] = present - int(self._interval * 1_000_000)
        until = present + CLOCK_SLACK_US
        now = time.monotonic()
        due, last = self._counted.get(uuid, (now, None))
        if last is None or now >= due:
            sample = self._nvml.sample(uuid, SampleRequest(since, self._pcie, self._activity, until_us=until))
            self._counted[uuid] = (now + COUNTERS_SECONDS, sample)
            return sample
        return replace(
            self._nvml.sample(
                uuid, SampleRequest(since, self._pcie, self._activity, counters=False, until_us=until)
            ),
            power_limit_watts=last.power_limit_watts,
            energy_joules=last.energy_joules,
            ecc_corrected=last.ecc_corrected,
            ecc_uncorrected=last.ecc_uncorrected,
            nvlink=last.nvlink,
        )

    def taken(self, uuid: str, found: Sample | NvmlError) -> TakenSample | None:
        """Take a reading into the windows. An error counts as a failure, and gives None."""
        if isinstance(found, NvmlError):
            self._counted.pop(uuid, None)
            self._failures[uuid] = self._failures.get(uuid, 0) + 1
            self._log_problem(uuid, str(found))
            return None
        self._log_problem(uuid, None)
        now = anyio.current_time()
        return TakenSample(found, now, self._spans(uuid, found, now), *self._held(uuid, found, now))

    def _spans(self, uuid: str, sample: Sample, now: float) -> Mapping[str, Span]:
        figures = {
            "utilization": sample.gpu_utilization_ratio,
            "memory_used": sample.memory_used_bytes if sample.memory_total_bytes else None,
            "power": sample.power_watts,
            "temperature": sample.temperature_celsius,
        }
        spans = {}
        for name, value in figures.items():
            if value is not None:
                window = self._windows.get((uuid, name))
                if window is None:
                    window = self._windows[uuid, name] = Window(self._window)
                window.add(value, now)
                spans[name] = window.span
        return spans

    def _held(self, uuid: str, sample: Sample, now: float) -> tuple[Mapping[int, float] | None, float]:
        """Work of processes, and the seconds that it stands for."""
        if sample.busy is None:
            return None, self._interval
        if sample.newest_us:
            self._since[uuid] = sample.newest_us
        return self._work.setdefault(uuid, ProcessWork()).round(sample, now, self._interval)

    def _log_problem(self, uuid: str, problem: str | None) -> None:
        if problem == self._problems.get(uuid):
            return
        if problem is None:
            del self._problems[uuid]
            log.info("gpu_sampled_again", gpu=uuid)
        else:
            self._problems[uuid] = problem
            log.warning("gpu_not_sampled", gpu=uuid, problem=problem)


def _answers(state: GpuState) -> bool:
    """Whether to ask a GPU: a sick one is of most interest, but one that is away or hangs only costs time."""
    health = state.health
    return state.healthy or not (state.blocked or health.away or health.misses)
