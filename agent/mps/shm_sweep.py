"""Removes what ended containers left in a GPU's shared memory.

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
from typing import TextIO

from agent.kit import trees
from agent.mps import processes

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
class Usage:
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
        old = False

        def judge(_parent: int, _name: str, status: os.stat_result) -> None:
            nonlocal old
            old = old or status.st_ctime <= newest

        _walk(descriptor, judge, MOST_FILES)
        if not old:
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


def look(device: int, own: Collection[int], proc: Path) -> Usage:
    """Which processes, `own` aside, have a file system as their /dev/shm, and what of it anybody uses."""
    found = Usage()
    number = f"{os.major(device)}:{os.minor(device)}"
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks = os.sysconf("SC_CLK_TCK")
    mounts: dict[str, set[str]] = {}  # IDs of its mounts, by mount namespace that has it as /dev/shm
    having: list[Path] = []
    for folder in processes.folders(proc):
        with suppress(OSError):  # it has ended
            namespace = str((folder / "ns" / "mnt").readlink())
            if namespace not in mounts:
                mounts[namespace] = _mounts(folder / "mountinfo", number)
            if mounts[namespace]:
                having.append(folder)
    every = set().union(*mounts.values())  # a file may have been handed over from another container
    for folder in having:
        with suppress(OSError):  # it has ended
            found.inodes |= _mapped(folder / "maps", device) | _opened(folder, device, every)
            pid = int(folder.name)
            if pid not in own and (process := processes.identify(pid, proc)):
                users = frozenset(processes.user_ids(pid, proc))
                found.users.append(User(boot + process.started / ticks, users))
    return found


def _lines(file: Path) -> TextIO:
    """A file of /proc: the kernel keeps line feeds out of names, but no other end of a line."""
    return file.open(errors="replace", newline="\n")


def _mounts(mountinfo: Path, number: str) -> set[str]:
    """IDs of the mounts of a file system, if one of them is /dev/shm."""
    with _lines(mountinfo) as lines:
        found = {words[0]: words[4] for line in lines if (words := line.split())[2] == number}
    return set(found) if MOUNTED_AT in found.values() else set()


def _mapped(maps: Path, device: int) -> set[int]:
    number = f"{os.major(device):02x}:{os.minor(device):02x}"
    with _lines(maps) as lines:
        return {
            int(words[4]) for line in lines if len(words := line.split(maxsplit=5)) > 4 and words[3] == number
        }


def _opened(process: Path, device: int, mounts: Collection[str]) -> set[int]:
    found = set()
    for link in (process / "fd").iterdir():
        with suppress(OSError):
            if f"{MOUNTED_AT}/" not in str(link.readlink()):
                continue
            # A tenant's NFS or FUSE may have a folder of that name, and its status may take for ever.
            if _mount(process / "fdinfo" / link.name) in mounts and (status := link.stat()).st_dev == device:
                found.add(status.st_ino)
    return found


def _mount(fdinfo: Path) -> str:
    """The ID of the mount that an open file is on; empty: the kernel does not say."""
    with _lines(fdinfo) as lines:
        return next((line.split()[1] for line in lines if line.startswith("mnt_id:")), "")


def _walk(folder: int, visit: Callable[[int, str, os.stat_result], None], most: int, depth: int = 1) -> int:
    """Call `visit` with all that is in an open folder, contents before their folder, each with its status as
    it was before. Follows no link. How many of `most` entries are left to look at.
    """
    with os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, most)]
    most -= len(names)  # before the folders in it: no more names are held at one time
    for name in names:
        with suppress(OSError):  # it is gone, or another thing by now
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode) and depth < DEEPEST:
                inner = os.open(name, trees.FOLDER, dir_fd=folder)
                try:
                    most = _walk(inner, visit, most, depth + 1)
                finally:
                    os.close(inner)
            visit(folder, name, status)
    return most
