"""Emptying folders that somebody hostile may write to at the same moment.

No path is walked: a folder is a descriptor, and what is in it is named by one component that is never
followed (openat(2) with O_NOFOLLOW, unlinkat(2), renameat(2)). Depth costs nothing: a folder inside a folder
is moved up before its own content is looked at, so three descriptors are open at most, and nothing recurses.
"""

import errno
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
SECONDS = 10.0  # some hundred thousand files
_AT_ONCE = 1000  # names held in memory
_NO_FOLDER = (errno.ENOTDIR, errno.ELOOP, errno.ENOENT)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a folder while the context is open. Raises OSError, also where it is a link."""
    descriptor = os.open(path, FOLDER)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def empty(folder: int, seconds: float = SECONDS) -> None:
    """Remove all that is in an open folder. Blocks. Raises OSError.

    TimeoutError, an OSError, says that it was not done within `seconds`: somebody fills it meanwhile.
    """
    until = time.monotonic() + seconds
    while found := names(folder, _AT_ONCE):
        for name in found:
            _remove(folder, name)
            _check(until)


def remove(folder: int, name: str, seconds: float = SECONDS) -> None:
    """Remove one entry of an open folder, with all that is in it. Blocks. Raises OSError as `empty` does."""
    until = time.monotonic() + seconds
    while not _unlinked(folder, name):
        _check(until)
        try:
            inner = os.open(name, FOLDER, dir_fd=folder)
        except OSError as error:
            if error.errno in _NO_FOLDER:
                continue
            raise
        try:
            empty(inner, until - time.monotonic())
        finally:
            os.close(inner)
        _rmdir(folder, name)


@contextmanager
def replacing(folder: int, name: str) -> Iterator[str]:
    """A name in an open folder for a new file, which takes the place of `name` as the context ends well."""
    scratch = f".{secrets.token_hex(8)}"
    try:
        yield scratch
        os.rename(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(scratch, dir_fd=folder)
        raise


def _check(until: float) -> None:
    if time.monotonic() > until:
        raise TimeoutError(errno.ETIMEDOUT, "it could not be emptied in time: somebody fills it meanwhile")


def names(folder: int, most: int | None = None) -> list[str]:
    """The content of an open folder, `most` entries of it. Blocks. Raises OSError."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in islice(entries, most)]


def _remove(folder: int, name: str) -> None:
    """Remove what can be removed of one entry now; what is left, or came back, stays for the next look."""
    if _unlinked(folder, name):
        return
    try:
        inner = os.open(name, FOLDER, dir_fd=folder)
    except OSError as error:
        if error.errno in _NO_FOLDER:
            return  # it is another thing by now
        raise
    try:
        for each in names(inner, _AT_ONCE):
            if not _unlinked(inner, each):
                _move_up(inner, each, folder)
    finally:
        os.close(inner)
    _rmdir(folder, name)


def _unlinked(folder: int, name: str) -> bool:
    """Whether nothing of that name is left; False: it is a folder."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return True
    except IsADirectoryError:
        return False
    return True


def _rmdir(folder: int, name: str) -> None:
    try:
        os.rmdir(name, dir_fd=folder)
    except OSError as error:
        if error.errno not in (*_NO_FOLDER, errno.ENOTEMPTY, errno.EEXIST):
            raise


def _move_up(inner: int, name: str, folder: int) -> None:
    try:
        os.rename(name, f".{secrets.token_hex(8)}", src_dir_fd=inner, dst_dir_fd=folder)
    except FileNotFoundError:
        return
