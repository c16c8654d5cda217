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
    now = [5.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    pieces = Courtesy(lambda: True).in_pieces(range(1000))
    assert list(islice(pieces, 1)) == [0]
    assert tasks.BEHIND_SECONDS <= now[0] - 5.0 < tasks.BEHIND_SECONDS + 2 * tasks.LOOK_SECONDS
    stood = now[0]
    assert (len(list(pieces)), now[0]) == (999, stood)


def test_nobody_waits_where_nobody_is_known_who_might() -> None:
    assert list(Courtesy().in_pieces("ab")) == ["a", "b"]
