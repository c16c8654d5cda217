"""Holders as last known, and how old that is."""

from time import monotonic

import pytest

from agent.kit.tasks import Cell
from agent.model.holding import Holding, Record
from agent.status import report
from agent.status.report import LastHolders


def test_the_last_record_stays_and_gets_older(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = monotonic()
    monkeypatch.setattr(report, "monotonic", lambda: clock)
    cell: Cell[Record | None] = Cell(None)
    last = LastHolders(cell)
    assert last.known() == (None, None)
    found = Record((Holding("n", "p", "c", "r", ("GPU-1",)),), ())
    cell.publish(found)
    assert last.known() == (found, None)
    cell.publish(None)
    assert last.known() == (found, 0)
    clock += 42
    assert last.known() == (found, 42)
    cell.publish(found)
    assert last.known() == (found, None)
