"""The work of processes on GPUs, and the agent's own use."""

import os
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from agent.nvml.port import Sample

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


# The agent's own use, from /proc: a few figures in base units.

PROC_SELF = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class ProcessUse:
    resident_bytes: int
    cpu_seconds: float
    threads: int
    open_fds: int
    start_time: float  # seconds since 1970


def read_process_use(proc: Path = PROC_SELF) -> ProcessUse:
    """Read the figures of this process, see proc(5). Blocks a little: call it off the loop."""
    stat = (proc / "stat").read_text(encoding="utf-8", errors="replace")
    # The second field is the program's name in brackets and may hold blanks: count from behind it.
    fields = stat.rpartition(")")[2].split()
    threads, started_ticks, resident_pages = int(fields[17]), int(fields[19]), int(fields[21])
    usage = resource.getrusage(resource.RUSAGE_SELF)
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
    return ProcessUse(
        resident_bytes=resident_pages * os.sysconf("SC_PAGE_SIZE"),
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        threads=threads,
        open_fds=sum(1 for _ in (proc / "fd").iterdir()),
        start_time=time.time() - age,
    )
