"""Faults that were mended are put back into a copy of the agent: a storm must find each.

A patch that no longer applies fails: the mutant is to be written again for the code as it is.
"""

import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storm import figures
from tests.storm.mutants import BY_TESTS, HUNTS, MOST_STEPS, NAMED, OTHERS, PATCHES, ROOT, hunt, run_its_test

# As issue 17 wants it: so many beside those that it names, no more than four of them in one room.
OTHERS_WANTED, MOST_IN_ONE_ROOM = 20, 4


@pytest.fixture(scope="module")
def found_mutants() -> Iterator[set[str]]:
    """Those that were found; how many they are is added to the figures."""
    found: set[str] = set()
    yield found
    figures.add(mutants=len(NAMED), mutants_found=len(found))


def test_every_mutant_has_its_storm_or_its_test() -> None:
    known = HUNTS.keys() | BY_TESTS.keys()
    assert {each.stem for each in PATCHES.glob("*.patch")} == known
    assert len(known) == len(HUNTS) + len(BY_TESTS)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", sorted(BY_TESTS))
def test_a_test_of_its_room_finds_what_storms_did_not(mutant: str, tmp_path: Path) -> None:
    found, said = run_its_test(mutant, tmp_path)
    assert found, said[-4000:]


def test_mutants_are_spread_over_the_rooms() -> None:
    rooms: Counter[str] = Counter()
    for mutant in OTHERS:
        lines = (PATCHES / f"{mutant}.patch").read_text(encoding="utf-8").splitlines()
        rooms.update({line.split("/")[2] for line in lines if line.startswith("+++ ")})
    assert sum(min(count, MOST_IN_ONE_ROOM) for count in rooms.values()) >= OTHERS_WANTED


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
def test_a_storm_finds_what_reading_found(mutant: str, tmp_path: Path, found_mutants: set[str]) -> None:
    # Its own storm comes first. The code has changed since it was found there, and histories with it.
    found, said = hunt(mutant, tmp_path, MOST_STEPS, seconds=280)
    assert found, said[-4000:]
    found_mutants.add(mutant)
