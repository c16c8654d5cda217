"""Output on a terminal that is small."""

import argparse
import os
import shutil
import sys

import pytest

from agent.cli import output


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 40 columns and 10 rows."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: os.terminal_size((40, 10)))


def test_what_is_painted_again_fits_the_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small(monkeypatch)
    options = argparse.Namespace(watch=True, output=None)
    assert output.show(options, lambda: 30, lambda rows: "\n".join(["line"] * rows), lambda _: True) == 0
    lines = capsys.readouterr().out.removesuffix("\n").split("\n")
    assert len(lines) == 9  # and one for the cursor
    assert "22 more lines" in lines[-1]


def test_lines_of_top_are_no_longer_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    assert output.size(fewest=1) == (40, 10)
    assert output.size() == (output.FEWEST_COLUMNS, 10)
