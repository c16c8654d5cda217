"""Events while a daemon is looked for."""

from pathlib import Path
from typing import Any

import pytest

from agent.mps import launch, launcher, processes
from agent.mps.binary import NO_PROGRAM
from agent.mps.daemon_parts import DaemonParts, EventReason, Options, StatusPublisher
from agent.mps.directories import Directories
from agent.mps.launch import Starter
from agent.mps.processes import Process


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
