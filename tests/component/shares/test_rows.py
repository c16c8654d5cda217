"""Shares of containers side by side on the simulated GPU: what is asserted is in its own time, and exact."""

import subprocess
from pathlib import Path
from statistics import mean

import pytest

from tests.component.shares.row import LOAD_FAILED, Load, Row, shares


@pytest.mark.parametrize(
    ("row", "points"),
    [
        (Row((Load(30, "train"), Load(70, "train")), 10), 1),
        (Row((Load(40, "train", processes=4),), 10), 1),
        (Row((Load(40, "train", streams=2),), 10), 1),
        (Row((Load(40, "graph"),), 13), 3),
        (Row((Load(30, "long"),), 33, 10), 3),
        (Row((Load(20, "mixed"),), 10), 2),
        (Row((Load(20, "mixed"), Load(80, "train")), 10), 2),
        (Row((Load(40, "mixed", processes=2),), 23, 10), 3),
        (Row((Load(30, "varied"), Load(70, "train")), 13), 3),
        (Row((Load(20, "changing"),), 23, 10), 3),
        # Prices alone say it: NVML's figures are no one's where several work.
        (Row((Load(20, "changing"), Load(80, "train")), 23, 10), 9),
        (Row((Load(20, "hiding"),), 10), 2),
    ],
    ids=[
        "30 next to 70",
        "processes",
        "streams",
        "graphs",
        "long kernels",
        "1 us and 5 ms in turn",
        "the same next to 80",
        "the same in 2 processes",
        "three lengths at random next to 70",
        "a second of short and one of long",
        "the same, changing, next to 80",
        "short where every eighth would be measured",
    ],
)
def test_a_container_gets_what_it_asked_for(row: Row, points: float, tmp_path: Path) -> None:
    for load, windows in zip(row.loads, shares(row, tmp_path / "row"), strict=True):
        assert mean(abs(each - load.cap) for each in windows) < points, windows


def test_a_load_that_ends_early_is_no_share_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        shares(Row((Load(20, "no such load"),), 5), tmp_path / "row")
    assert failed.value.returncode == LOAD_FAILED
    assert b"failed with [2]" in failed.value.stderr


def test_graphs_of_10_and_90_percent_are_one_to_nine(tmp_path: Path) -> None:
    """On an H200 one to seventeen: no launch of the small one is without the other's work in between."""
    row = Row((Load(10, "graph"), Load(90, "graph")), 33, 10)
    # Eight graphs of which each is launched every two seconds are learned in ten.
    small, large = (mean(windows[1:]) for windows in shares(row, tmp_path / "row"))
    assert large / small == pytest.approx(9, rel=0.05)


def test_without_shares_a_gpu_is_divided_by_its_time_slices(tmp_path: Path) -> None:
    """The figures of the other tests if nothing were enforced."""
    row = Row((Load(100, "train"), Load(100, "train")), 5)
    assert [mean(windows) for windows in shares(row, tmp_path / "row")] == [pytest.approx(50, abs=1)] * 2
