"""Faults in the logs. The lines follow NVIDIA's documentation on MPS error handling."""

from pathlib import Path

import pytest

from agent.mps import daemon_logs
from agent.mps.daemon_logs import ServerLog, Tail

FAULT = [
    "[2026-11-21 10:00:00.001 Server  6472] Server is handling a fatal GPU error.",
    "[2026-11-21 10:00:00.002 Server  6472] Status of client {9741, 1} is INACTIVE",
    "[2026-11-21 10:00:00.003 Server  6472] The following devices",
    "[2026-11-21 10:00:00.003 Server  6472] 0",
    "[2026-11-21 10:00:00.004 Server  6472] The following clients have a sticky error set:",
    "[2026-11-21 10:00:00.005 Server  6472] {9741, 1}",
    "[2026-11-21 10:00:00.006 Server  6472] {9743, 2}",
]
RECOVERY = [
    "[2026-11-21 10:00:02.000 Server  6472] Client {9741, 1} exit",
    "[2026-11-21 10:00:02.000 Server  6472] Destroy server context on device 0",
    "[2026-11-21 10:00:02.100 Server  6472] Creating server context on device 0 (NVIDIA H200)",
]


def seen(log: ServerLog) -> tuple[str | None, set[int]]:
    return log.fault, set(log.culprits)


def test_fault_with_its_clients_and_recovery() -> None:
    log = ServerLog()
    log.feed(["[2026-11-21 09:59:00.000 Server  6472] Creating server context on device 0"])
    assert seen(log) == (None, set())
    log.feed(FAULT[:3])
    assert seen(log) == ("its log reports a fatal GPU error", {9741})
    log.feed(FAULT[3:])
    assert seen(log)[1] == {9741, 9743}
    log.feed(RECOVERY[:2])
    assert seen(log)[0]
    log.feed(RECOVERY[2:])
    assert seen(log) == (None, set())


def test_end_of_the_server_ends_the_fault_and_a_bad_end_is_counted() -> None:
    log = ServerLog()
    log.feed(FAULT)
    log.feed(["[2026-11-21 10:00:03.000 Control  6470] Server 6472 exited with status 1"])
    assert log.fault is None
    assert log.failed_servers == 1
    log.feed(["[2026-11-21 10:00:04.000 Control  6470] Server 6499 exited with status 0"])
    assert log.failed_servers == 1


def test_tail_reads_each_line_once_through_growth_truncation_and_replacement(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    tail = Tail(path)
    assert tail.lines() == []
    path.write_text("one\ntwo\nthr")
    assert tail.lines() == ["one", "two"]
    with path.open("a") as file:
        file.write("ee\n")
    assert tail.lines() == ["three"]
    assert tail.lines() == []
    path.write_text("new\n")
    assert tail.lines() == ["new"]
    path.unlink()
    assert tail.lines() == []
    replacement = tmp_path / "other"
    replacement.write_text("another file, longer than the one before\n")
    replacement.rename(path)
    assert tail.lines() == ["another file, longer than the one before"]


def test_a_large_file_is_begun_anew_and_its_words_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_logs, "LARGE_BYTES", 20)
    path = tmp_path / "control.log"
    tail = Tail(path)
    path.write_text("a line of some length\nthe beginning of ano")
    assert tail.lines() == ["a line of some length"]
    assert path.read_text() == ""
    assert (tmp_path / "control.log.1").read_text() == "a line of some length\nthe beginning of ano"
    with path.open("a") as file:
        file.write("ther\nlast\n")
    assert tail.lines() == ["the beginning of another", "last"]


def test_a_line_without_end_is_not_kept(tmp_path: Path) -> None:
    """A writer of the fifo of the log may leave out every line feed."""
    path = tmp_path / "server.log"
    tail = Tail(path)
    for _ in range(8):
        with path.open("a") as file:
            file.write("x" * daemon_logs.MOST_BYTES)
        assert tail.lines() == []
    with path.open("a") as file:
        file.write("\nthe next line\n")
    endless, following = tail.lines()
    assert len(endless) == daemon_logs.LONGEST_LINE_BYTES
    assert following == "the next line"
