"""The fewest events of a storm that still show what it found."""

from collections.abc import Callable

from tests.storm.storm import Outcome

Rage = Callable[[int, int, frozenset[int]], Outcome]
MOST_TRIES = 60
ALIKE = 30  # characters at the beginning of two findings that make them the same


def shrunk(found: Outcome, steps: int, rage: Rage) -> Outcome:
    """Leave out events in ever smaller parts as long as the same violation comes; the shortest storm."""
    best, tries = found, 0
    last = len([line for line in found.history if not line.startswith(" ")])
    best_skip = frozenset(range(last, steps))
    part = max(1, last // 2)
    while part and tries < MOST_TRIES:
        for start in range(0, last, part):
            more = frozenset(range(start, min(start + part, last))) - best_skip
            if not more or tries >= MOST_TRIES:
                continue
            tries += 1
            again = rage(found.seed, steps, best_skip | more)
            if again.violation and found.violation and again.violation[:ALIKE] == found.violation[:ALIKE]:
                best, best_skip = again, best_skip | more
        part //= 2
    best.skipped = best_skip
    return best
