"""By how much learned device times are off, from outside: the observer of compute shares.

The enforcement library prices launches by times that the GPU's events gave it. They contain what other
containers did in between, and miss what runs beside each other. So each second the agent compares what NVML
measured of a container with what it may use, and gives the library a factor.
"""

from dataclasses import dataclass

GAIN = 0.4
LEAST, MOST = 0.4, 4.0
ROUNDING = 0.5  # NVML cuts percentages off


@dataclass(frozen=True, slots=True)
class Observed:
    """One container in one second."""

    cap: float  # percent of the GPU
    percents: tuple[float, ...]  # sums over its processes, one for each of NVML's samples
    throttled: bool  # whether launches had to wait


def corrected(factor: float, observed: Observed) -> float:
    """The next factor; the same while nothing can be learned, since an idle container uses less by itself."""
    if not observed.percents or observed.cap <= 0:
        return factor
    share = sum(observed.percents) / len(observed.percents) + ROUNDING
    if not observed.throttled and share <= observed.cap:
        return factor
    return min(MOST, max(LEAST, factor * (1 + GAIN * (observed.cap - share) / observed.cap)))
