"""The shared memory of one GPU: a tmpfs that its daemon, its server and its pods have as /dev/shm.

All pods that hold shares of a GPU share it: MPS clients and server find each other there. Its size is bound,
since one pod could take the memory of the node otherwise. All of it blocks.
"""

import ctypes
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from agent.kit import files
from agent.mps.directories import Directories

MODE = 0o1777
ACLS = ("system.posix_acl_access", "system.posix_acl_default")
MNT_DETACH, UMOUNT_NOFOLLOW = 2, 8
MS_REMOUNT = 0x20
# As /dev/shm has everywhere, and no links that the server could be made to follow (since Linux 5.10).
FLAGS = 0x2 | 0x4 | 0x100  # MS_NOSUID, MS_NODEV, MS_NOSYMFOLLOW
# Nobody but daemon, server and agent opens these, by names of their own.
LOG_FLAGS = FLAGS | 0x8  # MS_NOEXEC
LOG_MODE = 0o755
LOG_BYTES = 16 << 20  # an agent empties each log at 4 MiB
LOG_BYTES_KEPT = 1 << 20
MOST_LOGS = 16
# A file takes about a KiB of the kernel's own memory, however small it is.
BYTES_FOR_FILE = 16 << 10


def prepare(folders: Directories, size: int) -> str | None:
    """Have a tmpfs of `size` bytes at the shm folder, where pods see it. What is wrong with it, or None.

    A folder of the run folder takes its place where pods would not see it, and where there is none to be had.
    """
    if folders.shm.is_mount():
        return limit(folders, size)
    problem = _mounted(folders.shm, size, FLAGS, MODE)
    if problem is None:
        return None
    folders.shm.chmod(0o1777)
    return f"{problem}; pods can fill the run folder"


def bound_logs(folder: Path) -> str | None:
    """Have a tmpfs for a daemon's logs, since every client may write there. Why that cannot be, or None.

    Only while no daemon runs. The ends of logs that are there already are taken along.
    """
    if folder.is_mount():
        return None
    problem = _mounted(folder, LOG_BYTES, LOG_FLAGS, LOG_MODE)
    if problem is None:
        unmount(folder)  # it can be had: now the logs that it would hide, and that would take room below it
        kept = _taken_out(folder)
        problem = _mounted(folder, LOG_BYTES, LOG_FLAGS, LOG_MODE)
        _put(folder, kept)
    return f"{problem}; clients can fill the run folder by its logs while no agent runs" if problem else None


def release_logs(folder: Path) -> None:
    """Take that tmpfs away; the ends of the logs stay for diagnosis."""
    if folder.is_mount():
        kept = _taken_out(folder)
        unmount(folder)
        _put(folder, kept)


def _taken_out(folder: Path) -> Mapping[str, bytes]:
    """Empty a folder of logs; their ends, by name."""
    kept: dict[str, bytes] = {}
    with suppress(OSError), files.opened(folder) as descriptor:
        for name in files.names(descriptor, MOST_LOGS):
            with suppress(OSError), (folder / name).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES_KEPT))
                kept[name] = file.read(LOG_BYTES_KEPT)
        files.empty(descriptor)
    return kept


def _put(folder: Path, logs: Mapping[str, bytes]) -> None:
    for name, text in logs.items():
        with suppress(OSError):
            (folder / name).write_bytes(text)


def limit(folders: Directories, size: int) -> str | None:
    """Give a tmpfs that is there another size, in bytes. Why that cannot be, or None."""
    found = os.statvfs(folders.shm)
    if found.f_blocks * found.f_frsize == size // found.f_frsize * found.f_frsize:
        return None
    problem = _mount(folders.shm, size, FLAGS | MS_REMOUNT, MODE)
    return f"its size stays at {found.f_blocks * found.f_frsize} bytes: {problem}" if problem else None


def restore(folder: Path) -> bool:
    """Have everybody get at it again. Whether somebody had closed it: root of any container owns it."""
    with files.opened(folder) as descriptor:
        found = os.fstat(descriptor)
        acls = [name for name in os.listxattr(descriptor) if name in ACLS]
        wrong = stat.S_IMODE(found.st_mode) != MODE or (found.st_uid, found.st_gid) != (0, 0) or bool(acls)
        if wrong:
            for name in acls:
                os.removexattr(descriptor, name)
            os.fchown(descriptor, 0, 0)
            os.fchmod(descriptor, MODE)
    return wrong


def unmount(folder: Path) -> None:
    """Take a mount away, if there is one, even while a pod still holds it."""
    if folder.is_mount():
        ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(folder), MNT_DETACH | UMOUNT_NOFOLLOW)


def private(pid: int, folders: Directories) -> bool:
    """Whether a running daemon has the shm folder as its /dev/shm."""
    try:
        return os.path.samefile(f"/proc/{pid}/root/dev/shm", folders.shm)  # noqa: PTH121
    except OSError:
        return False


def _mounted(folder: Path, size: int, flags: int, mode: int) -> str | None:
    """The problem of a tmpfs that the host is to see, in words; None: there is none."""
    problem = _mount(folder, size, flags, mode)
    if problem is None and not _seen_by_host(folder):
        unmount(folder)
        problem = (
            "a tmpfs mounted here does not reach the host: give the run folder mountPropagation Bidirectional"
        )
    return problem


def _mount(folder: Path, size: int, flags: int, mode: int) -> str | None:
    libc = ctypes.CDLL(None, use_errno=True)
    data = f"mode={mode:o},size={size},nr_inodes={max(1024, size // BYTES_FOR_FILE)}".encode()
    if libc.mount(b"gpu-node-agent", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(flags), data):
        return f"it cannot be mounted with {size} bytes: {os.strerror(ctypes.get_errno())}"
    return None


def _seen_by_host(folder: Path) -> bool:
    """Whether the container runtime sees mounts made here: our namespace is its, or passes them on."""
    try:
        if os.path.samefile("/proc/self/ns/mnt", "/proc/1/ns/mnt"):  # noqa: PTH121
            return True
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:  # noqa: PTH123
            for line in mounts:
                before, _, _ = line.partition(" - ")
                words = before.split()
                if words[4] == str(folder):
                    return any(word.startswith("shared:") for word in words[6:])
    except OSError:
        return False
    return False
