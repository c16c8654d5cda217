"""By how much learned device times are off, from outside: the observer of compute shares. Pure.

The enforcement library prices launches by times that the GPU's events gave it. They contain what other
containers did in between, and miss what runs beside each other. So each second the agent compares what NVML
measured with what containers may use, and gives the library a factor. It also says whom a container shares
the GPU's time with, so that the library can tell a long launch from an interrupted one.

NVML's figures of processes are right where one container has processes. Where several do, each sample of 200
ms is put down to one of them (H200, driver 580): only the sum says something. So a factor is learned while
NVML lists nobody else on the GPU; what a container says of itself does not count, since one that hides would
have its neighbour blamed. Beside others the sum still bounds what each used: who waited for its share and
had less, whatever the others did, gets its own price back. Several above their shares together are left:
whatever brakes all of them takes what was promised from those that obey. Who works, and waits, their usage
regions say.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

GAIN = 0.4
LEAST, MOST = 0.4, 4.0
MOST_EXCESS = 1.0  # a second of more may be that in which the library learned what is launched
ROUNDING = 0.5  # NVML cuts percentages off
WHOLE = 100.0
LESS = 0.8
"""The part of its share below which a container beside others had less than it: not by chance."""
_ROUNDS = 50


@dataclass(frozen=True, slots=True)
class Second:
    """A container in one second of a GPU.

    `factor`: its own so far. `cap`: percent of the GPU that it may use. `steady`: that was so all the while.
    `throttled`: launches had to wait; one that did not wait may use less by itself. `processes`: of those
    that worked, as many as were seen. `listed`: it has some on the GPU, at work or not.
    """

    factor: float
    cap: float
    working: bool = True
    throttled: bool = True
    steady: bool = True
    processes: int = 1
    listed: bool = False


@dataclass(frozen=True, slots=True)
class Corrections:
    """The factors of the next second, by container in the order of the seconds."""

    factors: tuple[float, ...]
    rivals: tuple[float, ...]
    present: tuple[int, ...]  # numbers of those that have processes on the GPU

    def used(self, number: int, total: float, *, others: bool) -> float | None:
        """Percent of the GPU that a container used; None: not known."""
        if number not in self.present or not total:
            return 0.0
        return total if len(self.present) == 1 and not others else None


def learned(seconds: Sequence[Second], total: float, *, others: bool) -> Corrections:
    """The findings of one second of a GPU.

    `total`: percent of the GPU that all processes used. `others`: some that are held to no share are there,
    at work or not, or nobody knows.
    """
    factors = [each.factor for each in seconds]
    present = [number for number, each in enumerate(seconds) if each.working or each.listed]
    alone = len(present) == 1 and not others
    for number in present:
        one = seconds[number]
        if one.steady and alone and one.cap < WHOLE:
            factors[number] = corrected(one.factor, one.cap, total, throttled=one.throttled)
        elif one.steady and one.throttled:
            risen = corrected(one.factor, one.cap * LESS, total, throttled=True)
            factors[number] = max(one.factor, min(1.0, risen))
    return Corrections(tuple(factors), tuple(_rivals(seconds, total, others=others)), tuple(present))


def corrected(factor: float, cap: float, used: float, *, throttled: bool) -> float:
    """The factor for the next second; the same while nothing can be learned. In percent of the GPU."""
    share = used + ROUNDING
    if cap <= 0 or (not throttled and share <= cap):
        return factor
    excess = min(MOST_EXCESS, (share - cap) / cap)
    return min(MOST, max(LEAST, factor * math.exp(-GAIN * excess)))


def _rivals(seconds: Sequence[Second], total: float, *, others: bool) -> list[float]:
    """How many other processes have work on the GPU at a time, as one of each container's meets them.

    Rounded up to eighths: 0 is nobody at all.
    """
    uses = [use / max(1, each.processes) for use, each in zip(_uses(seconds, total), seconds, strict=True)]
    counts = [max(1, each.processes) for each in seconds]
    # What those that work leave is a stranger's, or of one that hides in its usage region.
    rest = max(0.0, total - sum(use * count for use, count in zip(uses, counts, strict=True)))
    hidden = [number for number, each in enumerate(seconds) if each.listed and not each.working]
    if others:
        uses.append(rest)
        counts.append(1)
    else:
        for number in hidden:
            uses[number] = rest / len(hidden)
    there = _presence([use / WHOLE for use in uses], counts)
    everybody = sum(part * count for part, count in zip(there, counts, strict=True))
    return [math.ceil(max(0.0, everybody - part) * 8 - 1e-6) / 8 for part in there[: len(seconds)]]


def _uses(seconds: Sequence[Second], total: float) -> list[float]:
    """Percent of the GPU that each container used: one that waited its share, the others what is left."""
    waiting = sum(each.cap for each in seconds if each.working and each.throttled)
    free = sum(each.cap for each in seconds if each.working and not each.throttled)
    scale = min(1.0, total / waiting) if waiting else 0.0
    rest = min(1.0, max(0.0, total - waiting) / free) if free else 0.0
    return [each.cap * (scale if each.throttled else rest) if each.working else 0.0 for each in seconds]


def _presence(uses: Sequence[float], counts: Sequence[int]) -> list[float]:
    """The part of the time in which each process has work on the GPU, shared with those that do, too."""
    there = list(uses)
    for _ in range(_ROUNDS):
        everybody = sum(part * count for part, count in zip(there, counts, strict=True))
        there = [min(1.0, use * (1.0 + everybody - part)) for use, part in zip(uses, there, strict=True)]
    return there
