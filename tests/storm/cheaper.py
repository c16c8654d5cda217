"""Stand-ins that change nothing of what is seen in a storm, only what a step costs.

No file of a storm outlives it, so nothing is forced onto a disk. Closing an inotify descriptor waits for
milliseconds in the kernel, so descriptors are used again. The plugin manager's look through its folder each
second, and the table of NVML faults at each call, are passed over where nothing has changed. Files may lie
where programs cannot be run: nobody runs any.
"""

import ctypes
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio

from agent.app import reload
from agent.isolation import library
from agent.kit import inotify
from agent.kubelet import endpoint
from agent.modes import sources
from agent.mps import following
from agent.simulator.faults import FaultTable
from agent.simulator.kubelet import registry

_LIBC = ctypes.CDLL(None, use_errno=True)
_ENTRIES = inotify._CREATE | inotify._DELETE | inotify._MOVED_FROM | inotify._MOVED_TO | inotify._CLOSE_WRITE
_WATCHED = _ENTRIES | inotify._DELETE_SELF | inotify._MOVE_SELF | inotify._ONLYDIR
_idle: list[int] = []


@asynccontextmanager
async def _watching(folder: Path, growing: bool = False) -> AsyncIterator[inotify.FolderWatch]:
    """`inotify.watching` over a descriptor that was used before. Raises OSError."""
    descriptor: int = _idle.pop() if _idle else _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    mask = _WATCHED | (inotify._MODIFY if growing else 0)
    watch = _LIBC.inotify_add_watch(descriptor, os.fsencode(folder), mask)
    if watch < 0:
        number = ctypes.get_errno()
        _idle.append(descriptor)
        raise OSError(number, os.strerror(number), str(folder))
    try:
        yield inotify.FolderWatch(descriptor, folder)
    finally:
        anyio.notify_closing(descriptor)
        _LIBC.inotify_rm_watch(descriptor, watch)  # fails where the folder is gone, and the watch with it
        with suppress(BlockingIOError):
            while os.read(descriptor, 65536):
                pass
        _idle.append(descriptor)


def kept() -> int:
    """Descriptors that are kept to be used again."""
    return len(_idle)


_sockets = registry._sockets
_seen: dict[Path, tuple[tuple[int, int], list[tuple[Path, tuple[int, int]]]]] = {}


def _sockets_if_changed(folder: Path) -> Iterator[tuple[Path, tuple[int, int]]]:
    """Every socket that comes or goes changes its folder's time; the agent makes no folders there."""
    status = folder.stat()
    now = status.st_ino, status.st_mtime_ns
    known = _seen.get(folder)
    if known is None or known[0] != now:
        _seen.clear()
        known = _seen[folder] = now, list(_sockets(folder))
    yield from known[1]


_strike = FaultTable.strike


class NvmlFaults:
    """Whether any fault of NVML calls may stand."""

    standing = False


def _strike_if_any(self: FaultTable, call: int, slot: int) -> int:
    return _strike(self, call, slot) if NvmlFaults.standing else 0


def install() -> None:
    """Put them in place, for this process."""
    for name in ("fsync", "fdatasync"):
        setattr(os, name, lambda _: None)
    for room in (inotify, endpoint, following, reload, sources):
        room.watching = _watching  # type: ignore[attr-defined]
    registry._sockets = _sockets_if_changed
    library._check_executable = lambda folder, descriptor: None  # noqa: ARG005
    FaultTable.strike = _strike_if_any  # type: ignore[method-assign]
