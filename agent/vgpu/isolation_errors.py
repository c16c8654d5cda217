"""Errors of limits; each text names the object, the cause and the remedy."""

import errno


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
