"""By how much learned device times are off, from outside: the observer of compute shares.

The enforcement library prices launches by times that the GPU's events gave it. They contain what other
containers did in between, and miss what runs beside each other. So each second the agent compares what NVML
measured of a container with what it may use, and gives the library a factor. It also says whom the container
shares the GPU's time with, so that the library can tell a long launch from an interrupted one.
"""

import math

GAIN = 0.4
LEAST, MOST = 0.4, 4.0
MOST_EXCESS = 1.0  # a second of more may be that in which the library learned what is launched
ROUNDING = 0.5  # NVML cuts percentages off


def corrected(factor: float, cap: float, used: float, *, throttled: bool) -> float:
    """The factor for the next second; the same while nothing can be learned.

    `cap` and `used` in percent of the GPU. `throttled`: launches had to wait; a container that did not wait
    may use less by itself.
    """
    share = used + ROUNDING
    if cap <= 0 or (not throttled and share <= cap):
        return factor
    excess = min(MOST_EXCESS, (share - cap) / cap)
    return min(MOST, max(LEAST, factor * math.exp(-GAIN * excess)))


def rivals(own: float, processes: int, total: float, everybody: int) -> float:
    """How many other processes are at work on a GPU at a time, as one of a container's processes meets them.

    `own` percent of the GPU went to the container's `processes`, `total` to all containers, with `everybody`
    for processes. Rounded up to eighths: 0 is nobody at all.
    """
    mine = own / max(1, processes)
    busy = min(1.0, max(0.0, total - mine) / max(1.0, 100 - mine))  # of the time that it left to others
    return math.ceil(max(0, everybody - 1) * busy * 8) / 8
