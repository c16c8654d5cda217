"""The library that holds programs to their limits: its copies, and which of them containers have.

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
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import structlog

from agent.kit import files
from agent.kit.files import label_for_pods, read_text
from agent.vgpu.folders import FOLDER, LONGEST_ABOUT, About, key_of
from agent.vgpu.isolation_errors import AccessRefused, FolderUnusable, LibraryUnusable
from agent.vgpu.layout import REFUSALS, HeldFiles

# The enforcement library on the host: where each container of this node gets its own copy from.

# Where the image has it.
IMAGE_FILE = "/opt/gpu-node-agent/lib/libgna-limits.so"
LIBRARY_FOLDER = "lib"
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
        with files.opened(folder) as descriptor:
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
            with files.opened(self._folder) as folder:
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
    folder = state / LIBRARY_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
        with files.opened(folder) as descriptor:
            _check_executable(folder, descriptor)
        original = Original(folder, content)
    except OSError as error:
        raise LibraryUnusable(
            f"{folder}: the enforcement library cannot be put there: {error.strerror or error}"
        ) from error
    if problem := files.obstacle(folder):
        raise LibraryUnusable(problem)
    return original


def hold(held: HeldFiles, library: Library) -> None:
    """Have both files of a copy open; each is asked for, whatever the other does. Raises OSError."""
    if held.has(library.build, library.names):
        return
    failed: OSError | None = None
    with files.opened(library.folder) as folder:
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
    with files.opened(library.folder) as folder:
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
    folder = state / LIBRARY_FOLDER
    with files.opened(folder) as descriptor:
        for name in files.names(descriptor):
            build = name.removeprefix(f"{NAME}-").partition(".")[0]
            # A dot file is what an agent that was killed had begun to write.
            if name.startswith(".") or (name.startswith(f"{NAME}-") and build not in used):
                # A runtime that starts a container without the file has made a folder in its place.
                files.remove(descriptor, name)


def obstacle(state: Path) -> str | None:
    """Why no container could load a library from below the state folder; None: nothing is seen. Blocks."""
    folder = state / LIBRARY_FOLDER
    there = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        if os.statvfs(there).f_flag & os.ST_NOEXEC:
            return _NOEXEC.format(folder)
    except OSError as error:
        return f"{there} cannot be looked at: {error.strerror}"
    return files.obstacle(there)


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
    with files.replacing(folder, name) as scratch:
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


# Copies of what limit folders stand for, below the state folder: `<state>/limits/<key>.json`.
#
# Limit folders lie in memory, below `/run`, for the library writes there with each launch. A reboot empties
# that, and the pods live on: the kubelet starts their containers again with the mounts that it was answered
# once, and asks nobody. So an agent that finds a copy without its folder makes the folder again. All of it
# blocks.

log = structlog.get_logger()

SUFFIX = ".json"


class Copies:
    """All of them on this node. One that cannot be kept is missed after a reboot, and by nobody before."""

    def __init__(self, state: Path) -> None:
        self._folder = state / FOLDER

    def keep(self, about: About) -> None:
        """Have the copy be of this; a problem is logged."""
        try:
            files.write(self._folder, f"{key_of(about.ids)}{SUFFIX}", msgspec.json.encode(about), mode=0o600)
        except OSError as error:
            log.warning("limits_not_copied", pod=about.pod_key, problem=str(error))

    def follow(self, key: str, about: About) -> None:
        """Have the copy say what the folder says.

        One that an earlier version wrote leaves out what that does not know, as the layout of the files, and
        a reboot leaves nothing but the copy to make them of.
        """
        try:
            agrees = (self._folder / f"{key}{SUFFIX}").read_bytes() == msgspec.json.encode(about)
        except OSError:
            agrees = False
        if not agrees:
            self.keep(about)

    def drop(self, key: str) -> None:
        """Forget a container."""
        with suppress(OSError):
            (self._folder / f"{key}{SUFFIX}").unlink(missing_ok=True)

    def without_folder(self, keys: Collection[str]) -> Iterator[About]:
        """Those whose folder is not among these; one that cannot be read is removed."""
        for file in sorted(self._folder.glob(f"*{SUFFIX}")):
            if file.stem in keys:
                continue
            try:
                about = msgspec.json.decode(read_text(file, LONGEST_ABOUT), type=About)
                if not about.ids or key_of(about.ids) != file.stem:
                    raise FolderUnusable("it is of other units than its name")
                yield about
            except (OSError, ValueError, FolderUnusable) as error:
                log.warning("limits_copy_unreadable", file=str(file), problem=str(error))
                self.drop(file.stem)


# Containers' copies of the enforcement library: given, kept open and whole, removed.


class LibraryCopies:
    """All of it blocks."""

    def __init__(self, source: Path, state: Path) -> None:
        """`source`: the image's library. `state`: the agent's state folder on the host."""
        self._source = source
        self._state = state
        self._original: Original | None = None
        self._withheld = False  # who has copies is not known either
        self._held = HeldFiles()  # by build
        self._unsettled: set[str] = set()  # builds that are not on disk yet
        # Why containers get none; None: they do.
        self.problem: str | None = "the enforcement library has not been put on the host yet"

    @property
    def build(self) -> str | None:
        """The digest of what containers get now; None: nothing."""
        return self._original.build if self._original else None

    def install(self) -> None:
        """Have the image's library on the host. Raises LibraryUnusable, as `problem` says from then on."""
        try:
            self._original = install(self._source, self._state)
        except LibraryUnusable as error:
            self.problem = str(error)
            raise
        self.problem = None

    def withhold(self, problem: str) -> None:
        """Give containers none, since they could not have the files of their limits."""
        self.problem = problem
        self._original = None
        self._withheld = True

    def of(self, about: About) -> Library:
        """The copy that a container was given."""
        return Library(self._state / LIBRARY_FOLDER, about.build)

    def give(self) -> Library:
        """A new copy for a container, open here before the container has it. Raises LibraryUnusable."""
        if self._original is None:
            raise LibraryUnusable(self.problem or "")
        library = self._original.copy()
        try:
            hold(self._held, library)
        except BaseException as error:
            self.take_back(library)
            if isinstance(error, OSError):
                raise LibraryUnusable(f"{library.file} cannot be opened: {error.strerror}") from error
            raise
        self._unsettled.add(library.build)
        return library

    def take_back(self, library: Library) -> None:
        """Remove a copy whose container was not admitted."""
        self._held.drop(library.build)
        self._unsettled.discard(library.build)
        remove(library)

    def keep(self, about: About) -> None:
        """Have a container's copy whole, open and on disk. Raises LibraryUnusable, AccessRefused."""
        if not about.build:
            return
        library = self.of(about)
        if self._original and self._original.mend(about.build):
            self._held.drop(about.build)
            log.info("library_restored", pod=about.pod_key, file=str(library.file))
        try:
            if about.build in self._unsettled:
                settle(self._held, library)
                self._unsettled.discard(about.build)
            else:
                hold(self._held, library)
        except OSError as error:
            text = f"{library.file} is kept from the agent: {error.strerror or error}"
            # Who keeps a file of many from the agent is not to be known.
            refused = library.own and error.errno in REFUSALS
            raise (AccessRefused if refused else LibraryUnusable)(text) from error

    def remove_unused(self, used: Collection[str], complete: bool = True) -> None:
        """Remove all but these builds; a problem is logged.

        Not `complete`: others may be used, too, though no container's own that was known here.
        """
        unused = [Library(self._state / LIBRARY_FOLDER, each) for each in self._held.keys() - set(used)]
        for library in unused:
            self._held.drop(library.build)
            if library.own:
                remove(library)
        self._unsettled.intersection_update(used)
        try:
            if complete and not self._withheld:
                remove_unused(self._state, used)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("libraries_not_removed", problem=str(error))

    def close(self) -> None:
        """Let go of the files."""
        self._held.close()
