"""By how much learned device times are off, from outside: the observer of compute shares. Pure.

The enforcement library prices launches by times that the GPU's events gave it. They contain what other
containers did in between, and miss what runs beside each other. So each second the agent compares what NVML
measured with what containers may use, and gives the library a factor. It also says whom a container shares
the GPU's time with, so that the library can tell a long launch from an interrupted one.

NVML's figures of processes are right where one container works. Where several do, each sample of 200 ms is
put down to one of their processes (H200, driver 580): only the sum says something. So a container's own
factor is learned while it works alone, and of several together whether they exceed their shares together;
then all are braked alike. Who works, and waits, their usage regions say.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

GAIN = 0.4
LEAST, MOST = 0.4, 4.0
MOST_EXCESS = 1.0  # a second of more may be that in which the library learned what is launched
ROUNDING = 0.5  # NVML cuts percentages off
WHOLE = 100.0
SLACK = 1.25
"""A brake that is not needed rises to it, so that no second by chance above the shares puts it on."""
_ROUNDS = 50


@dataclass(frozen=True, slots=True)
class Second:
    """A container in one second of a GPU.

    `factor`: its own so far. `cap`: percent of the GPU that it may use. `steady`: that was so all the while.
    `throttled`: launches had to wait; one that did not wait may use less by itself. `processes`: of those
    that worked, as many as were seen.
    """

    factor: float
    cap: float
    working: bool = True
    throttled: bool = True
    steady: bool = True
    processes: int = 1


@dataclass(frozen=True, slots=True)
class Corrections:
    """The factors of the next second, by container in the order of the seconds; `brake` is one for all."""

    brake: float
    factors: tuple[float, ...]  # own ones
    rivals: tuple[float, ...]
    working: tuple[int, ...]  # their numbers

    def in_force(self, number: int) -> float:
        """The factor of a container, with the brake where it is on."""
        brake = min(1.0, self.brake) if len(self.working) > 1 else 1.0
        return max(LEAST, self.factors[number] * brake)

    def used(self, number: int, total: float, *, others: bool) -> float | None:
        """Percent of the GPU that a container used; None: not known."""
        if number not in self.working:
            return 0.0
        return total if len(self.working) == 1 and not others else None


def learned(brake: float, seconds: Sequence[Second], total: float, *, others: bool) -> Corrections:
    """The findings of one second of a GPU.

    `total`: percent of the GPU that all processes used, `others`: some that are held to no share among them.
    """
    factors = [each.factor for each in seconds]
    working = [number for number, each in enumerate(seconds) if each.working]
    if len(working) == 1 and not others:
        one = seconds[working[0]]
        if one.steady and one.cap < WHOLE:
            factors[working[0]] = corrected(one.factor, one.cap, total, throttled=one.throttled)
    elif working and not others and all(seconds[number].steady for number in working):
        caps = sum(seconds[number].cap for number in working)
        # All of the GPU they cannot exceed.
        brake = min(SLACK, corrected(brake, caps, total if caps < WHOLE else 0.0, throttled=True))
    return Corrections(brake, tuple(factors), tuple(_rivals(seconds, total, others=others)), tuple(working))


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
    if others:
        uses.append(max(0.0, total - sum(use * count for use, count in zip(uses, counts, strict=True))))
        counts.append(1)
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
