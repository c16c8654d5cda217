"""Calls that do not return: nobody waits for them for long, and they are not made twice."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.kit import bounded
from agent.kit.bounded import Late
from tests.pace import scaled


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_what_is_late_is_begun_again_only_once_it_has_returned(
    gate: threading.Event, logs: list[Any]
) -> None:
    made: list[int] = []

    def act() -> bool:
        made.append(1)
        return gate.wait(10)

    for _ in range(3):
        with pytest.raises(Late):
            bounded.call("late", act, 0.01)
    until = time.monotonic() + scaled(10)
    while not made and time.monotonic() < until:
        time.sleep(0.001)
    assert len(made) == 1
    assert [each["event"] for each in logs] == ["look_not_answered"]  # named once
    gate.set()
    until = time.monotonic() + scaled(10)
    while time.monotonic() < until:
        try:
            assert bounded.call("late", act, 10)
            break
        except Late:
            time.sleep(0.001)
    assert len(made) == 2


def test_so_many_threads_wait_and_no_more(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "_calls", bounded._Calls())
    monkeypatch.setattr(bounded, "MOST_LATE", 2)
    before = set(threading.enumerate())  # one of an earlier test may end meanwhile
    for key in range(5):
        with pytest.raises(Late):
            bounded.call(key, lambda: gate.wait(10), 0.001)
    assert len(set(threading.enumerate()) - before) == 2


def test_a_call_s_own_failure_is_the_caller_s() -> None:
    with pytest.raises(ZeroDivisionError):
        bounded.call("fails", lambda: 1 // 0, 10)


def test_of_a_file_of_proc_the_beginning_is_read_if_it_comes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "maps")
    with pytest.raises(Late):
        bounded.read(tmp_path, "maps", 10, 0.01)
    os.close(os.open(tmp_path / "maps", os.O_WRONLY))
    (tmp_path / "status").write_bytes(b"0123456789abc")
    assert bounded.read(tmp_path, "status", 10, 10) == b"0123456789"
