"""Whether a process has the enforcement library: by its memory map, or by its entry in the usage region.

The map is the kernel's word, but takes the right to trace the process, which an agent without privilege has
not. The entry is the container's word, and so a hint: a container may forge it, one with another C library
does not.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from agent.kit import bounded

LONGEST_MAPS = 8 << 20
LONGEST_STATUS = 64 << 10
# Looks in a row without an entry: a process is on the GPU a moment before it has one.
LOOKS = 3


@dataclass(frozen=True, slots=True)
class Entries:
    """The processes that have entered themselves in a usage region: PIDs of theirs, and start times."""

    processes: frozenset[tuple[int, int]] = frozenset()
    whole: bool = True  # False: some share an entry, and are not named


@dataclass(slots=True)
class Looks:
    """Findings on the processes of a container."""

    loaded: dict[int, bool] = field(default_factory=dict)
    without: dict[int, int] = field(default_factory=dict)  # looks in a row that found no entry

    def keep(self, pids: Collection[int]) -> None:
        """Forget other processes than these."""
        self.loaded = {pid: each for pid, each in self.loaded.items() if pid in pids}
        self.without = {pid: each for pid, each in self.without.items() if pid in pids}

    def entered(self, pid: int, entries: Entries | None, proc: Path) -> None:
        """Take in whether a process, whose map cannot be read, has an entry. Blocks."""
        process = process_of(pid, proc)
        if process is None or entries is None:
            return
        own, start = process
        if (own, start) in entries.processes or (own, 0) in entries.processes:  # 0: it did not see /proc
            self.loaded[pid] = True
        elif entries.whole:
            self.without[pid] = self.without.get(pid, 0) + 1
            if self.without[pid] >= LOOKS:
                self.loaded[pid] = False


def loads(pid: int, library: Path, proc: Path, seconds: float = bounded.SECONDS) -> bool | None:
    """Whether a process has loaded the library; None: nothing is said. Blocks.

    A file that is mapped as data is not loaded: its code has to be executable. It is known by its name and
    inode: what a container mounts or copies under that name has another.
    Raises OSError: its map cannot be read, though it is there, or not in so many seconds.
    """
    try:
        inode = str(library.stat().st_ino)
    except OSError:
        return None
    try:
        text = bounded.read(proc / str(pid), "maps", LONGEST_MAPS, seconds)
    except (FileNotFoundError, ProcessLookupError):
        return None
    name = os.fsencode(library.name)
    for line in text.split(b"\n"):
        # By proc(5) a line has six fields: the second one is its rights, the last two are inode and path.
        fields = line.split(None, 5)
        found = len(fields) == 6 and fields[4] == inode.encode() and fields[5].endswith(b"/" + name)
        if found and b"x" in fields[1]:
            return True
    # It may stand beyond what was read, and a process that is ending has no memory left: nothing is said.
    return None if not text or len(text) == LONGEST_MAPS else False


def process_of(pid: int, proc: Path) -> tuple[int, int] | None:
    """The PID of a process in its own namespace, and its start time; None: nothing is said. Blocks."""
    try:
        return bounded.call(("process", pid), partial(_process_of, pid, proc))
    except bounded.Late:
        return None


def _process_of(pid: int, proc: Path) -> tuple[int, int] | None:
    try:
        with (proc / str(pid) / "status").open("rb") as file:
            status = file.read(LONGEST_STATUS)
        with (proc / str(pid) / "stat").open("rb") as file:
            stat = file.read(LONGEST_STATUS)
    except OSError:
        return None
    numbers = next((line.split() for line in status.split(b"\n") if line.startswith(b"NSpid:")), [])
    # Field 22 of all, by proc(5); the second one is a name that may hold anything.
    fields = stat.rpartition(b")")[2].split()
    if len(numbers) < 2 or len(fields) < 20:
        return None
    return int(numbers[-1]), int(fields[19])
