"""Sweeping a GPU's shared memory: what ended containers left there, which nobody would ever remove.

A file is left over once no process has it open or mapped, and nobody lives who could have made it: a process
of a container that has this /dev/shm, began before the file last changed, and has a user that could be its
maker. When a file last changed cannot be forged (st_ctime). All of it blocks.
"""

import os
import stat
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from agent.kit import trees

MOUNTED_AT = "/dev/shm"  # noqa: S108  where containers have it
YOUNG_SECONDS = 60.0  # a file that changed since is left alone; so much may the clock be off, too
BLOCK_BYTES = 512  # of st_blocks, whatever the file system
MOST_FILES = 50_000  # of one look
DEEPEST = 16  # folders deeper than this are left until the GPU's tmpfs goes


@dataclass(frozen=True, slots=True)
class User:
    """A process of a container that has the folder as its /dev/shm."""

    began: float  # seconds since the epoch
    users: frozenset[int]  # real, effective, saved and file system user ID

    def may_have_made(self, file: os.stat_result) -> bool:
        """Whether a file could be this process's, or its children's."""
        owns = file.st_uid == 0 or 0 in self.users or file.st_uid in self.users
        return owns and self.began - YOUNG_SECONDS <= file.st_ctime


@dataclass
class Seen:
    """Who uses a shared memory now; `inodes` are open or mapped."""

    users: list[User] = field(default_factory=list)
    inodes: set[int] = field(default_factory=set)


def sweep(folder: Path, own: Collection[int], unheld: bool, proc: Path) -> tuple[int, int]:
    """Remove what is left over in a folder; how many files, and bytes. Raises OSError.

    `own` are the PIDs of daemon and servers, which live longer than any container. Where no process is seen
    to have the folder, nothing goes unless the GPU is `unheld`: an agent may not see the processes of pods.
    """
    with trees.opened(folder) as descriptor:
        newest = time.time() - YOUNG_SECONDS
        found: list[os.stat_result] = []
        _walk(descriptor, lambda _folder, _name, status: found.append(status), MOST_FILES)
        if all(status.st_ctime > newest for status in found):
            return 0, 0
        seen = look(os.fstat(descriptor).st_dev, own, proc)
        if not seen.users and not unheld:
            return 0, 0
        swept: list[int] = []

        def visit(parent: int, name: str, status: os.stat_result) -> None:
            if status.st_ctime > newest or status.st_ino in seen.inodes:
                return
            if any(user.may_have_made(status) for user in seen.users):
                return
            with suppress(OSError):  # it is gone, or a folder with something in it
                if stat.S_ISDIR(status.st_mode):
                    os.rmdir(name, dir_fd=parent)
                else:
                    os.unlink(name, dir_fd=parent)
                    swept.append(status.st_blocks * BLOCK_BYTES)

        _walk(descriptor, visit, MOST_FILES)
    return len(swept), sum(swept)


def look(device: int, own: Collection[int], proc: Path) -> Seen:
    """Which processes, `own` aside, have a file system as their /dev/shm, and what of it anybody uses."""
    found = Seen()
    number = f"{os.major(device)}:{os.minor(device)}"
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks = os.sysconf("SC_CLK_TCK")
    having: dict[str, bool] = {}  # mount namespaces
    for entry in os.scandir(proc):
        if not entry.name.isdigit():
            continue
        folder = proc / entry.name
        with suppress(OSError):  # it has ended
            namespace = str((folder / "ns" / "mnt").readlink())
            if namespace not in having:
                having[namespace] = _has(folder / "mountinfo", number)
            if not having[namespace]:
                continue
            found.inodes |= _mapped(folder / "maps", device) | _opened(folder / "fd", device)
            if int(entry.name) not in own:
                found.users.append(User(boot + _started(folder / "stat") / ticks, _users(folder / "status")))
    return found


def _has(mountinfo: Path, number: str) -> bool:
    with mountinfo.open(errors="replace") as lines:
        return any((words := line.split())[2] == number and words[4] == MOUNTED_AT for line in lines)


def _mapped(maps: Path, device: int) -> set[int]:
    number = f"{os.major(device):02x}:{os.minor(device):02x}"
    with maps.open(errors="replace") as lines:
        return {
            int(words[4]) for line in lines if len(words := line.split(maxsplit=5)) > 4 and words[3] == number
        }


def _opened(folder: Path, device: int) -> set[int]:
    found = set()
    for link in folder.iterdir():
        with suppress(OSError):
            # Only what claims to be there is looked at: a status of other files may take for ever.
            if f"{MOUNTED_AT}/" in str(link.readlink()) and (status := link.stat()).st_dev == device:
                found.add(status.st_ino)
    return found


def _started(stat_file: Path) -> int:
    """Clock ticks from boot to the begin of a process."""
    return int(stat_file.read_text(errors="replace").rpartition(")")[2].split()[19])


def _users(status: Path) -> frozenset[int]:
    line = next(line for line in status.read_text(errors="replace").splitlines() if line.startswith("Uid:"))
    return frozenset(int(word) for word in line.split()[1:])


def _walk(folder: int, visit: Callable[[int, str, os.stat_result], None], most: int, depth: int = 1) -> int:
    """Call `visit` with all that is in an open folder, contents before their folder, each with its status as
    it was before. Follows no link. How many of `most` entries are left to look at.
    """
    with os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, most)]
    for name in names:
        most -= 1
        with suppress(OSError):  # it is gone, or another thing by now
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode) and depth < DEEPEST:
                inner = os.open(name, trees.FOLDER, dir_fd=folder)
                try:
                    most = _walk(inner, visit, most, depth + 1)
                finally:
                    os.close(inner)
            visit(folder, name, status)
    return max(0, most)
