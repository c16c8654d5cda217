"""Removes what ended containers left in a GPU's shared memory.

A file is left over once no process has it open or mapped, and nobody lives who could have made it: a process
of a container that has this /dev/shm, began before the file last changed, and has a user that could be its
maker. When a file last changed cannot be forged (st_ctime). All of it blocks.
"""

import ctypes
import math
import os
import platform
import re
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cmp_to_key, partial
from itertools import islice
from pathlib import Path

from agent.kit import bounded
from agent.kit import files as trees
from agent.model.cgroup import container_of
from agent.mps import processes

PROC = Path("/proc")

MOUNTED_AT = "/dev/shm"  # noqa: S108  where containers have it
YOUNG_SECONDS = 60.0  # a file that changed since is left alone; so much may the clock be off, too
BLOCK_BYTES = 512  # of st_blocks, whatever the file system
MOST_FILES = 50_000  # of one look
# For each container: a process with more of either harms its own container alone.
MOST_ENTRIES, MOST_SECONDS = 50_000, 1.0
MAPPINGS_FOR_ENTRY = 8  # reading a mapping takes so much less than a descriptor
ALL_SECONDS = 5.0  # of one look
WAITED_SECONDS = 0.5  # for what the kernel shows of a process at once, unless the process keeps it from that
MOST_BYTES = 16 << 20  # of a file of /proc: 100,000 mounts or mappings
MOST_NAMED = 3
_KCMP, _KCMP_FILES = {"x86_64": 312, "aarch64": 272}, 2
DEEPEST = 16  # folders deeper than this are left until the GPU's tmpfs goes


class Exhausted(Exception):
    """The look at who uses a shared memory took too long; nothing of it is known then."""


@dataclass(frozen=True, slots=True)
class ShmProcess:
    """A process of a container that has the folder as its /dev/shm."""

    began: float  # seconds since the epoch
    users: frozenset[int]  # real, effective, saved and file system user ID


@dataclass
class ShmUse:
    """Who uses a shared memory now; `inodes` are open or mapped."""

    users: list[ShmProcess] = field(default_factory=list)
    inodes: set[int] = field(default_factory=set)
    cut_short: set[str] = field(default_factory=set)  # containers of which not all descriptors were looked at

    def may_have_made(self) -> Callable[[os.stat_result], bool]:
        """Whether a file could be one of these processes', or their children's."""
        # There may be thousands of processes, and of files: each file is compared with its user's oldest.
        first: dict[int, float] = {}
        for each in self.users:
            for user in each.users:
                first[user] = min(first.get(user, math.inf), each.began)
        eldest, root = min(first.values(), default=math.inf), first.get(0, math.inf)

        def judge(file: os.stat_result) -> bool:
            began = eldest if file.st_uid == 0 else min(root, first.get(file.st_uid, math.inf))
            return began - YOUNG_SECONDS <= file.st_ctime

        return judge


@dataclass(frozen=True, slots=True)
class Swept:
    files: int = 0
    bytes: int = 0
    problem: str | None = None  # what was not looked at, in words


def sweep(folder: Path, own: Collection[int], unheld: bool, proc: Path) -> Swept:
    """Remove what is left over in a folder. Raises OSError.

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
            return Swept()
        try:
            seen = look(os.fstat(descriptor).st_dev, own, proc)
        except Exhausted as error:
            return Swept(problem=str(error))
        problem = None
        if seen.cut_short:
            named = ", ".join(sorted(seen.cut_short)[:MOST_NAMED])
            problem = (
                f"not all descriptors of {named} were looked at, more than {MOST_ENTRIES} or "
                f"{MOST_SECONDS:g} s of them: a file of others that one has "
                "open may be removed, and stays usable to it"
            )
        if not seen.users and not unheld:
            return Swept(problem=problem)
        made = seen.may_have_made()
        swept: list[int] = []

        def visit(parent: int, name: str, status: os.stat_result) -> None:
            if status.st_ctime > newest or status.st_ino in seen.inodes:
                return
            if made(status):
                return
            with suppress(OSError):  # it is gone, or a folder with something in it
                if stat.S_ISDIR(status.st_mode):
                    os.rmdir(name, dir_fd=parent)
                else:
                    os.unlink(name, dir_fd=parent)
                    swept.append(status.st_blocks * BLOCK_BYTES)

        _walk(descriptor, visit, MOST_FILES)
    return Swept(len(swept), sum(swept), problem)


@dataclass
class _Share:
    """The most that looking at one container may cost: descriptors, mappings and seconds."""

    entries: int
    seconds: float

    @property
    def used_up(self) -> bool:
        return self.entries <= 0 or self.seconds <= 0


def look(device: int, own: Collection[int], proc: Path) -> ShmUse:
    """Which processes, `own` aside, have a file system as their /dev/shm, and what of it anybody uses.

    One that opens thousands of files uses up the share of its own container and no other's. Raises Exhausted
    where all together take too long.
    """
    found = ShmUse()
    until = time.monotonic() + ALL_SECONDS
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks = os.sysconf("SC_CLK_TCK")
    having, mounts = _having(device, proc, until, found.cut_short)
    shares: dict[str, _Share] = defaultdict(lambda: _Share(MOST_ENTRIES, MOST_SECONDS))
    tables = {folder for group in _tables(list(having), proc, until) for folder in group[:1]}
    for folder, container in having.items():
        began = _checked(until)
        share = shares[container]
        try:
            process = bounded.call(("user", folder.name), partial(_user, folder), WAITED_SECONDS)
            if process and int(folder.name) not in own:
                found.users.append(ShmProcess(boot + process[0] / ticks, process[1]))
            if folder in tables and not share.used_up:
                add = partial(_add_opened, found.inodes, folder, device, mounts, share)
                bounded.call(str(folder / "fd"), add, share.seconds + WAITED_SECONDS)
            if not share.used_up:
                _add_mapped(found.inodes, folder, device, share, until)
        except bounded.Late as late:
            _only_again(late, container)
            share.entries = 0
        except OSError:
            pass  # it has ended
        share.seconds -= time.monotonic() - began
    found.cut_short |= {container for container, share in shares.items() if share.used_up}
    return found


def _user(process: Path) -> tuple[int, frozenset[int]] | None:
    """When a process began, in ticks, and its users; None: it has ended. Raises OSError."""
    pid, proc = int(process.name), process.parent
    found = processes.identify(pid, proc)
    return (found.started, frozenset(processes.user_ids(pid, proc))) if found else None


def _only_again(late: bounded.Late, container: str) -> None:
    """Raises Exhausted, unless a process has been keeping its readers waiting since an earlier look.

    Then it does so on purpose, at the cost of its own container; before, the machine may be busy.
    """
    if not late.again:
        raise Exhausted(
            f"a process of {container} does not show in time what it uses of the shared memory: what ended "
            "containers left stays until the next look"
        )


def _checked(until: float) -> float:
    """The time. Raises Exhausted."""
    now = time.monotonic()
    if now > until:
        raise Exhausted(
            f"who uses the shared memory was not found out within {ALL_SECONDS:g} s, since there are so many "
            "processes: what ended containers left stays"
        )
    return now


def _having(
    device: int, proc: Path, until: float, unseen: set[str]
) -> tuple[dict[Path, str], frozenset[bytes]]:
    """Processes that have the file system as their /dev/shm, with their containers; IDs of its mounts.

    Containers of those that do not show it are added to `unseen`. Raises Exhausted.
    """
    mounts: dict[str, frozenset[bytes]] = {}  # by mount namespace that has it as /dev/shm
    having: dict[Path, str] = {}
    for folder in list(processes.folders(proc)):
        _checked(until)
        with suppress(OSError):  # it has ended
            link = folder / "ns" / "mnt"
            try:
                namespace = str(bounded.call(str(link), link.readlink, WAITED_SECONDS))
            except bounded.Late as late:
                unseen.add(container := _container(folder, f"process {folder.name}"))
                _only_again(late, container)
                continue
            if namespace not in mounts:
                mounts[namespace] = _mounts(folder / "mountinfo", device)
            if mounts[namespace]:
                having[folder] = _container(folder, namespace)
    return having, frozenset().union(*mounts.values())  # a file may have been handed over from another


def _container(folder: Path, namespace: str) -> str:
    """By its cgroup, since any process may make itself a mount namespace."""
    try:
        found = container_of(processes.cgroups_of(folder))
    except OSError:
        found = None
    return f"container {found.container_id} of pod {found.pod_uid}" if found else f"processes in {namespace}"


def _tables(having: list[Path], proc: Path, until: float) -> list[list[Path]]:
    """The processes in groups that share a descriptor table, as children of clone(2) with CLONE_FILES do.

    Each for itself where that is not to be had. Raises Exhausted.
    """
    number = _KCMP.get(platform.machine())
    if number is not None and os.path.samestat(proc.stat(), PROC.stat()):
        with suppress(bounded.Late):
            return bounded.call("kcmp", partial(_by_table, having, number, until), ALL_SECONDS / 4)
    return [[each] for each in having]


def _by_table(having: list[Path], number: int, until: float) -> list[list[Path]]:
    """By kcmp(2), which may wait for a process that does not let go of its memory. Raises Exhausted."""
    libc = ctypes.CDLL(None, use_errno=True)

    def compare(one: Path, other: Path) -> int:
        _checked(until)
        found: int = libc.syscall(number, int(one.name), int(other.name), _KCMP_FILES, 0, 0)
        return {0: 0, 1: -1}.get(found, 1)  # where the kernel does not say, they are two

    groups: list[list[Path]] = []
    for each in sorted(having, key=cmp_to_key(compare)):
        if groups and compare(groups[-1][0], each) == 0:
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def _mounts(mountinfo: Path, device: int) -> frozenset[bytes]:
    """IDs of the mounts of a file system, if one of them is /dev/shm."""
    # The kernel keeps line feeds out of names, but no other end of a line.
    text = bounded.read_bytes(mountinfo, MOST_BYTES)
    number = f"{os.major(device)}:{os.minor(device)}".encode()
    found = re.findall(rb"^(\d+) \d+ " + number + rb" [^ \n]+ ([^ \n]+) ", text, re.MULTILINE)
    at = os.fsencode(MOUNTED_AT)
    return frozenset(mount for mount, _ in found) if any(where == at for _, where in found) else frozenset()


def _add_mapped(found: set[int], process: Path, device: int, share: _Share, until: float) -> None:
    number = f"{os.major(device):02x}:{os.minor(device):02x}".encode()
    seconds = min(share.seconds, until - time.monotonic(), bounded.SECONDS)
    text = bounded.read(process, "maps", MOST_BYTES, seconds)
    share.entries -= text.count(b"\n") // MAPPINGS_FOR_ENTRY
    fields = rb"^\S+ \S+ \S+ " + number + rb" (\d+)"
    found.update(int(inode) for inode in re.findall(fields, text, re.MULTILINE))


def _add_opened(
    found: set[int], process: Path, device: int, mounts: Collection[bytes], share: _Share
) -> None:
    """Add what a process has open, as far as its container's share goes."""
    until = time.monotonic() + share.seconds
    seen: set[str] = set()  # one name, open a thousand times
    top = str(process)
    with os.scandir(process / "fd") as links:
        for link in islice(links, share.entries):
            share.entries -= 1
            if time.monotonic() > until:
                share.entries = 0
                return
            with suppress(OSError):
                name = os.readlink(link.path)  # noqa: PTH115  thousands of them
                if f"{MOUNTED_AT}/" not in name or name in seen:
                    continue
                info = bounded.read_bytes(Path(top, "fdinfo", link.name), MOST_BYTES)
                # A tenant's NFS or FUSE may have a folder of that name, and its status may never come.
                mount = re.search(rb"^mnt_id:\s*(\d+)", info, re.MULTILINE)
                if mount and mount[1] in mounts and (status := link.stat()).st_dev == device:
                    found.add(status.st_ino)
                    if status.st_nlink:  # of those that have no name any more, several had the same
                        seen.add(name)


def _walk(folder: int, visit: Callable[[int, str, os.stat_result], None], most: int, depth: int = 1) -> int:
    """Call `visit` with all that is in an open folder, contents before their folder, each with its status as
    it was before. Follows no link. How many of `most` entries are left to look at.
    """
    with os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, most)]
    most -= len(names)  # before the folders in it: so the names held at one time are bounded
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
