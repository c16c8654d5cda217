"""Faults that were mended are put back into a copy of the agent: a storm must find each.

A patch that no longer applies fails: the mutant is to be written again for the code as it is.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.storm.mutants import HUNTS, MOST_STEPS, NAMED, PATCHES, ROOT, hunt


def test_every_mutant_has_its_storm() -> None:
    assert {each.stem for each in PATCHES.glob("*.patch")} == HUNTS.keys()


def test_every_mutant_applies(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "agent", tmp_path / "agent", ignore=shutil.ignore_patterns("__pycache__"))
    stale = {}
    for patch in sorted(PATCHES.glob("*.patch")):
        check = ["git", "apply", "--check", "-C1", "--recount", "--unsafe-paths", f"--directory={tmp_path}"]
        done = subprocess.run([*check, str(patch)], cwd=tmp_path, capture_output=True, text=True, check=False)
        if done.returncode:
            stale[patch.stem] = done.stderr
    assert not stale


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", sorted(NAMED))
def test_a_storm_finds_what_reading_found(mutant: str, tmp_path: Path) -> None:
    # Its own storm comes first. The code has changed since it was found there, and histories with it.
    found, said = hunt(mutant, tmp_path, MOST_STEPS, seconds=280)
    assert found, said[-4000:]
