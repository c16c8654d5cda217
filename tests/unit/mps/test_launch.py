"""Events while a daemon is looked for."""

import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

from agent.kit import programs
from agent.kit.tasks import Cell
from agent.model.gpu import Gpu
from agent.model.modes import Assignment
from agent.mps import daemon_manager, launch, launcher, processes
from agent.mps.binary import NO_PROGRAM
from agent.mps.daemon import Daemon
from agent.mps.daemon_parts import DaemonParts, EventReason, Options, StatusPublisher
from agent.mps.directories import Directories
from agent.mps.launch import Starter
from agent.mps.mps_errors import StartFailed
from agent.mps.processes import Process
from tests.pace import scaled


async def test_a_crowd_of_false_daemons_is_one_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any pod may start thousands: an event for each would push all others out."""
    crowd = [Process(number, 1) for number in range(100, 1100)]
    monkeypatch.setattr(processes, "impostors", lambda _: tuple(crowd))
    monkeypatch.setattr(processes, "daemon_of", lambda _: None)
    told: list[tuple[EventReason, str, frozenset[int]]] = []
    publisher = StatusPublisher(
        "GPU-1", lambda kind, _uuid, message, pids: told.append((kind, message, pids))
    )
    unused: Any = None
    parts = DaemonParts(unused, Directories(tmp_path), unused, unused, publisher, Options(), unused)
    starter = Starter(NO_PROGRAM, parts, multi_user={})
    for _ in range(2):
        assert await starter.adopted() is None
    ((kind, message, pids),) = told
    assert kind is EventReason.IMPOSTOR
    assert message.startswith("process 100, 101, ")
    assert "and 990 more: looks like its MPS control daemon" in message
    assert pids == frozenset(range(100, 100 + launch.MOST_NAMED))
    crowd.append(Process(2000, 1))
    assert await starter.adopted() is None
    assert [kind for kind, *_ in told] == [EventReason.IMPOSTOR] * 2
    assert told[1][1].startswith("process 2000: looks like")


async def test_a_program_that_writes_without_end_is_no_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = tmp_path / "endless.py"
    endless.write_text("while True:\n    print('x' * 4096)\n")
    monkeypatch.setattr(launcher, "__file__", str(endless))
    code, output, errors = await launch._run({})
    assert (code, output) == (None, "")
    assert errors.endswith(f"wrote more than {launch.MOST_OUTPUT_BYTES} bytes")


async def test_a_launcher_that_outlives_its_kill_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck: list[int] = []
    hangs = tmp_path / "hangs.py"
    hangs.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(launcher, "__file__", str(hangs))
    monkeypatch.setattr(launch, "START_SECONDS", 0.1)
    monkeypatch.setattr(programs, "KILLED_SECONDS", 0.1)
    monkeypatch.setattr(programs, "_left", {})
    monkeypatch.setattr(os, "killpg", lambda pid, _: stuck.append(pid))
    with anyio.fail_after(scaled(5)):
        code, _, errors = await launch._run({})
    (pid,) = stuck
    os.kill(pid, signal.SIGKILL)
    assert (code, errors) == (None, "it did not go into the background within 0.1 s")
    with anyio.fail_after(scaled(5)):
        while any(each.returncode is None for each in programs._left.values()):
            await anyio.sleep(0.01)


async def test_a_supervision_that_hangs_holds_no_gpu_in_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = anyio.Event()
    unused: Any = None
    gpu = Gpu("GPU-1", 0, 0, "0000:00:00.0", "NVIDIA H200", 143771 << 20, (9, 0))

    async def hang(self: Daemon) -> None:
        async with self.folders.locked():
            with anyio.CancelScope(shield=True):
                await goes_on.wait()

    monkeypatch.setattr(Daemon, "run", hang)
    monkeypatch.setattr(daemon_manager, "OVER_SECONDS", seconds := min(scaled(0.1), 1.0))
    manager = daemon_manager.DaemonManager(
        tmp_path,
        lambda: NO_PROGRAM,
        unused,
        lambda *_: None,
        Options(cgroups=tmp_path),
        set_up_seconds=seconds,
    )
    async with anyio.create_task_group() as group:
        group.start_soon(manager.run, Cell(Assignment()))
        with anyio.fail_after(scaled(5)), pytest.raises(StartFailed):
            await manager.set_up(gpu)
        assert f"is held by process {os.getpid()}" in manager.leftovers[gpu.uuid]
        goes_on.set()
        group.cancel_scope.cancel()
