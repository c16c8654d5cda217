"""The folders of one GPU's daemon: `<run>/mps/<uuid>/{own,pipe,log,shm}`.

`pipe` is what pods mount: read-only, but pods that started under an older agent have it writable, and root
in one may put anything there. So the daemon works in `own`, which no pod ever sees, and `pipe`
holds hard links to the sockets and the fifo there. Neither daemon, server nor agent opens anything by name in
`pipe`; the agent links into it and removes from it, and neither follows a link.

Pipe and log folder are named to pods and to the daemon by the very path they have here, so the run folder
must have one path in the agent's pod and on the host.
"""

import errno
import os
import secrets
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import anyio.to_thread

from agent.kit import files
from agent.kit.files import Taken, exclusive, label_for_pods
from agent.mps.mps_errors import BadFolder, MpsError

# sun_path holds 108 bytes with its end; the longest socket below the pipe folder is control_privileged.
LONGEST_SOCKET_PATH = 107
SOCKETS = ("control", "control_privileged")
PIPE_FILES = (*SOCKETS, "log")  # what clients need of a pipe folder: sockets and a fifo
KINDS = (stat.S_IFSOCK, stat.S_IFIFO)
TAKEN_IN = "taken-in"
LINK_TRIES = 3
REMOVE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Directories:
    root: Path

    @classmethod
    def of(cls, run: Path, uuid: str) -> Self:
        """The folders for a GPU below the agent's run folder. Raises BadFolder when the path is too long."""
        found = cls(run / "mps" / uuid)
        longest = max(len(os.fsencode(found.pipe / name)) for name in SOCKETS)
        if longest > LONGEST_SOCKET_PATH:
            raise BadFolder(
                f"{found.pipe}: the MPS control socket's path would have {longest} bytes, and the kernel "
                f"takes {LONGEST_SOCKET_PATH}: the daemon would end without a word; choose a shorter host.run"
            )
        return found

    @property
    def own(self) -> Path:
        """Where the daemon makes its sockets: its pipe folder, seen by no pod."""
        return self.root / "own"

    @property
    def pipe(self) -> Path:
        """The folder that pods see. In the daemon's mount namespace `own` lies over it, under this path."""
        return self.root / "pipe"

    @property
    def log(self) -> Path:
        """control.log and server.log."""
        return self.root / "log"

    @property
    def shm(self) -> Path:
        """Shared memory of the daemon and of its pods: their /dev/shm."""
        return self.root / "shm"

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Be the one agent that looks after the daemon, while the context is open. Raises MpsError."""
        file = self.root / "agent.lock"
        lock = exclusive(file)
        try:
            await anyio.to_thread.run_sync(lock.__enter__)
        except Taken as error:
            raise MpsError(f"another agent looks after this MPS daemon: {error}") from error
        except OSError as error:
            raise MpsError(f"{file}: cannot be locked: {error.strerror}") from error
        try:
            yield
        finally:
            lock.__exit__(None, None, None)

    def make(self) -> None:
        """Make the folders. Blocks. Raises BadFolder.

        Pods of any user pass through the way to the sockets; /dev/shm is writable for all, as everywhere.
        """
        with _problem_of(self.root):
            for folder, mode in (
                (self.root, 0o755),
                (self.own, 0o755),
                (self.pipe, 0o755),
                (self.log, 0o755),
                (self.shm, 0o1777),
            ):
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(mode)
            for parent in (self.root.parent, self.root.parent.parent):
                missing = 0o111 & ~parent.stat().st_mode
                if missing:
                    parent.chmod(parent.stat().st_mode & 0o7777 | missing)

    def label(self) -> str | None:
        """Have SELinux let pods through to the daemon. Blocks. What stands in the way; None: nothing."""
        return label_for_pods(self.root, self.own, self.pipe, self.shm)

    def clear(self) -> None:
        """Empty the daemon's and the pods' pipe folder. Blocks. Only while no daemon runs. Raises BadFolder.

        The pods' one stays the folder that it is: running pods have it mounted. A pod that fills it faster
        than it is emptied keeps no daemon from its start: what is in a socket's place goes when it is linked.
        """
        with _problem_of(self.own), suppress(FileNotFoundError), files.opened(self.own) as descriptor:
            files.empty(descriptor)
        with suppress(OSError), files.opened(self.pipe) as descriptor:
            files.empty(descriptor)

    def show(self) -> None:
        """Have pods find the daemon's sockets: link those that are missing, or were replaced. Blocks.

        Raises BadFolder.
        """
        with _problem_of(self.pipe), files.opened(self.own) as own, files.opened(self.pipe) as pipe:
            for name in PIPE_FILES:
                _link(name, own, pipe)

    def take_in(self, daemon: str) -> None:
        """Have the agent find the sockets of a daemon that works in the pods' folder. Blocks.

        That of an older agent does, and of one without privileges. What was taken in once of this
        `daemon` stays: pods may have put something in its place. Raises BadFolder.
        """
        with _problem_of(self.own):
            self.own.mkdir(exist_ok=True)
            note = self.own / TAKEN_IN
            with files.opened(self.pipe) as pipe, files.opened(self.own) as own:
                if not note.exists() or note.read_text() != daemon:
                    files.empty(own)
                    note.write_text(daemon)
                for name in PIPE_FILES:
                    if _status(name, own) is None:
                        _link(name, pipe, own)

    def remove(self) -> None:
        """Remove the pipe and shm folders as far as possible; logs stay for diagnosis. Blocks."""
        # The pods' pipe folder goes last: `existing` asks for it.
        for name in (self.own.name, self.shm.name, self.pipe.name):
            with suppress(OSError), files.opened(self.root) as descriptor:
                files.remove(descriptor, name)

    def existing(self) -> bool:
        """Whether there is anything of a daemon's here."""
        return self.pipe.is_dir()


def existing_below(run: Path) -> list[Directories]:
    """The folders of all daemons of which there is anything below the agent's run folder. Blocks."""
    return [found for root in sorted((run / "mps").glob("*")) if (found := Directories(root)).existing()]


@contextmanager
def _problem_of(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadFolder(f"{folder}: cannot be prepared: {error.strerror}") from error


def _link(name: str, source: int, target: int) -> None:
    """Have `name` in the open folder `target` be the socket or fifo that it is in `source`. Raises OSError.

    Both may be written to by somebody else meanwhile: what is taken and what is replaced is never followed.
    """
    for _ in range(LINK_TRIES):
        wanted = _status(name, source)
        if wanted is None or stat.S_IFMT(wanted.st_mode) not in KINDS:
            return
        found = _status(name, target)
        if found and os.path.samestat(found, wanted):
            return
        scratch = f".{secrets.token_hex(8)}"
        os.link(name, scratch, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
        try:
            linked = _status(scratch, target)
            if linked and stat.S_IFMT(linked.st_mode) in KINDS:
                os.rename(scratch, name, src_dir_fd=target, dst_dir_fd=target)
                return
        except IsADirectoryError:
            files.remove(target, name, REMOVE_SECONDS)
        except FileNotFoundError:
            continue
        finally:
            files.remove(target, scratch, REMOVE_SECONDS)
    raise OSError(errno.EBUSY, f"a pod that mounts it writable takes the place of {name} again and again")


def _status(name: str, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
