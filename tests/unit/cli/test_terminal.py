"""Output on a terminal that is small."""

import argparse
import os
import shutil
import sys

import pytest

from agent.cli import output


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: os.terminal_size((40, 10)))


@pytest.mark.usefixtures("small")
def test_what_is_painted_again_fits_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    sys.stdout.isatty = lambda: True  # type: ignore[method-assign]  of capsys, which is younger than the fixture
    options = argparse.Namespace(watch=True, output=None)
    assert output.show(options, lambda: 30, lambda rows: "\n".join(["line"] * rows), lambda _: True) == 0
    lines = capsys.readouterr().out.removesuffix("\n").split("\n")
    assert len(lines) == 9  # and one for the cursor
    assert "22 more lines" in lines[-1]


@pytest.mark.usefixtures("small")
def test_lines_of_top_are_no_longer_than_the_terminal() -> None:
    assert output.size(fewest=1) == (40, 10)
    assert output.size() == (output.FEWEST_COLUMNS, 10)
