"""The folders of one GPU's daemon: `<run>/mps/<uuid>/{pipe,log,shm}`.

Pipe and log folder are named to pods and to the daemon by the very path they have here, so the run folder
must have one path in the agent's pod and on the host.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from agent.mps.errors import BadFolder

# sun_path holds 108 bytes with its end; the longest socket below the pipe folder is control_privileged.
LONGEST_SOCKET_PATH = 107
SOCKETS = ("control", "control_privileged")
# The type of what pods write to, and no category, so that those of every pod may: container-selinux's policy.
SELINUX, POD_LABEL = "security.selinux", b"system_u:object_r:container_file_t:s0\0"
LEFTOVERS = (*SOCKETS, "control_lock", "log", "nvidia-cuda-mps-control.pid")


@dataclass(frozen=True, slots=True)
class Directories:
    """Where one daemon keeps its things."""

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
    def pipe(self) -> Path:
        """Sockets of the daemon; shown to pods."""
        return self.root / "pipe"

    @property
    def log(self) -> Path:
        """control.log and server.log."""
        return self.root / "log"

    @property
    def shm(self) -> Path:
        """Shared memory of the daemon and of its pods: their /dev/shm."""
        return self.root / "shm"

    @property
    def lock(self) -> Path:
        """Held by the agent that looks after the daemon."""
        return self.root / "agent.lock"

    def make(self) -> None:
        """Make the folders. Blocks. Raises BadFolder.

        Pods of any user pass through the way to the sockets; /dev/shm is writable for all, as everywhere.
        """
        try:
            for folder, mode in (
                (self.root, 0o755),
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
        except OSError as error:
            raise BadFolder(f"{error.filename or self.root}: cannot be prepared: {error.strerror}") from error

    def label(self) -> str | None:
        """Have SELinux let pods through to the daemon. Blocks. What stands in the way; None: nothing."""
        try:
            os.getxattr(self.root, SELINUX)
        except OSError:
            return None  # this kernel has no SELinux
        for folder in (self.pipe, self.shm):
            try:
                os.setxattr(folder, SELINUX, POD_LABEL)
            except OSError as error:
                return f"{folder} cannot be labelled for pods: {error.strerror}"
        return None

    def clear(self) -> None:
        """Remove what a daemon left in its pipe folder. Blocks. Only while no daemon runs on it.

        A pod that ran as root may have put folders in its place.
        """
        for name in LEFTOVERS:
            try:
                (self.pipe / name).unlink(missing_ok=True)
            except IsADirectoryError:
                shutil.rmtree(self.pipe / name)

    def remove(self) -> None:
        """Take the pipe and shm folders away; logs stay for whoever asks why. Blocks."""
        for folder in (self.pipe, self.shm):
            shutil.rmtree(folder, ignore_errors=True)

    def existing(self) -> bool:
        """Whether there is anything of a daemon's here."""
        return self.pipe.is_dir()
