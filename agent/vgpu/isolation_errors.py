"""Errors of limits, and problems of single containers that are reported once."""

import errno
import time
from collections.abc import Callable, Collection

import structlog

# Errors of limits; each text names the object, the cause and the remedy.


class IsolationError(Exception):
    """The root of this room's errors."""


class LibraryUnusable(IsolationError):
    """The enforcement library cannot be shown to containers of this node."""


class FolderUnusable(IsolationError):
    """The limit folder of a container cannot be made, read or written."""


class AccessRefused(FolderUnusable):
    """A container keeps the agent from one of its files: by a lease, another owner, or by executing it."""


class OtherLayout(FolderUnusable):
    """A limit file is sound, and of a layout of another agent: running containers have a library for it."""


class BadLayout(IsolationError):
    """Bytes that are no limit file or usage region of a layout known here."""


def short_of_space(error: IsolationError) -> bool:
    """Whether a file system was full, which tenants can bring about."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


# Problems of limit folders in the log: when they begin, and not again before they have ended.
#
# A container may begin and end them as it likes: each is logged once a minute at most.

log = structlog.get_logger()

QUIET_SECONDS = 60.0


class Problems:
    """Folders that one reader cannot read now, or one writer not write."""

    def __init__(self, event: str = "usage_unreadable", clock: Callable[[], float] = time.monotonic) -> None:
        self._event = event
        self._clock = clock
        self._open: set[str] = set()
        self._logged: dict[str, float] = {}

    def met(self, key: str, problem: object) -> None:
        """A folder could not be read or written."""
        if key in self._open:
            return
        self._open.add(key)
        now = self._clock()
        if now - self._logged.get(key, float("-inf")) >= QUIET_SECONDS:
            self._logged[key] = now
            log.info(self._event, folder=key, problem=str(problem))

    def over(self, key: str) -> None:
        """It could be."""
        self._open.discard(key)

    def keep(self, keys: Collection[str]) -> None:
        """Forget folders that are gone."""
        self._open.intersection_update(keys)
        self._logged = {key: at for key, at in self._logged.items() if key in keys}
