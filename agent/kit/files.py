"""Files and folders that others may write to at the same moment, and watching a folder for what they do."""

import ctypes
import errno
import fcntl
import os
import secrets
import stat
import struct
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import anyio

# Files and folders that others may write to at the same moment.

# Putting a file in place in one step: readers find the old content or the new one, never a part of it.

# Of the names of drafts; one without a writer is what an agent that was killed had begun.
DRAFT = ".gpu-node-agent-"
_BEGAN = time.time()
_swept: set[Path] = set()  # folders that no draft of before is in


def write(folder: Path, name: str, content: bytes, mode: int = 0o644, lasting: bool = False) -> None:
    """Write `folder/name`; the folder is made where it is missing. Blocks. Raises OSError.

    `lasting`: it is on disk when this returns, and there after a power cut.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if folder not in _swept:
        _sweep(folder)
    # A dot file with another suffix: programs that read every .json in a folder pass it by.
    descriptor, draft = tempfile.mkstemp(prefix=DRAFT, dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        Path(draft).replace(folder / name)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    if lasting:
        entry = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(entry)
        finally:
            os.close(entry)


def _sweep(folder: Path) -> None:
    """Remove drafts from before this process: each may be of megabytes."""
    _swept.add(folder)
    with suppress(OSError):
        for draft in folder.glob(f"{DRAFT}*"):
            if draft.stat().st_mtime < _BEGAN:
                draft.unlink()


# Reading a small file that somebody else writes, whatever it turns out to be.

LONGEST_BYTES = 4096


def read_text(file: Path, most: int = LONGEST_BYTES) -> str:
    """The first `most` bytes of a regular file as UTF-8. Blocks, but for no more than a disk takes.

    A pipe would keep its reader for ever, a device or a huge file would fill the memory. Raises OSError,
    UnicodeDecodeError.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{file} is no regular file")
        return os.read(descriptor, most).decode()
    finally:
        os.close(descriptor)


# Paths of a root file system that is mounted somewhere: symbolic links in it count from there.

MOST_LINKS = 40  # as the kernel has it


def inside(root: Path, path: str | Path) -> Path:
    """The path here of what a program with that root knows as `path`. Blocks.

    As chroot would resolve it: no link and no `..` leads out of `root`. What does not exist is resolved as
    far as it does. Raises OSError for a loop of links.
    """
    todo = list(reversed(Path(path).parts))
    at: list[str] = []
    links = 0
    while todo:
        part = todo.pop()
        if part in ("/", "."):
            continue
        if part == "..":
            del at[-1:]
            continue
        here = root.joinpath(*at, part)
        if not here.is_symlink():
            at.append(part)
            continue
        links += 1
        if links > MOST_LINKS:
            raise OSError(f"{here}: a loop of symbolic links")
        target = here.readlink()
        if target.is_absolute():
            at.clear()
        todo.extend(reversed(target.parts))
    return root.joinpath(*at)


# One process at a time: a lock that the kernel drops when its holder dies, however it dies.


class Taken(Exception):
    """Another process holds the lock; the text names it where it can."""


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold `path` locked while the context is open. Raises Taken at once if another process holds it.

    The file stays behind: removing it would let two processes hold locks on two files of one name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise Taken(f"{path} is held by process {holder}") from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


# Labels by which SELinux lets every pod use what the agent shows them.

ATTRIBUTE = "security.selinux"
# The type of what pods write to, and no category, so that those of every pod may: container-selinux's policy.
POD_LABEL = b"system_u:object_r:container_file_t:s0\0"


def obstacle(folder: Path) -> str | None:
    """Why files of a folder could not be labelled for pods; None: nothing is seen. Blocks; leaves nothing."""
    try:
        os.getxattr(folder, ATTRIBUTE)
        descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError:
        return None  # no SELinux, or a file system without such files
    try:
        os.setxattr(descriptor, ATTRIBUTE, POD_LABEL)
    except OSError as error:
        return (
            f"SELinux would keep pods from files below {folder}: they cannot be labelled ({error.strerror}); "
            "let the agent relabel them, as spc_t in a privileged container does, or mount the folder from a "
            "file system with labels"
        )
    finally:
        os.close(descriptor)
    return None


def label_for_pods(root: Path, *files: Path) -> str | None:
    """Label `files` so that SELinux lets pods have them; the obstacle in words, or None. Blocks.

    `root` shows whether this kernel has SELinux at all.
    """
    try:
        os.getxattr(root, ATTRIBUTE)
    except OSError:
        return None
    for file in files:
        try:
            os.setxattr(file, ATTRIBUTE, POD_LABEL)
        except OSError as error:
            return f"{file} cannot be labelled for pods: {error.strerror}"
    return None


# Emptying folders that somebody hostile may write to at the same moment.
#
# No path is walked: a folder is a descriptor, and what is in it is named by one component that is never
# followed (openat(2) with O_NOFOLLOW, unlinkat(2), renameat(2)). Depth costs nothing: a folder inside a
# folder is moved up before its own content is looked at, so three descriptors are open at most, and nothing
# recurses.

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


# Watching one folder with inotify: a few lines over libc, since no package in use brings it.
#
# See inotify(7). Latency from the change to the event is well under a millisecond.

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
