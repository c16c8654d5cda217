"""Finding processes of MPS in /proc: the daemon and the servers of one pipe folder. All of it blocks."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agent.model.mps import PIPE_DIRECTORY
from agent.mps.binary import CONTROL, SERVER

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """A process; PIDs are used again, so its start time tells it apart."""

    pid: int
    started: int  # clock ticks since boot

    def alive(self) -> bool:
        """Whether it runs; zombies do not."""
        return identify(self.pid) == self

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it is still the same process."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.alive():
                signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return
        finally:
            os.close(descriptor)


def kernel_problem() -> str | None:
    """Why processes cannot be held on to on this kernel, with the remedy; None: they can."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        kernel = f"{os.uname().sysname} {os.uname().release}"
        return (
            f"{kernel} has no descriptors of processes ({error.strerror}): MPS mode needs Linux 5.3 or newer"
        )
    return None


def identify(pid: int) -> Process | None:
    """The process of that PID; None: there is none, or it is a zombie."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else Process(pid, int(fields[19]))


def daemons(pipe: Path, below: bool = False) -> tuple[Process, ...]:
    """Control daemons on a pipe folder, found by command line (`... -d`, `-f`) and environment.

    `below`: those in PID namespaces below ours, too, for somebody who looks on from outside.
    """
    return tuple(_found(CONTROL, pipe, lambda words: any(word in ("-d", "-f") for word in words), below))


def servers(pipe: Path) -> tuple[Process, ...]:
    """MPS servers that were started by a daemon on a pipe folder, whether that daemon lives or not."""
    return tuple(_found(SERVER, pipe, lambda _words: True))


def arguments(pid: int) -> tuple[str, ...]:
    """The command line of a process; empty if it is gone."""
    try:
        return tuple(os.fsdecode(word) for word in (PROC / str(pid) / "cmdline").read_bytes().split(b"\0"))
    except OSError:
        return ()


def _found(
    program: str, pipe: Path, fits: Callable[[list[str]], bool], below: bool = False
) -> Iterator[Process]:
    variable = os.fsencode(f"{PIPE_DIRECTORY}={pipe}")
    own = _pid_namespace("self")
    for entry in os.scandir(PROC):
        if not entry.name.isdigit():
            continue
        folder = PROC / entry.name
        try:
            # Cheap first: most processes are told by their command line.
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if not any(os.path.basename(os.fsdecode(word)) == program for word in words[:2]):  # noqa: PTH119
                continue
            if variable not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            # Any pod can give a process of its own this name and this environment.
            if not below and _pid_namespace(entry.name) != own:
                continue
        except OSError:
            continue  # gone, or a kernel thread
        if fits([os.fsdecode(word) for word in words]) and (found := identify(int(entry.name))):
            yield found


def _pid_namespace(pid: str) -> Path:
    return (PROC / pid / "ns" / "pid").readlink()
