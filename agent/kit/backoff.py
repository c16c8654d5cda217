"""Growing pauses between tries, with jitter so that many nodes do not try in step."""

import random
from dataclasses import dataclass


@dataclass
class Backoff:
    """Pauses in seconds: `first`, then `factor` times as long each time, at most `longest`.

    Each is shortened at random by up to `jitter` of its length.
    """

    first: float
    longest: float
    factor: float = 2.0
    jitter: float = 0.2
    failures: int = 0

    def next(self) -> float:
        """The pause before the next try, in seconds."""
        pause = min(self.longest, self.first * self.factor**self.failures)
        if pause < self.longest:
            self.failures += 1
        return pause * (1 - self.jitter * random.random())  # noqa: S311  jitter, not a secret

    def reset(self) -> None:
        self.failures = 0
