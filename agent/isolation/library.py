"""The enforcement library on the host: where containers of this node get it from.

A file name holds the library's build, and a file never changes: containers that run keep theirs over every
update of the agent. It lies below the state folder (`/var/lib/gpu-node-agent/lib`), never below `/run`, which
many nodes mount noexec. All of it blocks.
"""

import hashlib
import os
import stat
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agent.isolation.isolation_errors import LibraryUnusable
from agent.kit import selinux, trees
from agent.kit.selinux import label_for_pods

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


@dataclass(frozen=True, slots=True)
class Library:
    """One build of the library on the host."""

    folder: Path
    build: str  # of its content

    @property
    def file(self) -> Path:
        return self.folder / f"{NAME}-{self.build}.so"

    @property
    def preload(self) -> Path:
        """The file on the host that containers have as /etc/ld.so.preload."""
        return self.folder / f"{NAME}-{self.build}.preload"

    @property
    def in_container(self) -> str:
        return f"{IN_CONTAINER}/{self.file.name}"


def install(source: Path, state: Path) -> Library:
    """Put the image's library where containers can have it from; one that is there already stays.

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
    library = Library(folder, hashlib.sha256(content).hexdigest()[:16])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        with trees.opened(folder) as descriptor:
            _check_executable(folder, descriptor)
            _put(descriptor, library.file.name, content, 0o555)
            _put(descriptor, library.preload.name, f"{library.in_container}\n".encode(), 0o444)
    except OSError as error:
        raise LibraryUnusable(
            f"{folder}: the enforcement library cannot be put there: {error.strerror or error}"
        ) from error
    if problem := label_for_pods(folder, library.file, library.preload):
        raise LibraryUnusable(f"SELinux would keep pods from the enforcement library: {problem}")
    return library


def is_there(library: Library) -> bool:
    """Whether both files are on the host still: a runtime makes folders in their place. Blocks."""
    return library.file.is_file() and library.preload.is_file()


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


def _check_executable(folder: Path, descriptor: int) -> None:
    if os.fstatvfs(descriptor).f_flag & os.ST_NOEXEC:
        raise LibraryUnusable(_NOEXEC.format(folder))


def _read(source: Path) -> bytes:
    with source.open("rb") as file:
        content = file.read(LARGEST_BYTES + 1)
    if not content.startswith(ELF) or len(content) > LARGEST_BYTES:
        raise OSError("it is no shared library")
    return content


def _put(folder: int, name: str, content: bytes, mode: int) -> None:
    """Have a file of that name and content in one step; one that is as it should be stays the same file."""
    with suppress(OSError):
        if _same(folder, name, content, mode):
            return
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with trees.replacing(folder, name) as scratch:
        with open(os.open(scratch, flags, 0o600, dir_fd=folder), "wb") as file:  # noqa: PTH123  a descriptor
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        with suppress(NotADirectoryError, FileNotFoundError):
            os.rmdir(name, dir_fd=folder)


def _same(folder: int, name: str, content: bytes, mode: int) -> bool:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with open(descriptor, "rb") as file:  # noqa: PTH123  a descriptor
        status = os.fstat(descriptor)
        return (
            stat.S_ISREG(status.st_mode)
            and stat.S_IMODE(status.st_mode) == mode
            and status.st_size == len(content)
            and status.st_uid == os.geteuid()
            and file.read() == content
        )
