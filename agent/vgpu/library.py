"""The enforcement library on the host: where each container of this node gets its own copy from.

A container has an inode of its own of all that it can open: a lease on one that all share would stall every
program start of the node, and a watch would see them. A file name holds the build of the content and of the
copy, and a file never changes: containers that run keep theirs over every update of the agent. Copies lie
below the state folder (`/var/lib/gpu-node-agent/lib`), never below `/run`, which many nodes mount noexec, and
which a reboot empties. All of it blocks.
"""

import errno
import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agent.kit import selinux, trees
from agent.kit.selinux import label_for_pods
from agent.vgpu.held import HeldFiles
from agent.vgpu.isolation_errors import LibraryUnusable

# Where the image has it.
IMAGE_FILE = "/opt/gpu-node-agent/lib/libgna-limits.so"
FOLDER = "lib"
NAME = "libgna-limits"
# Where containers find it, and it the two files of its limits (`clib/layout.h`). The loader knows of it by a
# preload file, which no environment switches off.
IN_CONTAINER = "/usr/lib/gpu-node-agent"
PRELOAD_IN_CONTAINER = "/etc/ld.so.preload"
LARGEST_BYTES = 32 << 20
ELF = b"\x7fELF"
FICLONE = 0x40049409  # of <linux/fs.h>: a copy that shares its blocks, where the file system has such
NO_REFLINKS = (
    errno.EOPNOTSUPP,
    errno.ENOTTY,
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EPERM,
    errno.EACCES,
)


@dataclass(frozen=True, slots=True)
class Library:
    """A copy of the library on the host."""

    folder: Path
    build: str  # of its content, and of the copy; the former alone where one served all (up to 0.2.0)

    @property
    def names(self) -> tuple[str, str]:
        """Of the library, and of the file that containers have as /etc/ld.so.preload."""
        return f"{NAME}-{self.build}.so", f"{NAME}-{self.build}.preload"

    @property
    def own(self) -> bool:
        """Whether it is one container's alone."""
        return "-" in self.build

    @property
    def file(self) -> Path:
        return self.folder / self.names[0]

    @property
    def preload(self) -> Path:
        return self.folder / self.names[1]

    @property
    def in_container(self) -> str:
        return f"{IN_CONTAINER}/{self.names[0]}"


class Original:
    """The image's library, from which containers get their copies.

    It has no name on the host, so that no container can be given it.
    """

    def __init__(self, folder: Path, content: bytes) -> None:
        """Raises OSError."""
        self.build = hashlib.sha256(content).hexdigest()[:16]
        self._folder = folder
        self._content = content
        self._shared: int | None = None  # a file whose blocks copies can share; None: there is no such thing
        with trees.opened(folder) as descriptor:
            file = _unnamed(descriptor)
            try:
                _write(file, content)
                trial = _unnamed(descriptor)
                try:
                    fcntl.ioctl(trial, FICLONE, file)
                finally:
                    os.close(trial)
            except OSError as error:
                os.close(file)
                if error.errno not in NO_REFLINKS:
                    raise
            else:
                self._shared = file

    def __del__(self) -> None:
        if (file := getattr(self, "_shared", None)) is not None:
            with suppress(OSError):
                os.close(file)

    def copy(self, build: str = "") -> Library:
        """A container's own copy, or one that is to be there again. Raises LibraryUnusable."""
        library = Library(self._folder, build or f"{self.build}-{secrets.token_hex(8)}")
        try:
            self._put(library)
        except LibraryUnusable:
            if not build:
                remove(library)
            raise
        return library

    def _put(self, library: Library) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with trees.opened(self._folder) as folder:
                file, preload = library.names
                _put(folder, file, 0o555, self._write)
                line = f"{library.in_container}\n".encode()
                _put(folder, preload, 0o444, partial(_write, content=line))
        except OSError as error:
            raise LibraryUnusable(
                f"{self._folder}: the enforcement library cannot be put there: {error.strerror or error}; "
                "have that folder writable, with space left, or set vgpu.enforcement to report"
            ) from error
        if problem := label_for_pods(self._folder, library.file, library.preload):
            raise LibraryUnusable(f"SELinux would keep pods from the enforcement library: {problem}")

    def mend(self, build: str) -> bool:
        """Have a copy be there that has been removed, or that a power cut has left empty; whether it was not.

        Another build's cannot be mended. Raises LibraryUnusable.
        """
        library = Library(self._folder, build)
        if build.partition("-")[0] != self.build or self._whole(library):
            return False
        self.copy(build)
        return True

    def _whole(self, library: Library) -> bool:
        for file, size in (
            (library.file, len(self._content)),
            (library.preload, len(library.in_container) + 1),
        ):
            try:
                status = file.lstat()
            except OSError:
                return False
            if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                return False
        return True

    def _write(self, file: int) -> None:
        if self._shared is not None:
            fcntl.ioctl(file, FICLONE, self._shared)
        else:
            _write(file, self._content)


def install(source: Path, state: Path) -> Original:
    """Have the image's library where containers can have copies of it from.

    Raises LibraryUnusable: it is missing, or containers could not load it from there.
    """
    try:
        content = _read(source)
    except OSError as error:
        raise LibraryUnusable(
            f"the enforcement library {source} cannot be read: {error.strerror or error}; use an image that "
            "holds it, or set vgpu.enforcement to report"
        ) from error
    folder = state / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        with trees.opened(folder) as descriptor:
            _check_executable(folder, descriptor)
        original = Original(folder, content)
    except OSError as error:
        raise LibraryUnusable(
            f"{folder}: the enforcement library cannot be put there: {error.strerror or error}"
        ) from error
    if problem := selinux.obstacle(folder):
        raise LibraryUnusable(problem)
    return original


def hold(held: HeldFiles, library: Library) -> None:
    """Have both files of a copy open; each is asked for, whatever the other does. Raises OSError."""
    if held.has(library.build, library.names):
        return
    failed: OSError | None = None
    with trees.opened(library.folder) as folder:
        for name in library.names:
            try:
                os.close(held.get(library.build, name, folder, os.O_RDONLY))
            except OSError as error:
                failed = failed or error
    if failed:
        raise failed


def settle(held: HeldFiles, library: Library) -> None:
    """Have a copy on disk, and there after a power cut. Raises OSError.

    Its pages are its container's, once that reads them, not the agent's.
    """
    with trees.opened(library.folder) as folder:
        for name in library.names:
            descriptor = held.get(library.build, name, folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
        os.fsync(folder)


def remove(library: Library) -> None:
    """Remove a copy that no container was given."""
    for file in (library.file, library.preload):
        with suppress(OSError):
            file.unlink()


def remove_unused(state: Path, used: Collection[str]) -> None:
    """Remove builds that are in nobody's use. Raises OSError."""
    folder = state / FOLDER
    with trees.opened(folder) as descriptor:
        for name in trees.names(descriptor):
            build = name.removeprefix(f"{NAME}-").partition(".")[0]
            # A dot file is what an agent that was killed had begun to write.
            if name.startswith(".") or (name.startswith(f"{NAME}-") and build not in used):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=descriptor)


def obstacle(state: Path) -> str | None:
    """Why no container could load a library from below the state folder; None: nothing is seen. Blocks."""
    folder = state / FOLDER
    there = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        if os.statvfs(there).f_flag & os.ST_NOEXEC:
            return _NOEXEC.format(folder)
    except OSError as error:
        return f"{there} cannot be looked at: {error.strerror}"
    return selinux.obstacle(there)


_NOEXEC = (
    "{} lies on a file system that is mounted noexec, so that no container could load the enforcement "
    "library from there; mount it without noexec"
)
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def _check_executable(folder: Path, descriptor: int) -> None:
    if os.fstatvfs(descriptor).f_flag & os.ST_NOEXEC:
        raise LibraryUnusable(_NOEXEC.format(folder))


def _read(source: Path) -> bytes:
    with source.open("rb") as file:
        content = file.read(LARGEST_BYTES + 1)
    if not content.startswith(ELF) or len(content) > LARGEST_BYTES:
        raise OSError("it is no shared library")
    return content


def _put(folder: int, name: str, mode: int, write: Callable[[int], None]) -> None:
    """Have a new file of that name in one step."""
    with trees.replacing(folder, name) as scratch:
        descriptor = os.open(scratch, _NEW, 0o600, dir_fd=folder)
        try:
            write(descriptor)
            os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)
        # A runtime that starts a container without the file makes a folder in its place.
        with suppress(NotADirectoryError, FileNotFoundError):
            os.rmdir(name, dir_fd=folder)


def _unnamed(folder: int) -> int:
    """A new file without a name. Raises OSError."""
    scratch = f".{secrets.token_hex(8)}"
    descriptor = os.open(scratch, _NEW, 0o600, dir_fd=folder)
    os.unlink(scratch, dir_fd=folder)
    return descriptor


def _write(file: int, content: bytes) -> None:
    if os.write(file, content) != len(content):
        raise OSError(errno.ENOSPC, "it was written in part: the file system is full")
