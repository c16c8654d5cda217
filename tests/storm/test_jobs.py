"""Storms in processes of their own: results and output come whole, and a process that dies is a failure."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A program of its own: one that has threads, as that of tests may have, should not fork.
PROGRAM = """
import json, os, signal
from tests.storm.jobs import Summary, side_by_side
from tests.storm.plan import planned

def work(plan):
    for part in ("begins", "goes on", "ends"):
        print(plan.seed, part, flush=True)
    if plan.seed == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if plan.seed == 3:
        raise RuntimeError("no such storm")
    return Summary(plan.seed, digest="" if os.getpid() == parent else "of a child")

def plans():
    for seed in range(1, 6):
        begun.append(seed)
        yield planned(seed, 1)

parent, begun, known, found = os.getpid(), [], [], {}
for each in side_by_side(plans(), 2, work):
    found[each.seed] = [each.digest, each.violation]
    known.append(len(begun))
print(json.dumps([found, known]))
"""


def test_results_and_output_come_whole_whatever_happens_to_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    *said, last = done.stdout.splitlines()
    found, begun = json.loads(last)
    child = ["of a child", None]
    dead = {"2": ["", "its process ended with -9"], "3": ["", "its process ended with 1"]}
    assert found == {"1": child, "4": child, "5": child} | dead
    assert begun == [2, 3, 4, 5, 5]  # two at once
    for seed in range(1, 6):
        start = said.index(f"{seed} begins")
        assert said[start + 1 : start + 3] == [f"{seed} goes on", f"{seed} ends"]
    assert "seed 2: its process ended with -9" in said
    assert "RuntimeError: no such storm" in said
    assert not done.stderr
