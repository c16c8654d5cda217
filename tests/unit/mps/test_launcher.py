"""The launcher's way into a cgroup, which may be taken away under it."""

import os
from pathlib import Path
from typing import Any

import pytest

from agent.mps import launcher


@pytest.fixture
def vanishing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often more the folder goes as soon as it is made: `leave_no_cgroup` of another GPU came between."""
    left = [0]
    make = os.makedirs

    def makedirs(path: str, **options: Any) -> None:
        make(path, **options)
        if left[0]:
            left[0] -= 1
            Path(path).rmdir()

    monkeypatch.setattr(os, "makedirs", makedirs)
    return left


def test_a_cgroup_that_is_taken_away_is_made_again(tmp_path: Path, vanishing: list[int]) -> None:
    vanishing[0] = 2
    launcher.join(str(tmp_path / "mps"))
    assert (tmp_path / "mps" / "cgroup.procs").read_text() == str(os.getpid())


def test_there_is_an_end_to_it(tmp_path: Path, vanishing: list[int]) -> None:
    vanishing[0] = 1000
    with pytest.raises(FileNotFoundError):
        launcher.join(str(tmp_path / "mps"))
