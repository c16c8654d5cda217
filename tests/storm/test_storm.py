"""A fixed set of storms in every run; what they prove is counted in build/storm.json."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.storm import figures
from tests.storm.memory import _size
from tests.storm.plan import SEEDS, planned, read

ROOT = Path(__file__).parents[2]
KEYS = {"seeds", "steps", "virtual_hours", "faults", "invariants", "failures"}
SEEDS_OF_EACH, STEPS, PROCESSES = 20, 3000, 2  # a fixed set: 10^5 steps
SECONDS = 120.0  # of `make test`: on a slow or busy machine each process begins no storm later than that


def _storms(report: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.storm", "--report", str(report), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert report.exists(), done.stderr[-2000:]
    return done.returncode, done.stdout, json.loads(report.read_text())


@pytest.mark.timeout(300)
def test_fixed_storms_find_nothing(tmp_path: Path) -> None:
    size = ("--seeds", str(SEEDS_OF_EACH), "--every", str(PROCESSES), "--steps", str(STEPS))
    limits = (*size, "--seconds", str(SECONDS), "--no-shrink")

    def part(first: int) -> tuple[int, str, dict[str, Any]]:
        return _storms(tmp_path / str(first), "--seed", str(first), *limits)

    with ThreadPoolExecutor(PROCESSES) as pool:
        parts = list(pool.map(part, range(1, PROCESSES + 1)))
    total = {key: round(sum(each[key] for _, _, each in parts), 2) for key in sorted(KEYS)}
    print(json.dumps(figures.add(**total)))
    for code, said, _ in parts:
        assert code == 0, said[-12_000:]
    assert total["failures"] == 0
    assert total["steps"] >= PROCESSES * STEPS


@pytest.mark.timeout(300)
def test_storms_that_found_something_find_it_no_more(tmp_path: Path) -> None:
    code, said, found = _storms(tmp_path / "report", "--kept")
    assert code == 0, said[-12_000:]
    assert found["seeds"] == len(list(SEEDS.glob("*.json"))) > 0


def test_a_kept_storm_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = planned(7, 20, skip={3, 4})
    file = tmp_path / "storm.json"
    file.write_text(plan.text(), encoding="utf-8")
    assert read(file) == plan
    assert [number for number, _ in plan.acts()] == [each for each in range(20) if each not in {3, 4}]


def test_memory_counts_each_thing_once() -> None:
    text, other = "text" * 100, "other" * 100
    inner = {"key": other}  # a dict of texts, which the collector does not list
    things: list[object] = [[text, inner], [text]]
    assert _size(things) == sum(map(sys.getsizeof, (*things, text, other, inner)))


@pytest.mark.timeout(300)
def test_a_seed_is_the_same_storm_twice(tmp_path: Path) -> None:
    arguments = ("--seed", "3", "--seeds", "2", "--steps", "60")
    first = _storms(tmp_path / "first", *arguments)[2]["digests"]
    assert len(first) == 2
    assert _storms(tmp_path / "second", *arguments)[2]["digests"] == first
