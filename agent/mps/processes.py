"""Finding and ending processes of MPS: the daemon and the servers of one pipe folder. What finds blocks.

Any process can have a daemon's name, arguments and environment. What no pod can have is a place outside of
its cgroup: that is what a daemon is known by.
"""

import os
import signal
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from agent.kit import bounded
from agent.model.cgroup import container_of, started_by_agent
from agent.model.cuda import PIPE_DIRECTORY
from agent.mps.binary import CONTROL, SERVER
from agent.mps.directories import SOCKETS, Directories

PROC = Path("/proc")
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
# Any process may have the kernel give out gigabytes as these (PR_SET_MM_MAP of prctl(2)).
COMMAND_BYTES, ENVIRONMENT_BYTES = 64 << 10, 1 << 20
GONE_SECONDS = 3.0
LIVES_SECONDS = 0.5
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Process:
    """A process; PIDs are used again, so its start time identifies it."""

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


async def end(doomed: tuple[Process, ...]) -> None:
    """Return once they have ended: by themselves, by request, or by force. Bounded."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        doomed = tuple([each for each in doomed if await anyio.to_thread.run_sync(each.alive)])
        for process in doomed:
            await anyio.to_thread.run_sync(process.send, number)
        await gone(doomed)


async def gone(doomed: tuple[Process, ...], patience: float = 0.0) -> None:
    """Return once they have ended, at the latest `patience` seconds later than they should have."""
    with anyio.move_on_after(GONE_SECONDS + patience):
        while any([await anyio.to_thread.run_sync(each.alive) for each in doomed]):
            await anyio.sleep(POLL_SECONDS)


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


def folders(proc: Path = PROC) -> Iterator[Path]:
    """The folder of each process."""
    return (proc / entry.name for entry in os.scandir(proc) if entry.name.isdigit())


def identify(pid: int, proc: Path = PROC) -> Process | None:
    """The process of that PID; None: there is none, or it is a zombie."""
    try:
        fields = _stat(pid, proc)
    except OSError:
        return None
    # One whose first thread has ended looks like a zombie, and its sockets live with the other threads.
    ended = fields[0] in ("Z", "X") and int(fields[17]) <= 1
    return None if ended else Process(pid, int(fields[19]))


def remaining(pids: Collection[int]) -> frozenset[int]:
    """Those of anybody's processes that run; one that keeps its readers waiting does."""

    def lives(pid: int) -> bool:
        try:
            return bounded.call(("lives", pid), partial(identify, pid), LIVES_SECONDS) is not None
        except bounded.Late:
            return True

    return frozenset(pid for pid in pids if lives(pid))


def parent(pid: int) -> int | None:
    """The PID of a process's parent; None: there is no such process."""
    try:
        return int(_stat(pid, PROC)[1])
    except (OSError, ValueError, IndexError):
        return None


def halted(pid: int) -> bool:
    """Whether a signal or a tracer stopped a process's first thread. Raises OSError: it has ended."""
    return _stat(pid, PROC)[0] in ("T", "t")


def _stat(pid: int, proc: Path) -> list[str]:
    """The words of `/proc/<pid>/stat` from the process's state on. Raises OSError."""
    return (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()


def daemons(pipe: Path) -> tuple[Process, ...]:
    """Control daemons on a pipe folder, found by command line (`... -d`, `-f`) and environment."""
    return tuple(each for each in _found(CONTROL, pipe) if _own(each.pid, root=True))


def impostors(pipe: Path) -> tuple[Process, ...]:
    """Processes that look like a control daemon on a pipe folder, and run in a pod or as another user."""
    return tuple(each for each in _found(CONTROL, pipe, pods=True) if not _own(each.pid, root=True))


def servers(pipe: Path) -> tuple[Process, ...]:
    """MPS servers that were started by a daemon on a pipe folder, whether that daemon lives or not.

    Without multi-user a server runs as the user of its clients, in the cgroup of its daemon all the same.
    """
    return tuple(each for each in _found(SERVER, pipe) if _own(each.pid))


def daemon_of(folders: Directories) -> Process | None:
    """The control daemon of these folders: of several, the one that listens, else the oldest."""
    found = daemons(folders.pipe)
    speaker = listener(folders) if len(found) > 1 else None
    return min(found, key=lambda each: (each.pid != speaker, each.started, each.pid), default=None)


def listener(folders: Directories) -> int | None:
    """The process that listens on the control socket; 0: one that cannot be named here; None: nobody does.

    The kernel notes it when a socket begins to listen (SO_PEERCRED of unix(7)): nobody has to answer for it.
    """
    # The daemon of an older agent works in the pods' folder until it is adopted.
    folder = folders.own if folders.own.exists() else folders.pipe
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setblocking(False)
        try:
            connection.connect(str(folder / SOCKETS[0]))
        except BlockingIOError:
            return 0  # more wait for it than it has room for
        except OSError:
            return None
        return credentials(connection)[0]


def credentials(connection: socket.socket) -> tuple[int, int]:
    """PID and user of the process at the other end, as the kernel noted them. Raises OSError."""
    pid, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return pid, user


async def silent(folders: Directories) -> bool:
    """Whether nobody listens on the control socket, within a bounded time.

    A process that dies has no command line any more, by which it is found, before its last thread lets go.
    """
    with anyio.move_on_after(GONE_SECONDS):
        while await anyio.to_thread.run_sync(listener, folders) is not None:
            await anyio.sleep(POLL_SECONDS)
        return True
    return False


def arguments(pid: int) -> tuple[str, ...]:
    """The command line of a process; empty if it is gone."""
    try:
        words = bounded.read_bytes(PROC / str(pid) / "cmdline", COMMAND_BYTES).split(b"\0")
    except OSError:
        return ()
    return tuple(os.fsdecode(word) for word in words)


def _found(program: str, pipe: Path, *, pods: bool = False) -> Iterator[Process]:
    """Without `pods` nothing is read for which a pod's process can have its reader wait."""
    variable = os.fsencode(f"{PIPE_DIRECTORY}={pipe}")
    own = cgroups_of(PROC / "self")
    for folder in folders(PROC):
        try:
            look = partial(_looks_like, folder, program, variable)
            if outside_pods(cgroups_of(folder), own):
                found = look()
            else:
                found = bounded.call(str(folder), look, bounded.SECONDS) if pods else None
        except OSError:
            continue  # gone, or a kernel thread, or one that keeps its readers waiting
        if found:
            yield found


def _looks_like(folder: Path, program: str, variable: bytes) -> Process | None:
    """The process, if it has such a command line and environment. Raises OSError.

    The control program without `-d` or `-f` is one of its sessions, and no daemon.
    """
    # Cheap first: most processes are recognised by their command line.
    words = bounded.read_bytes(folder / "cmdline", COMMAND_BYTES).split(b"\0")
    if not any(os.path.basename(os.fsdecode(word)) == program for word in words[:2]):  # noqa: PTH119
        return None
    if variable not in bounded.read_bytes(folder / "environ", ENVIRONMENT_BYTES).split(b"\0"):
        return None
    if program == CONTROL and not {b"-d", b"-f"} & set(words):
        return None
    return identify(int(folder.name))


def cgroups_of(process: Path) -> str:
    """The cgroups of a process, by its folder. Raises OSError."""
    return (process / "cgroup").read_bytes().decode(errors="replace")


def _own(pid: int, root: bool = False) -> bool:
    """Whether a process is in our PID namespace and in no foreign container; with `root`, runs as we do."""
    try:
        # First: what else is shown of a pod's process may never come.
        if not outside_pods(*(cgroups_of(PROC / each) for each in (str(pid), "self"))):
            return False
        if (PROC / str(pid) / "ns" / "pid").readlink() != (PROC / "self" / "ns" / "pid").readlink():
            return False
        return not root or effective_user(pid) == os.geteuid()
    except OSError:
        return False


def in_pods(pids: Collection[int]) -> bool:
    """Whether any of these is a process in a pod."""
    own = cgroups_of(PROC / "self")
    for pid in pids:
        with suppress(OSError):  # it has ended
            if not outside_pods(cgroups_of(PROC / str(pid)), own):
                return True
    return False


def outside_pods(cgroups: str, own: str) -> bool:
    """Whether `/proc/<pid>/cgroup` belongs to a process that the agent started, or to one in no pod."""
    return started_by_agent(cgroups, own) or container_of(cgroups) is None


def user_ids(pid: int, proc: Path = PROC) -> tuple[int, ...]:
    """Real, effective, saved and file system user ID of a process. Raises OSError.

    The owner of its folder in /proc is not: that is root for a process that is not dumpable (proc(5)).
    """
    return status_numbers(proc / str(pid) / "status", b"Uid:")


def status_numbers(status: Path, name: bytes) -> tuple[int, ...]:
    """The numbers of a line of `/proc/<pid>/status`. Raises OSError: the process has ended."""
    # The kernel keeps line feeds out of a process's name, but no other end of a line.
    for line in status.read_bytes().split(b"\n"):
        if line.startswith(name):
            return tuple(int(word) for word in line.split()[1:])
    raise ProcessLookupError(f"{status} has no line {name.decode()}")


def effective_user(pid: int, proc: Path = PROC) -> int:
    """The user ID that a process acts as. Raises OSError."""
    return user_ids(pid, proc)[1]
