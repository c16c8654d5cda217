"""Mean and maximum over a sliding window, in bounded memory.

A scrape every minute sees one reading out of sixty. Not "since the last scrape": two scrapers would then take
each other's peaks away.
"""

from collections import deque
from dataclasses import dataclass

BUCKETS = 12


@dataclass(frozen=True, slots=True)
class Span:
    mean: float
    most: float


class Window:
    """Readings of one figure. It covers `seconds` and up to a twelfth more, since it forgets in steps."""

    __slots__ = ("_buckets", "_seconds", "_width")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._width = seconds / BUCKETS
        self._buckets: deque[list[float]] = deque()  # start, sum, count, maximum

    def add(self, value: float, now: float) -> None:
        """One more reading, at `now` in seconds of any steady clock."""
        self.forget(now)
        buckets = self._buckets
        if not buckets or now - buckets[-1][0] >= self._width:
            buckets.append([now, value, 1, value])
            return
        newest = buckets[-1]
        newest[1] += value
        newest[2] += 1
        newest[3] = max(newest[3], value)

    def forget(self, now: float) -> None:
        """Drop the readings that are too old at `now`: for a round without a reading."""
        buckets = self._buckets
        while buckets and buckets[0][0] <= now - self._seconds - self._width:
            buckets.popleft()

    @property
    def empty(self) -> bool:
        """Whether no reading lies within the window."""
        return not self._buckets

    @property
    def span(self) -> Span:
        """Mean and maximum. There must have been a reading."""
        count = sum(bucket[2] for bucket in self._buckets)
        mean = sum(bucket[1] for bucket in self._buckets) / count
        return Span(mean, max(bucket[3] for bucket in self._buckets))
