"""Descriptors of the files that containers can open, kept from before a container starts until it is gone.

The owner of a file may take a lease on it (fcntl(2), F_SETLEASE), and root of a container is theirs. A
lease has the opens of others wait, or fail where they do not wait. The kernel grants none on a file that
somebody else has open for writing, and no write lease on one that somebody else has open at all. What is open
for writing is not executed either. So the agent opens each file once, before its container can, and works by
that descriptor. All of it blocks, `get` for an instant.
"""

import errno
import os
import stat
import threading
from collections.abc import Collection
from contextlib import suppress

# Threads that wait for leases which containers took while no agent was there. The kernel ends such a wait
# after /proc/sys/fs/lease-break-time, and who asks without waiting can be kept from a file for ever.
MOST_WAITING = 16
# Answers to an open of a file that was the agent's to open before its container had it.
REFUSALS = (errno.EWOULDBLOCK, errno.EACCES, errno.EPERM, errno.ETXTBSY)
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class Leased(BlockingIOError):
    """A container has a lease on a file: it is being waited for."""


class HeldFiles:
    """Files by the folder or library that they belong to, and their names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, dict[str, int]] = {}
        self._waiting: set[tuple[str, str]] = set()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all."""
        for key in self.keys():
            self.drop(key)

    def keys(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._files)

    def has(self, key: str, names: Collection[str]) -> bool:
        """Whether all these are open."""
        with self._lock:
            return self._files.get(key, {}).keys() >= set(names)

    def get(self, key: str, name: str, folder: int, flags: int, mode: int | None = None) -> int:
        """A descriptor of a regular file in an open folder, to be closed by the caller.

        `mode`: what the file has where nobody has changed that. Raises OSError, Leased among them.
        """
        with self._lock:
            if (known := self._files.get(key, {}).get(name)) is not None:
                return os.dup(known)
        try:
            descriptor = opened(folder, name, flags, mode)
        except BlockingIOError as error:
            self._wait(key, name, folder, flags)
            raise Leased(error.errno, "a process of its container has a lease on it") from error
        return self._adopt(key, name, folder, descriptor)

    def drop(self, key: str) -> None:
        """Let go of all files of a folder or library."""
        with self._lock:
            gone = self._files.pop(key, {})
        for each in gone.values():
            os.close(each)

    def _adopt(self, key: str, name: str, folder: int, descriptor: int) -> int:
        """Keep a descriptor unless there is one by now, or the folder has gone; the caller's copy of it."""
        try:
            with self._lock:
                known = self._files.get(key, {}).get(name)
                if known is None and os.fstat(folder).st_nlink:
                    self._files.setdefault(key, {})[name] = os.dup(descriptor)
                return os.dup(descriptor if known is None else known)
        finally:
            os.close(descriptor)

    def _wait(self, key: str, name: str, folder: int, flags: int) -> None:
        with self._lock:
            if (key, name) in self._waiting or len(self._waiting) >= MOST_WAITING:
                return
            inner = os.dup(folder)
            self._waiting.add((key, name))
        # No thread of the loop's: an agent that stops waits for those.
        thread = threading.Thread(target=self._waited, args=(key, name, inner, flags), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process may have no further one now: it is asked for again
            self._over(key, name, inner)

    def _waited(self, key: str, name: str, folder: int, flags: int) -> None:
        try:
            with suppress(OSError):
                os.close(
                    self._adopt(key, name, folder, regular(os.open(name, flags | _FLAGS, dir_fd=folder)))
                )
        finally:
            self._over(key, name, folder)

    def _over(self, key: str, name: str, folder: int) -> None:
        os.close(folder)
        with self._lock:
            self._waiting.discard((key, name))


def opened(folder: int, name: str, flags: int, mode: int | None = None) -> int:
    """A descriptor of a regular file, without a wait. Raises OSError for whatever else has that name."""
    flags |= _FLAGS | os.O_NONBLOCK
    try:
        return regular(os.open(name, flags, dir_fd=folder))
    except PermissionError:
        # Root of a container is the owner of its region, too, and may have closed it to an agent without
        # capabilities. In these folders nobody else puts another file, or a link, in its place.
        if mode is None:
            raise
        os.chmod(name, mode, dir_fd=folder)
        return regular(os.open(name, flags, dir_fd=folder))


def regular(descriptor: int) -> int:
    """The descriptor, if it is of a regular file. Raises OSError."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is no regular file")
    return descriptor
