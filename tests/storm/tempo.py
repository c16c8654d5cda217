"""How quickly events follow each other.

Virtual time costs real time: an idle node wakes ten times in each of its seconds. Most storms are dense, so
that events meet each other, and cost little. In bursts with long rests the excuses that faults are run out,
so that more is judged.
"""

import random

SPARSE = "sparse"
# Seconds after an event, with how often each comes.
PAUSES: dict[str, dict[float, int]] = {
    SPARSE: {0.0: 8, 0.001: 4, 0.01: 4, 0.1: 4, 0.5: 4, 1.0: 4, 5.0: 2, 30.0: 1},
    "dense": {0.0: 90, 0.001: 80, 0.01: 60, 0.1: 40, 0.5: 20, 1.0: 10, 5.0: 3, 30.0: 1},
    "bursts": {0.0: 100, 0.001: 60, 0.01: 40, 0.1: 20, 1.0: 4, 70.0: 2, 130.0: 1},
}
OFTEN = {"dense": 5, "bursts": 3, SPARSE: 2}
# How much busier users are where pauses are short: faults are not that much more frequent in time, or else no
# life of an agent would last.
BUSY = {"dense": 3, "bursts": 3, SPARSE: 1}
# So many times fewer events each has, as they cost more: that each storm takes about as long.
FEWER = {"dense": 1, "bursts": 2, SPARSE: 20}


def tempo_of(seed: int) -> str:
    """The choices of a seed."""
    # By a draw of its own: all else is what it was when every storm was sparse.
    return random.Random(f"tempo of {seed}").choices(list(OFTEN), list(OFTEN.values()))[0]


def pause(tempo: str, rng: random.Random) -> float:
    """Seconds until the next event."""
    return rng.choices(list(PAUSES[tempo]), list(PAUSES[tempo].values()))[0]
