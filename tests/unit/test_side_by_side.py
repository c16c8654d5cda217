"""Which tests of the cluster share a worker."""

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.side_by_side import LONGEST_FIRST, TOGETHER, place, unit

FOLDER = Path(__file__).resolve().parents[1] / "cluster"


def files_that_name(*words: str) -> set[str]:
    """Test files of the cluster with one of these words in them."""
    texts = {path.stem: path.read_text() for path in FOLDER.glob("test_*.py")}
    return {name for name, text in texts.items() if any(word in text for word in words)}


def test_every_file_exists_and_is_named_once() -> None:
    assert set(LONGEST_FIRST) <= files_that_name("")
    assert len(set(LONGEST_FIRST)) == len(LONGEST_FIRST)


def test_what_shares_a_cluster_or_the_machine_stays_together() -> None:
    assert files_that_name("patient") == set(TOGETHER["default tick"])
    assert files_that_name("tests.cluster.installation", "install_fixtures") == set(TOGETHER["installed"])


def test_units_are_whole_files_in_one_piece_of_the_order() -> None:
    assert unit("tests/cluster/test_modes.py::test_a") == unit("tests/cluster/test_storm.py::test_b[x::y]")
    assert unit("tests/cluster/test_rig.py::test_a") == unit("tests/cluster/test_rig.py::test_b")
    names = sorted(files_that_name(""), key=lambda name: place(f"tests/cluster/{name}.py::test"))
    units = [unit(f"tests/cluster/{name}.py::test") for name in names]
    changes = [here for here, before in zip(units, [None, *units], strict=False) if here != before]
    assert len(changes) == len(set(changes))
    assert units[0] == "default tick"


SHARED = """
import pytest

tries = {"once": 0, "always": 0}

@pytest.fixture(scope="session")
def once():
    tries["once"] += 1
    assert tries["once"] > 1
    return tries["once"]

@pytest.fixture(scope="module")
def always():
    tries["always"] += 1
    raise RuntimeError

def test_first(once): pass
def test_second(once): pass
def test_third(once): assert once == 2
def test_fourth(always): pass
def test_fifth(always): pass
def test_sixth(always): pass
def test_counted(): assert tries == {"once": 2, "always": 2}
"""


def test_a_shared_fixture_that_failed_is_tried_once_more(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.cluster.conftest import pytest_fixture_setup\n")
    (tmp_path / "test_shared.py").write_text(SHARED)
    argv = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parents[1])}
    done = subprocess.run(
        argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    told = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith(("PASSED", "ERROR "))]
    found = {name.rpartition("::")[2]: outcome for outcome, name in told}
    passed = {"test_second", "test_third", "test_counted"}
    assert {name for name, outcome in found.items() if outcome == "PASSED"} == passed, done.stdout
    assert len(found) == 7, done.stdout
