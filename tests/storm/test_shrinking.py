"""Shrinking, over storms that cost nothing."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.storm.shrinking import Rage, alike, shrunk
from tests.storm.storm import Outcome

ROOT = Path(__file__).parents[2]
STEPS, NEEDED = 200, {70, 90}


def _rage(words: Callable[[int], str], *, inside: bool = False) -> Rage:
    """A storm that fails once both of NEEDED have come; `inside`: before the last is in the history."""

    def rage(seed: int, steps: int, skip: frozenset[int]) -> Outcome:
        outcome, done = Outcome(seed, skipped=skip), set()
        for number in sorted(set(range(steps)) - skip):
            done.add(number)
            if inside and done >= NEEDED:
                outcome.violation = words(len(done))
                break
            outcome.history.append(f"{number} 0.000000 create p{len(done)}")
            if done >= NEEDED:
                outcome.violation = words(len(done))
                break
        return outcome

    return rage


@pytest.mark.parametrize(
    "words",
    [
        lambda made: f"pod p{made} was refused though it fits: UnexpectedAdmissionError",
        lambda made: f"{made + 60} API writes in a minute with {made} events",
        lambda _: "the agent did not end in time after SIGTERM",
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_only_needed_events_are_left_and_the_same_again(words: Callable[[int], str], inside: bool) -> None:
    rage = _rage(words, inside=inside)
    short = shrunk(rage(1, STEPS, frozenset()), STEPS, rage)
    assert set(range(STEPS)) - short.skipped - {91} == NEEDED
    again = rage(1, STEPS, short.skipped)
    assert again.violation
    assert again.history == short.history
    # Shrinking what is short already loses nothing of it.
    assert shrunk(again, STEPS, rage).skipped >= short.skipped
    assert rage(1, STEPS, again.skipped).violation


def test_findings_are_told_apart_whatever_gpu_they_are_of() -> None:
    one, other = "GPU-6f1c8d3e-0000-4000-8000-000000000001", "GPU-6f1c8d3e-0000-4000-8000-000000000002"
    assert alike(f"{one} is held as vgpu by a", f"{other} is held as vgpu by a")
    assert not alike(f"{one} is held as vgpu by a", f"{one} stands on lists of ['pgpu', 'vgpu']")


def test_a_family_that_nobody_knows_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.storm", "--faults", "label"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "--faults has no label; there are agent killed," in done.stderr
