"""Watching one folder with inotify: a few lines over libc, since no package in use brings it.

See inotify(7). Latency from the change to the event is well under a millisecond.
"""

import ctypes
import os
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio

_CREATE, _DELETE, _MOVED_FROM, _MOVED_TO, _CLOSE_WRITE, _MODIFY = 0x100, 0x200, 0x40, 0x80, 0x8, 0x2
_DELETE_SELF, _MOVE_SELF, _UNMOUNT, _Q_OVERFLOW, _IGNORED, _ONLYDIR = (
    0x400,
    0x800,
    0x2000,
    0x4000,
    0x8000,
    0x01000000,
)
_HEADER = struct.Struct("iIII")


@dataclass(frozen=True, slots=True)
class Change:
    """Something changed. `name` is empty when it is not known what: look at the whole folder."""

    name: str
    appeared: bool


class FolderGone(Exception):
    """The watched folder was removed, moved or unmounted: watch the path again."""


class FolderWatch:
    """An open watch; read it with `changes()`."""

    def __init__(self, descriptor: int, folder: Path) -> None:
        self._descriptor = descriptor
        self._folder = folder

    async def changes(self) -> AsyncGenerator[Change, None]:
        """Changes of the folder's entries, for ever. Raises FolderGone."""
        while True:
            await anyio.wait_readable(self._descriptor)
            try:
                data = os.read(self._descriptor, 65536)
            except BlockingIOError:
                continue
            offset = 0
            while offset < len(data):
                _, mask, _, length = _HEADER.unpack_from(data, offset)
                offset += _HEADER.size
                name = data[offset : offset + length].rstrip(b"\0").decode(errors="surrogateescape")
                offset += length
                if mask & (_DELETE_SELF | _MOVE_SELF | _UNMOUNT | _IGNORED):
                    raise FolderGone(f"{self._folder} was removed or moved")
                if mask & _Q_OVERFLOW:
                    name = ""
                yield Change(name, appeared=not mask & (_DELETE | _MOVED_FROM))


@asynccontextmanager
async def watching(folder: Path, growing: bool = False) -> AsyncIterator[FolderWatch]:
    """Watch the entries of `folder` while the context is open; with `growing` each write to one, too.

    Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"inotify cannot be opened: {os.strerror(number)}")
    mask = _CREATE | _DELETE | _MOVED_FROM | _MOVED_TO | _CLOSE_WRITE | _DELETE_SELF | _MOVE_SELF | _ONLYDIR
    mask |= _MODIFY if growing else 0
    try:
        if libc.inotify_add_watch(descriptor, os.fsencode(folder), mask) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
        yield FolderWatch(descriptor, folder)
    finally:
        anyio.notify_closing(descriptor)
        os.close(descriptor)
