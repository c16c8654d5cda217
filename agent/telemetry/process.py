"""The agent's own use, from /proc: a few figures in base units."""

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

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
