"""Wakes that a probe of an MPS daemon does without: it comes every few seconds for each GPU."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agent.mps import compute_mode, connections, control_commands
from agent.mps.compute_mode import RECORD, ComputeModes, ExclusiveMode
from agent.mps.connections import SUSPICION_SECONDS, Guard, PeersSeen, SilentPeers
from agent.mps.control_commands import session
from agent.mps.daemon_parts import DaemonParts, Options, StatusPublisher
from agent.mps.directories import Directories
from agent.mps.mps_errors import MpsError, ProgramMissing
from agent.mps.processes import Process
from agent.nvml.port import ComputeMode
from tests.unit.mps.test_connections import Daemon, looked
from tests.unit.mps.test_session import script
from tests.virtual_time import in_virtual_time


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    found = Daemon(tmp_path / "control")
    yield found
    found.close()


class Looks:
    """A guard, and how often it looked: in no thread, whose time is not virtual."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(anyio.to_thread, "run_sync", self._run)
        part: Any = self
        publisher = StatusPublisher("GPU-1", lambda *_: None)
        self.guard = Guard(DaemonParts(part, Directories(Path("/x")), part, part, publisher, Options(), part))
        self.guard._peers = part
        self.count = 0

    async def _run(self, look: Callable[[Process], PeersSeen], daemon: Process) -> PeersSeen:
        return look(daemon)

    def look(self, _daemon: Process) -> PeersSeen:
        self.count += 1
        return PeersSeen((), None)


@in_virtual_time
async def test_only_a_question_that_waits_has_the_guard_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    async with anyio.create_task_group() as group:
        group.start_soon(looks.guard.run, Process(1, 1))
        with looks.guard.asking():
            await anyio.sleep(SUSPICION_SECONDS / 2)
        await anyio.sleep(3 * SUSPICION_SECONDS)
        assert looks.count == 0
        with looks.guard.asking(), anyio.fail_after(5):
            while not looks.count:
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()


@in_virtual_time
async def test_a_question_that_cannot_be_put_has_the_guard_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails at once, and the daemon, which has heard nothing, logs nothing: no other sign comes."""
    looks = Looks(monkeypatch)
    async with anyio.create_task_group() as group:
        group.start_soon(looks.guard.run, Process(1, 1))
        for error in (MpsError("the compute mode cannot be read"), ProgramMissing("no program")):
            seen = looks.count
            with pytest.raises(MpsError), looks.guard.asking():
                raise error
            with anyio.fail_after(5):
                while looks.count == seen:
                    await anyio.sleep(0.01)
        group.cancel_scope.cancel()


@in_virtual_time
async def test_a_sign_of_the_log_is_not_lost_beside_a_question_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = Looks(monkeypatch)
    async with anyio.create_task_group() as group:
        group.start_soon(looks.guard.run, Process(1, 1))
        with looks.guard.asking(), anyio.fail_after(5):
            while not looks.count:
                await anyio.sleep(0.01)
        seen = looks.count
        looks.guard.suspect()
        with anyio.fail_after(5):
            while looks.count == seen:
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()


def test_a_daemon_that_waits_for_nobody_is_known_again_by_its_socket(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SILENT_SECONDS", 0.004)
    monkeypatch.setattr(connections, "HOST_SECONDS", 0.004)
    peers = SilentPeers(tmp_path)
    copies: list[int] = []
    taken = connections._taken

    def counted(pidfd: int, number: int, inode: int) -> AbstractContextManager[socket.socket | None]:
        copies.append(number)
        return taken(pidfd, number, inode)

    monkeypatch.setattr(connections, "_taken", counted)
    until = time.monotonic() + 10
    while not copies and time.monotonic() < until:  # it says that it is ready before it waits
        assert peers.look(daemon.process).again is None
    for _ in range(3):
        assert peers.look(daemon.process).again is None
    assert len(copies) == 1
    with daemon.connected(), daemon.connected():
        assert len(looked(peers, daemon, 1)) == 1, "who comes later is seen all the same"


async def test_a_short_session_waits_for_its_end_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_commands, "FEW_WORDS_SECONDS", 10.0)
    waits = []
    real = anyio.wait_readable

    async def counted(descriptor: int) -> None:
        waits.append(descriptor)
        await real(descriptor)

    monkeypatch.setattr("agent.mps.control_commands.anyio.wait_readable", counted)
    assert await session(script(tmp_path, "read word; echo $word; echo no >&2"), "one\n", {}) == (
        "one",
        "no",
    )
    assert len(waits) == 1


async def test_the_note_of_a_compute_mode_is_looked_at_once_a_minute_and_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Modes(ComputeModes):
        async def get(self, uuid: str) -> ComputeMode:
            del uuid
            return ComputeMode.EXCLUSIVE_PROCESS

    now, looks = 1000.0, 0
    monkeypatch.setattr("agent.mps.compute_mode.anyio.current_time", lambda: now)
    exclusive = ExclusiveMode("GPU-1", Modes(), tmp_path)
    real = exclusive.ours

    async def ours() -> bool | None:
        nonlocal looks
        looks += 1
        return await real()

    monkeypatch.setattr(exclusive, "ours", ours)
    await exclusive.hold(inherited=True)
    for _ in range(5):
        now += 5.0
        await exclusive.hold()
    assert looks == 1
    (tmp_path / RECORD).unlink()
    now += compute_mode.NOTE_SECONDS
    await exclusive.hold(inherited=True)
    assert await real() is True
