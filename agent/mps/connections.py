"""Connections to a control daemon and to its server: those that keep everybody else waiting, and their end.

The daemon hears one connection at a time, and waits for its next message without a limit: a process that
connects and says nothing stops all others. Whom it waits for the kernel shows, by the descriptor that its
system call names (/proc/<pid>/task/<tid>/syscall). A client whose server is being started is never found so:
meanwhile the daemon waits for its server, or in poll(2).

Cut off is the connection alone, and only once somebody waits behind it: by shutdown(2) on a copy of the
daemon's descriptor. For the daemon, its client has left.

Who is connected to a server uses it: its end is the end of their work.
"""

import asyncio
import ctypes
import errno
import math
import os
import re
import select
import socket
import time
from collections.abc import Collection, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from agent.model.cgroup import ContainerRef, container_of
from agent.mps import processes
from agent.mps.control_commands import SESSIONS
from agent.mps.daemon_parts import DaemonParts, EventReason
from agent.mps.mps_errors import MpsError
from agent.mps.processes import Process

log = structlog.get_logger()

SUSPICION_SECONDS = 0.25  # after a sign that somebody connected, until it is looked who is waited for
SILENT_SECONDS = 0.5  # a client sends its first message at once
HOST_SECONDS = 30.0  # for root on the node, who may type
ENDED_SECONDS = 0.005  # for those of processes that have ended: hundreds may queue
# For the next ones of a container of which so many were cut off: one that seldom runs needs more time.
AGAIN_SECONDS, AGAIN_AFTER = 0.05, 3
MOST_PATIENCE = 20  # so often its patience somebody may go on who says a word in time, while others wait
WATCHED_SECONDS = 0.1  # between two looks at one that has been silent so long, until somebody waits behind it
BETWEEN_SECONDS = 0.05  # the daemon goes on to the next connection
KNOWN_SECONDS = 60.0  # so long that is remembered
ROUND_SECONDS = 0.5  # in a thread at once
REPORT_SECONDS = 60.0
NOBODY = -1.0  # in place of a time: it waits for connections, and for none of them
MOST_NAMED, MOST_USERS_NAMED = 5, 10
_PIDFD_GETFD = 438  # on every architecture of Linux
_SO_PEERPIDFD = 77  # since Linux 6.5
_SOCKET = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Peer:
    """Who made a connection, as the kernel noted it then."""

    pid: int
    user: int
    ended: bool = False  # the connection was handed on, or its process is about to go
    sure: bool = True  # False: the number may be another's by now, which Linux before 6.5 does not say
    container: ContainerRef | None = None

    @property
    def group(self) -> str:
        """Its container, whose patience it uses up: a process is replaced in no time."""
        return (
            self.container.container_id or self.container.pod_uid if self.container else f"user {self.user}"
        )

    def __str__(self) -> str:
        if self.ended:
            return f"process {self.pid} of user {self.user}, which has ended,"
        where = f"pod {self.container.pod_uid}" if self.container else "no pod"
        unsure = "" if self.sure else " (or one before it that had its number: Linux before 6.5 does not say)"
        return f"process {self.pid} of user {self.user} in {where}{unsure}"


@dataclass(frozen=True, slots=True)
class PeersSeen:
    cut: tuple[Peer, ...]
    again: float | None  # in so many seconds; None: the daemon waits for nobody


@dataclass(frozen=True, slots=True)
class _Sighting:
    inode: int
    first: float
    since: float  # without a message
    pauses: int  # of the daemon: one more, and it has heard something
    peer: Peer
    patience: float

    @property
    def end(self) -> float:
        return min(self.since + self.patience, self.first + MOST_PATIENCE * self.patience)


class SilentPeers:
    """Looks at one daemon's connections. All of it blocks, and raises OSError where the kernel shows none."""

    def __init__(self, pipe: Path) -> None:
        self._pipe = pipe
        self._seen: _Sighting | None = None
        self._known: dict[str, tuple[int, float]] = {}  # groups that were silent, how often, and when
        self._last = 0.0  # when somebody was cut off
        self._stranger: Process | None = None  # the last one outside of pods that was found to be no server
        self._listening: tuple[int, _Sighting] | None = None  # by PID, a daemon as it waits for nobody

    def look(self, daemon: Process) -> PeersSeen:
        """Cut off who has been waited for too long. Bounded."""
        cut: list[Peer] = []
        over: set[int] = set()
        until = time.monotonic() + ROUND_SECONDS
        descriptor = os.pidfd_open(daemon.pid)
        try:
            while daemon.alive():
                held, now = _waited_for(daemon.pid), time.monotonic()
                if held is None:
                    if now > until or now - self._last > BETWEEN_SECONDS:
                        break
                    time.sleep(ENDED_SECONDS / 10)
                    continue
                number, inode = held
                left = ENDED_SECONDS / 10  # one that was cut off is about to be let go of
                if inode not in over:
                    self._seen = self._followed(descriptor, daemon.pid, number, inode, now)
                    if self._seen is None and now <= until:
                        continue  # it waits for another one by now
                    if self._seen is None or self._seen.patience == NOBODY:
                        break
                    left = self._seen.end - now
                    if left <= 0 and not _kept_waiting(descriptor, daemon.pid):
                        return PeersSeen(tuple(cut), WATCHED_SECONDS)
                    if left <= 0:
                        if _cut(descriptor, number, inode):
                            cut.append(self._seen.peer)
                            self._remember(self._seen.peer.group, now)
                        over.add(inode)
                        self._seen = None
                        continue
                if left > 2 * ENDED_SECONDS or now > until:
                    return PeersSeen(tuple(cut), min(max(left, ENDED_SECONDS), SILENT_SECONDS))
                time.sleep(left)
        finally:
            os.close(descriptor)
        self._seen = None
        return PeersSeen(tuple(cut), BETWEEN_SECONDS if cut else None)

    def _followed(self, daemon: int, pid: int, number: int, inode: int, now: float) -> _Sighting | None:
        """The peer that it waits for, and since when it has heard no word of them."""
        if self._listening and (pid, inode) == (self._listening[0], self._listening[1].inode):
            return self._listening[1]  # as at nearly every look
        before = self._seen if self._seen and self._seen.inode == inode else None
        found = before
        # Who has more patience than others is asked for each time: it is theirs while they live.
        if found is None or found.patience > SILENT_SECONDS:
            found = self._sighted(daemon, pid, number, inode, now)
        if found is None or before is None:
            return found
        pauses = _pauses(pid)
        since = before.since if pauses == before.pauses else now
        return replace(found, first=before.first, since=since, pauses=pauses)

    def _remember(self, group: str, now: float) -> None:
        self._last = now
        self._known[group] = (self._known.get(group, (0, now))[0] + 1, now)

    def _sighted(self, daemon: int, pid: int, number: int, inode: int, now: float) -> _Sighting | None:
        pauses = _pauses(pid)
        with _taken(daemon, number, inode) as connection:
            if connection is None:
                return None
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                self._listening = pid, _Sighting(inode, now, now, pauses, Peer(pid, 0), NOBODY)
                return self._listening[1]
            peer = _peer(connection)
        patience = self._patience(peer, pid, now)
        # What may be another's number gives nobody all the time.
        return _Sighting(
            inode, now, now, pauses, peer, patience if peer.sure else min(patience, HOST_SECONDS)
        )

    def _patience(self, peer: Peer, daemon: int, now: float) -> float:
        if peer.ended:
            return ENDED_SECONDS
        if peer.pid in (daemon, *SESSIONS):
            return math.inf  # a session of ours has a deadline
        if peer.container is None and (processes.parent(peer.pid) == daemon or self._is_server(peer.pid)):
            return math.inf
        if peer.container is None and peer.user == 0:
            return HOST_SECONDS
        self._known = {group: (n, at) for group, (n, at) in self._known.items() if now - at <= KNOWN_SECONDS}
        often = self._known.get(peer.group, (0, now))[0] >= AGAIN_AFTER
        return min(AGAIN_SECONDS, SILENT_SECONDS) if often else SILENT_SECONDS

    def _is_server(self, pid: int) -> bool:
        process = processes.identify(pid)
        if process and process == self._stranger:
            return False  # hundreds of its connections may queue, and servers are looked for in all of /proc
        found = any(pid == each.pid for each in processes.servers(self._pipe))
        if not found:
            self._stranger = process
        return found


class Guard:
    """Cuts off silent peers of one daemon while `run` runs, and reports them."""

    def __init__(self, parts: DaemonParts) -> None:
        self._parts = parts
        self._peers = SilentPeers(parts.folders.pipe)
        self._sign = anyio.Event()
        self._overdue = False  # an answer: it is looked without waiting
        self._problem: str | None = None
        self._unreported: list[Peer] = []
        self._reported = -REPORT_SECONDS

    def suspect(self) -> None:
        """Somebody may have connected: the log grew."""
        self._sign.set()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A question is under way: who keeps it waiting is looked for.

        One that is answered in time was kept waiting by nobody. The daemon logs it, which is a sign as well.
        One that fails may not have reached it.
        """
        timer = asyncio.get_running_loop().call_later(SUSPICION_SECONDS, self._is_overdue)
        try:
            yield
        except MpsError:
            self.suspect()
            raise
        finally:
            timer.cancel()

    def _is_overdue(self) -> None:
        self._overdue = True
        self._sign.set()

    async def run(self, daemon: Process) -> None:
        while True:
            await self._sign.wait()
            self._sign = anyio.Event()
            if not self._overdue:
                await anyio.sleep(SUSPICION_SECONDS)
            self._overdue = False
            while (again := await self._look(daemon)) is not None:
                await anyio.sleep(again)

    async def _look(self, daemon: Process) -> float | None:
        try:
            look = await anyio.to_thread.run_sync(self._peers.look, daemon)
        except (ProcessLookupError, FileNotFoundError):
            return None  # it has ended
        except OSError as error:
            problem = (
                "connections that say nothing cannot be cut off, and one of them keeps all other clients "
                f"waiting: {error.strerror}; it takes Linux 5.6 and an agent that may trace (privileged)"
            )
            if problem != self._problem:
                log.warning("mps_connections_not_seen", gpu=self._parts.publisher.uuid, problem=problem)
                self._problem = problem
            self._parts.publisher.unguarded(problem)
            return None
        self._problem = None
        self._parts.publisher.unguarded("")
        if look.cut:
            self._parts.control.prolong()
            self._report(look.cut)
        return look.again

    def _report(self, cut: Collection[Peer]) -> None:
        """Count each; name them once a minute."""
        self._parts.publisher.cut(len(cut))
        self._unreported = [*self._unreported, *cut][-1000:]
        now = anyio.current_time()
        if now - self._reported < REPORT_SECONDS:
            return
        self._reported = now
        by_group = {peer.group: peer for peer in self._unreported}
        named = list(by_group.values())[:MOST_NAMED]
        more = f" and {len(by_group) - len(named)} more" if len(by_group) > len(named) else ""
        self._parts.publisher.report(
            EventReason.SILENT,
            f"{'; '.join(map(str, named))}{more} connected to the MPS control daemon and said nothing, or "
            f"found no end, which keeps all other clients waiting: {len(self._unreported)} connections were "
            "cut off, and nothing else was ended",
            frozenset(peer.pid for peer in named if peer.sure and not peer.ended),
        )
        self._unreported = []


def peers_of(pid: int) -> frozenset[int]:
    """PIDs of those who are connected to a process's sockets. Blocks. Raises OSError."""
    descriptor = os.pidfd_open(pid)
    try:
        found = {_peer(each).pid for each in _sockets(descriptor, pid)}
    finally:
        os.close(descriptor)
    return frozenset(found - {0, pid})


def _waited_for(pid: int) -> tuple[int, int] | None:
    """The socket that a process waits for in a system call: its descriptor and its inode."""
    # Of its first thread alone, which hears all: a version that has one for each client keeps nobody waiting.
    with suppress(FileNotFoundError, ProcessLookupError):
        if processes.halted(pid):
            return None  # it is its peers who wait: for it, until it goes on
        # The call's number and its arguments; a word alone, or -1, outside of one.
        words = Path(f"/proc/{pid}/task/{pid}/syscall").read_text().split()
        if len(words) > 2 and (inode := _inode(pid, int(words[1], 16))) is not None:
            return int(words[1], 16), inode
    return None


def _pauses(pid: int) -> int:
    """How often a process's first thread has stopped to wait. Raises OSError: it has ended."""
    return processes.status_numbers(Path(f"/proc/{pid}/task/{pid}/status"), b"voluntary_ctxt_switches:")[0]


def _sockets(pidfd: int, pid: int) -> Generator[socket.socket, None, None]:
    """Copies of a process's local sockets, each for one turn."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            number = int(link.name)
            if (inode := _inode(pid, number)) is None:
                continue
            with _taken(pidfd, number, inode) as found:
                if found and found.family == socket.AF_UNIX:
                    yield found


def _kept_waiting(pidfd: int, pid: int) -> bool:
    """Whether connections to a process wait to be heard."""
    with closing(_sockets(pidfd, pid)) as found:
        return any(
            _readable(each.fileno())
            for each in found
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        )


def _readable(descriptor: int) -> bool:
    watch = select.poll()
    watch.register(descriptor, select.POLLIN)
    return bool(watch.poll(0))


def _inode(pid: int, number: int) -> int | None:
    """The inode of the socket that a descriptor is; None: it is no socket. Raises FileNotFoundError."""
    found = _SOCKET.fullmatch(str(Path(f"/proc/{pid}/fd/{number}").readlink()))
    return int(found[1]) if found else None


@contextmanager
def _taken(pidfd: int, number: int, inode: int) -> Iterator[socket.socket | None]:
    """A copy of a process's socket while the context is open; None: it is another thing by now."""
    libc = ctypes.CDLL(None, use_errno=True)
    copy: int = libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
    if copy < 0:
        code = ctypes.get_errno()
        error = OSError(code, os.strerror(code))
        if isinstance(error, ProcessLookupError) or code == 9:  # EBADF: it was closed meanwhile
            yield None
            return
        raise error
    try:
        same = os.fstat(copy).st_ino == inode
        if not same:
            yield None
            return
        with socket.socket(fileno=os.dup(copy)) as found:
            yield found
    finally:
        os.close(copy)


def _cut(pidfd: int, number: int, inode: int) -> bool:
    with _taken(pidfd, number, inode) as connection:
        if connection is None:
            return False
        with suppress(OSError):  # it has left by itself
            connection.shutdown(socket.SHUT_RDWR)
        return True


def _peer(connection: socket.socket) -> Peer:
    pid, user = processes.credentials(connection)
    gone = _gone(connection)
    if gone:
        return Peer(pid, user, ended=True)
    try:
        cgroups = processes.cgroups_of(Path(f"/proc/{pid}"))
    except OSError:
        return Peer(pid, user, ended=pid != 0)
    return Peer(pid, user, container=container_of(cgroups), sure=gone is not None)


def _gone(connection: socket.socket) -> bool | None:
    """Whether the process that connected has ended: its number may be another's by now. None: not known."""
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:  # before Linux 6.5
            return None
        # Of a process that nobody holds on to; EINVAL before Linux 6.16.
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENODATA):
            return True
        raise
    try:
        return _readable(pidfd)
    finally:
        os.close(pidfd)


async def use_of(parts: DaemonParts, servers: Collection[Process], known: Collection[int] = ()) -> str | None:
    """Why these servers are in use, or may be, in words; None: nobody uses them.

    `known` are PIDs of clients as the daemon last named them.
    """
    own = {each.pid for each in servers}
    own |= await anyio.to_thread.run_sync(_parents, servers)
    try:
        found = await anyio.to_thread.run_sync(_by_kernel, servers, known)
    except OSError as error:
        return f"who is connected to its server is not known: {error.strerror}"
    if found - own:
        return f"process {_named(found - own)} is a client of its server"
    try:
        users = await parts.compute.users(parts.publisher.uuid)
    except MpsError as error:
        return str(error)
    if users is None:
        return "the driver does not report who uses the GPU"
    if users - own:
        return f"process {_named(users - own)} uses the GPU"
    return None


def used_in_pods(servers: Collection[Process]) -> bool:
    """Whether a process in a pod is a client of these servers. Blocks. Raises OSError: that is not known."""
    return processes.in_pods(_by_kernel(servers, ()))


def _parents(servers: Collection[Process]) -> frozenset[int]:
    """Their daemons: a driver since 580 has them load libcuda, too."""
    found = (processes.parent(each.pid) for each in servers)
    return frozenset(pid for pid in found if pid is not None)


def _by_kernel(servers: Collection[Process], known: Collection[int]) -> frozenset[int]:
    found = frozenset(known)
    for each in servers:
        try:
            found |= peers_of(each.pid)
        except ProcessLookupError:
            continue  # it has ended
    return processes.remaining(found)


def _named(pids: Collection[int]) -> str:
    return ", ".join(map(str, sorted(pids)[:MOST_USERS_NAMED]))
