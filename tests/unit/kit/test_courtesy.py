"""Work that nobody waits for stands back behind calls that pods wait for, and for a moment only."""

import threading
import time
from itertools import islice

import pytest

from agent.kit import tasks
from agent.kit.tasks import Courtesy


def test_work_in_a_thread_goes_on_as_soon_as_nobody_waits() -> None:
    waits, done = threading.Event(), list[int]()
    waits.set()
    thread = threading.Thread(target=lambda: done.extend(Courtesy(waits.is_set).in_pieces(range(3))))
    thread.start()
    time.sleep(tasks.LOOK_SECONDS)
    before = list(done)
    waits.clear()
    thread.join()
    assert (before, done) == ([], [0, 1, 2])


def test_all_pieces_together_stand_back_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    pieces = Courtesy(lambda: True).in_pieces(range(1000))
    assert list(islice(pieces, 1)) == [0]
    assert sum(slept) == pytest.approx(tasks.BEHIND_SECONDS, abs=tasks.LOOK_SECONDS)
    stood = len(slept)
    assert (len(list(pieces)), len(slept)) == (999, stood)


def test_nobody_waits_where_nobody_is_known_who_might() -> None:
    assert list(Courtesy().in_pieces("ab")) == ["a", "b"]
