"""Containers whose memory by the library's count and by the driver's measure differ for a minute.

Too much charged would have allocations refused that have room: so much is then forgiven, until both agree.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from agent.vgpu.layout import CountedUsage

# Of the larger figure, and no less than this: contexts and code come in such sizes.
RATIO = 0.1
LEAST = 64 << 20
READINGS = 60  # in a row, a second apart
STEP = 2 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    charged_bytes: int
    measured_bytes: int
    forgiven_bytes: int

    @property
    def excess_bytes(self) -> int:
        """Bytes that are charged too much; below zero: too little."""
        return self.charged_bytes - self.measured_bytes


@dataclass(slots=True)
class _Episode:
    refused: int  # as it began
    readings: deque[int] = field(default_factory=lambda: deque(maxlen=READINGS))


class Differences:
    def __init__(self) -> None:
        self._open: dict[str, _Episode] = {}
        # Those that have lasted, by folder.
        self.lasting: dict[str, Difference] = {}

    def look(
        self,
        key: str,
        usage: CountedUsage,
        measured_bytes: int,
        cap_bytes: int,
        movable: Callable[[], int] | None,
    ) -> int:
        """Take in a reading; how many bytes of the charge do not count against the cap.

        Nothing is forgiven before something was refused, nor ever more than the cap: a container can write
        any count. Nor is what the driver may bring back from the host, `movable`; None: nothing at all is.
        """
        excess = usage.total_bytes - measured_bytes
        if abs(excess) <= max(LEAST, RATIO * max(usage.total_bytes, measured_bytes)):
            self.drop(key)
            return 0
        episode = self._open.get(key)
        if episode is None or (episode.readings[-1] > 0) is not (excess > 0):
            self.drop(key)
            episode = self._open[key] = _Episode(usage.refused)
        episode.readings.append(excess)
        if len(episode.readings) < READINGS:
            return 0
        forgiven = 0
        if movable is not None and excess > 0 and usage.refused > episode.refused:
            forgiven = max(0, min(cap_bytes, min(episode.readings) - movable())) // STEP * STEP
        self.lasting[key] = Difference(usage.total_bytes, measured_bytes, forgiven)
        return forgiven

    def drop(self, key: str) -> None:
        """Both figures of a container agree, or nobody is there."""
        self._open.pop(key, None)
        self.lasting.pop(key, None)
