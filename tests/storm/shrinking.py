"""The fewest events of a storm that still show what it found."""

import re
from collections.abc import Callable

from tests.storm.storm import Outcome

Rage = Callable[[int, int, frozenset[int]], Outcome]
MOST_TRIES = 60
ALIKE = 60  # characters at the beginning of two findings that make them the same
# Names and figures differ where other events went before.
_OWN = re.compile(r"GPU-[0-9a-f-]+(::\w+)?|[0-9a-f]{8}-[0-9a-f-]{27}|\d+(\.\d+)?")


def shrunk(found: Outcome, steps: int, rage: Rage) -> Outcome:
    """Leave out events in ever smaller parts as long as the same violation comes; the shortest storm.

    What `found` left out stays left out.
    """
    best, tries = found, 0
    # The event after those that were done counts, too: a loop that spins is stopped inside one, which no
    # history has.
    done = max(_numbers(found), default=-1)
    last = next((each + 1 for each in range(done + 1, steps) if each not in found.skipped), steps)
    best_skip = found.skipped | frozenset(range(last, steps))
    part = max(1, last // 2)
    while part and tries < MOST_TRIES:
        for start in range(0, last, part):
            more = frozenset(range(start, min(start + part, last))) - best_skip
            if not more or tries >= MOST_TRIES:
                continue
            tries += 1
            again = rage(found.seed, steps, best_skip | more)
            if again.violation and found.violation and alike(again.violation, found.violation):
                best, best_skip = again, best_skip | more
        part //= 2
    best.skipped = best_skip
    return best


def alike(one: str, other: str) -> bool:
    """Whether two findings say the same, of whatever pod, GPU or number."""
    return _OWN.sub("#", one)[:ALIKE] == _OWN.sub("#", other)[:ALIKE]


def _numbers(found: Outcome) -> list[int]:
    """Of the events in its history."""
    return [int(line.partition(" ")[0]) for line in found.history if line[:1].isdigit()]
