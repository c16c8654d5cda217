"""A fixed set of storms in every run; what they prove is counted in build/storm.json."""

import json
import os
import subprocess
import sys
from itertools import chain, zip_longest
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import pytest

from tests.storm import figures
from tests.storm.acts import CLAIMS, families, later_families
from tests.storm.memory import _size
from tests.storm.mutants import CLAIM_FAULTS, INSTANCES
from tests.storm.plan import SEEDS, planned, read
from tests.storm.tempo import SPARSE
from tests.storm.world import Shape

ROOT = Path(__file__).parents[2]
KEYS = tuple(name for name in figures.NAMES if not name.startswith("mutants"))
MOST_EXCUSED_PERCENT = 30.0  # of the looks in storms with faults
# A fixed set: 10^5 steps. A slow machine leaves out the last of the dense ones, of which there are most.
FIXED = {
    SPARSE: (19, 13, 58, 31),
    "bursts": (28, 90012, 300001, 100004, 62, 44, 59),
    "dense": (63, 12, 5, 3, 70005, 33, 90015, 32, 90001, 37, 7, 2, 53, 38),
}
WITH_CLAIMS = "103,206,104,301"
STEPS = 6000  # of each that is dense
LEAST_STEPS, ALL_STEPS = 6000, 100_000
# Of `make test`, and of `make test-long`, which makes all 10^5 steps but on a slow or busy machine: no storm
# begins later than that.
SECONDS, LONG_SECONDS = 40.0, 120.0


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
@pytest.mark.parametrize("seconds", [SECONDS, pytest.param(LONG_SECONDS, marks=pytest.mark.long)])
def test_fixed_storms_find_nothing(seconds: float, tmp_path: Path) -> None:
    # One of each tempo in turn, and so for what time there is: the dense ones have most of the steps.
    turns = chain.from_iterable(zip_longest(*(FIXED[each] for each in ("dense", "bursts", SPARSE))))
    seeds = ",".join(str(seed) for seed in turns if seed is not None)
    jobs = max(2, len(os.sched_getaffinity(0)))
    limits = ("--steps", str(STEPS), "--seconds", str(seconds), "--no-shrink", "--jobs", str(jobs))
    began = perf_counter()
    code, said, found = _storms(tmp_path / "report", "--only", seeds, *limits)
    print(json.dumps(figures.add(**{key: found[key] for key in KEYS})))
    assert code == 0, said[-12_000:]
    assert found["failures"] == 0
    assert found["excused_percent"] <= MOST_EXCUSED_PERCENT
    assert found["steps"] >= (ALL_STEPS if perf_counter() - began < seconds else LEAST_STEPS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [5.0, pytest.param(60.0, marks=pytest.mark.long)])
def test_fixed_storms_with_claims_find_nothing(seconds: float, tmp_path: Path) -> None:
    """More claims, and more faults of them, than seeds draw by themselves."""
    limits = ("--steps", "800", "--seconds", str(seconds), "--no-shrink", "--tempo", "dense", "--jobs", "2")
    code, said, found = _storms(tmp_path / "report", "--only", WITH_CLAIMS, "--faults", CLAIM_FAULTS, *limits)
    print(json.dumps(figures.add(**{key: found[key] for key in KEYS})))
    assert code == 0, said[-12_000:]
    assert found["steps"] >= 800


def test_fixed_storms_have_faults_of_every_family() -> None:
    plans = {seed: planned(seed, STEPS) for each in FIXED.values() for seed in each}
    assert sum(len(plan.events) for plan in plans.values()) >= ALL_STEPS
    assert {tempo: tuple(plans[seed].tempo for seed in seeds) for tempo, seeds in FIXED.items()} == {
        tempo: (tempo,) * len(seeds) for tempo, seeds in FIXED.items()
    }
    # Those with instances have a test of their own.
    everything = Shape(mps=True, resize=True, extender=True, claims=True)
    known = {family.name for family in (*families(everything), *later_families(everything))} - {CLAIMS.name}
    for part in (plans.values(), [plan for plan in plans.values() if plan.tempo != SPARSE]):
        assert {name for plan in part for name in plan.families} == known
    assert not all(plan.families for plan in plans.values())  # some have no faults
    dense = [plan for plan in plans.values() if plan.tempo == "dense"]
    for each in (lambda plan: plan.sockets, lambda plan: plan.shape.mps, lambda plan: plan.shape.resize):
        assert 0 < sum(map(each, dense)) < len(dense)
    for each in (lambda plan: plan.shape.extender, lambda plan: plan.shape.claims):
        assert 0 < sum(map(each, dense)) < len(dense)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("seed", "faults"),
    [
        (3, "instances,instance faults,gpus,labels,agent killed"),
        *sorted({(each.seed, each.faults) for each in INSTANCES.values()}),  # it finds each of these mutants
    ],
)
def test_storms_with_instances_find_nothing(seed: int, faults: str, tmp_path: Path) -> None:
    arguments = ("--seed", str(seed), "--steps", "150", "--tempo", "dense", "--no-shrink")
    code, said, found = _storms(tmp_path / "report", *arguments, "--faults", faults)
    assert code == 0, said[-12_000:]
    assert found["failures"] == 0


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


def test_memory_counts_an_undecoded_part_by_its_bytes() -> None:
    part = msgspec.json.decode(b'{"part": {"of": "a message"}}', type=dict[str, msgspec.Raw])["part"]
    assert _size([[part]]) == sys.getsizeof([part]) + len(b'{"of": "a message"}')


@pytest.mark.timeout(300)
def test_a_seed_is_the_same_storm_twice(tmp_path: Path) -> None:
    # The last has the agent name files by chance, and tears some of them.
    arguments = ("--only", "3,4,28", "--steps", "200")
    first = _storms(tmp_path / "first", *arguments)[2]["digests"]
    assert len(first) == 3
    # Whether others ran in this process before does not matter either.
    assert _storms(tmp_path / "second", *arguments, "--jobs", "2")[2]["digests"] == first
