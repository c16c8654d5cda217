"""The process that a daemon waits for, by the kernel: the daemon is played by one of the same shape."""

import errno
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.model.cgroup import ContainerRef
from agent.mps import connections, processes
from agent.mps.connections import Guard, Peer, PeersSeen, SilentPeers
from agent.mps.control_commands import SESSIONS
from agent.mps.daemon_parts import DaemonParts, EventReason, Options, StatusPublisher
from agent.mps.directories import Directories
from agent.mps.processes import Process
from tests.pace import scaled

# Hears one connection at a time, and "more" of it again and again. On "start" it waits for the word of a
# server of its own.
DAEMON = """
import os, socket, sys, time
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
listener.listen(128)
print("ready", flush=True)
while True:
    client, _ = listener.accept()
    while (said := client.recv(100)) == b"more":
        client.send(said)
    if said == b"start":
        mine, servers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            sys.stdin.readline()
            servers.send(b"ready")
            os._exit(0)
        mine.recv(100)
        client.send(b"server")
    client.close()
"""


class Daemon:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._player = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", DAEMON, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._player.stdout
        assert self._player.stdout.readline() == "ready\n"
        found = processes.identify(self._player.pid)
        assert found
        self.process: Process = found

    def connected(self) -> socket.socket:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one.settimeout(10)
        one.connect(str(self.path))
        return one

    def serve(self) -> None:
        """The server is up."""
        assert self._player.stdin
        self._player.stdin.write("\n")
        self._player.stdin.flush()

    def close(self) -> None:
        self._player.kill()
        self._player.communicate()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    found = Daemon(tmp_path / "control")
    yield found
    found.close()


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SilentPeers:
    monkeypatch.setattr(connections, "SILENT_SECONDS", 0.004)
    monkeypatch.setattr(connections, "HOST_SECONDS", 0.004)
    return SilentPeers(tmp_path)


def looked(peers: SilentPeers, daemon: Daemon, cuts: int = 0) -> list[connections.Peer]:
    """Everybody who was cut off, until the daemon waits for nobody, or for one with all the time.

    As long as it takes until so many `cuts` are seen: the daemon may not have come to wait yet.
    """
    cut: list[connections.Peer] = []
    looks, until = 0, time.monotonic() + scaled(10)
    while looks < 40 or (len(cut) < cuts and time.monotonic() < until):
        cut += peers.look(daemon.process).cut
        looks += 1
        time.sleep(0.005)
    return cut


def test_who_says_nothing_is_cut_off_and_who_waits_behind_is_heard(
    peers: SilentPeers, daemon: Daemon
) -> None:
    with daemon.connected() as silent, daemon.connected() as other:
        other.send(b"hello")
        cut = looked(peers, daemon, 1)
        assert [each.pid for each in cut] == [os.getpid()]
        assert silent.recv(1) == b""
        assert other.recv(1) == b""  # it was heard to its end


def test_who_keeps_nobody_waiting_may_be_silent(peers: SilentPeers, daemon: Daemon) -> None:
    """A version that hears others meanwhile has its clients' connections open for as long as they live."""
    with daemon.connected() as silent:
        assert looked(peers, daemon) == []
        with daemon.connected():
            assert len(looked(peers, daemon, 1)) == 1
        assert silent.recv(1) == b""


def test_a_client_that_waits_for_its_server_is_never_cut_off(peers: SilentPeers, daemon: Daemon) -> None:
    with daemon.connected() as client:
        client.send(b"start")
        while peers._seen is None:
            peers.look(daemon.process)
        assert peers._seen.peer.pid == daemon.process.pid
        with daemon.connected():
            assert looked(peers, daemon) == []
        daemon.serve()
        assert client.recv(100) == b"server"


def test_a_connection_whose_process_has_ended_is_known_by_no_other(
    peers: SilentPeers, daemon: Daemon
) -> None:
    """Its number may be a neighbour's by now: a tenant would have others blamed."""
    code = "import socket, sys; socket.socket(fileno=int(sys.argv[2])).connect(sys.argv[1])"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as handed_on:
        number = handed_on.fileno()
        words = [sys.executable, "-I", "-S", "-c", code, str(daemon.path), str(number)]
        subprocess.run(words, pass_fds=(number,), check=True)
        with daemon.connected() as behind:
            behind.send(b"hello")
            (peer,) = looked(peers, daemon, 1)
    assert peer.ended
    assert "which has ended" in str(peer)


class Connection:
    """One of the test's own process, by a kernel that answers so about the process itself."""

    def __init__(self, answer: int) -> None:
        self._answer = answer

    def getsockopt(self, _level: int, name: int, _size: int = 0) -> bytes:
        if name == connections._SO_PEERPIDFD:
            raise OSError(self._answer, os.strerror(self._answer))
        return struct.pack("3i", os.getpid(), 1000, 0)


@pytest.mark.parametrize("answer", [errno.ESRCH, errno.EINVAL, errno.ENODATA])
def test_every_kernel_s_word_for_a_process_that_has_ended_is_understood(answer: int) -> None:
    connection: Any = Connection(answer)
    assert connections._peer(connection).ended


def test_a_kernel_that_does_not_say_who_lives_has_nobody_believed_for_ever(
    peers: SilentPeers, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_gone", lambda _: None)
    monkeypatch.setattr(connections, "SESSIONS", {os.getpid()})
    with daemon.connected(), daemon.connected() as behind:
        behind.send(b"hello")
        (peer,) = looked(peers, daemon, 1)
    assert "Linux before 6.5 does not say" in str(peer)


def test_a_session_s_patience_ends_with_the_session(peers: SilentPeers, daemon: Daemon) -> None:
    with daemon.connected(), daemon.connected() as behind:
        behind.send(b"hello")
        SESSIONS.add(os.getpid())
        try:
            assert looked(peers, daemon) == []
        finally:
            SESSIONS.discard(os.getpid())
        assert len(looked(peers, daemon, 1)) == 1


def test_a_client_that_speaks_is_not_cut_off_unless_it_finds_no_end(
    peers: SilentPeers, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoken(words: int) -> int:
        with daemon.connected() as talker, daemon.connected():
            for word in range(words):
                talker.send(b"more")
                if talker.recv(10) != b"more" or peers.look(daemon.process).cut:
                    return word
                time.sleep(0.005)
        return words

    for name in ("SILENT_SECONDS", "HOST_SECONDS"):
        monkeypatch.setattr(connections, name, 0.03)
    monkeypatch.setattr(connections, "MOST_PATIENCE", 10_000)
    assert spoken(15) == 15  # each in time, and all of them longer than somebody may be silent
    monkeypatch.setattr(connections, "MOST_PATIENCE", 1)
    assert spoken(1000) < 1000


def test_patience_is_shorter_only_with_who_was_silent_again_and_again(tmp_path: Path) -> None:
    peers, peer = SilentPeers(tmp_path), Peer(os.getpid(), 1000, container=ContainerRef("uid", "container"))
    found = []
    for _ in range(4):
        found.append(peers._patience(peer, 1, 10.0))
        peers._remember(peer.group, 10.0)
    assert found == [0.5, 0.5, 0.5, 0.05]
    assert peers._patience(peer, 1, 10.0 + connections.KNOWN_SECONDS + 1) == 0.5


def test_where_the_kernel_shows_nothing_it_is_said(
    daemon: Daemon, peers: SilentPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_PIDFD_GETFD", 1 << 20)
    with daemon.connected(), pytest.raises(OSError, match="Function not implemented"):
        looked(peers, daemon)


class Scene:
    """A guard whose looks are played."""

    def __init__(self) -> None:
        self.told: list[tuple[EventReason, str]] = []
        self.blamed: list[int] = []
        self.next: PeersSeen | OSError = PeersSeen((), None)
        self.prolonged = 0
        publisher = StatusPublisher("GPU-1", self._report)
        self.publisher = publisher
        part: Any = self
        self.guard = Guard(DaemonParts(part, Directories(Path("/x")), part, part, publisher, Options(), part))
        self.guard._peers = part

    def _report(self, kind: EventReason, uuid: str, message: str, pids: frozenset[int] = frozenset()) -> None:
        del uuid
        self.told.append((kind, message))
        self.blamed += sorted(pids)

    def look(self, _daemon: Process) -> PeersSeen:
        if isinstance(self.next, OSError):
            raise self.next
        return self.next

    def prolong(self) -> None:
        self.prolonged += 1

    async def see(self, look: PeersSeen | OSError) -> None:
        self.next = look
        await self.guard._look(Process(1, 1))


async def test_an_agent_that_may_not_look_says_so_in_its_status_until_it_may() -> None:
    scene = Scene()
    await scene.see(PermissionError(1, "Operation not permitted"))
    assert "cannot be cut off" in scene.publisher.now.unguarded
    assert "Operation not permitted; it takes Linux 5.6" in scene.publisher.now.unguarded
    await scene.see(PeersSeen((), None))
    assert not scene.publisher.now.unguarded
    await scene.see(ProcessLookupError())  # the daemon ended: that is no lack of rights
    assert not scene.publisher.now.unguarded


async def test_each_is_counted_and_they_are_named_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, now = Scene(), 1000.0
    monkeypatch.setattr("agent.mps.connections.anyio.current_time", lambda: now)
    pods = [ContainerRef(f"uid-{number}", f"container-{number}") for number in range(7)]
    await scene.see(PeersSeen((Peer(7, 1000, container=pods[0]), Peer(8, 1000, container=pods[0])), None))
    await scene.see(PeersSeen(tuple(Peer(9, 1000, container=each) for each in pods), None))
    assert scene.publisher.now.cut == 9
    assert scene.prolonged == 2
    now += 61
    await scene.see(PeersSeen((Peer(9, 1000, container=pods[1]),), None))
    (first, second) = scene.told
    assert first[0] is EventReason.SILENT
    assert "process 8 of user 1000 in pod uid-0 connected" in first[1]
    assert "2 connections were cut off" in first[1]
    assert "and 2 more connected" in second[1]
    assert "8 connections were cut off" in second[1]


async def test_no_pod_is_blamed_for_a_number_that_may_be_another_s() -> None:
    scene = Scene()
    known = Peer(9, 1000, container=ContainerRef("uid", "container"))
    await scene.see(PeersSeen((known, Peer(7, 1000, ended=True), Peer(8, 1001, sure=False)), None))
    assert scene.blamed == [9]
    assert "process 7 of user 1000, which has ended," in scene.told[0][1]
