"""Faults that were mended are put back into a copy of the agent: a storm must find each.

A patch that no longer applies fails: the mutant is to be written again for the code as it is.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MUTANTS = Path(__file__).parent / "mutants"
# The storm in which each was found: seed, events, words of what it says.
FOUND = {
    "freed_units_listed_late": (203, 60, "was refused though it fits"),
    "init_containers_hold_nothing": (11, 120, "was refused though it fits"),
    "promises_outlive_their_pods": (512, 80, "was refused though it fits"),
    "reporter_compares_without_end": (17, 120, "rounds of the loop within a second"),
}


def test_every_mutant_has_its_storm() -> None:
    assert {each.stem for each in MUTANTS.glob("*.patch")} == FOUND.keys()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mutant", sorted(FOUND))
def test_a_storm_finds_what_reading_found(mutant: str, tmp_path: Path) -> None:
    seed, steps, words = FOUND[mutant]
    for name in ("agent", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    applied = subprocess.run(
        ["git", "apply", "--unsafe-paths", f"--directory={tmp_path}", str(MUTANTS / f"{mutant}.patch")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert applied.returncode == 0, f"{mutant} no longer applies: {applied.stderr}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.storm", "--seed", str(seed), "--steps", str(steps), "--no-shrink"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, words in done.stdout) == (1, True), done.stdout[-3000:] + done.stderr[-1000:]
