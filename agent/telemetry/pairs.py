"""Metrics of paired resources (vGPU, MPS): how many pairs were granted, refused, given up."""

from collections.abc import Callable
from typing import Protocol

from agent.telemetry import definitions as d
from agent.telemetry.reading import Add


class PairStats(Protocol):
    """Counts, as the pairing of a mode keeps them."""

    granted: int
    refused: int
    expired: int


def part(
    mode: str, stats: PairStats, enforced: Callable[[], bool], reserved: Callable[[], int] = lambda: 0
) -> Callable[[], Callable[[Add], None]]:
    """What `mode` adds to a scrape; `reserved` answers how many pairs are promised and not complete."""

    def read() -> Callable[[Add], None]:
        counts = (
            (stats.granted, "granted"),
            (stats.refused, "refused"),
            (stats.expired, "expired"),
        )
        waiting, enforced_now = reserved(), enforced()

        def add(series: Add) -> None:
            for value, result in counts:
                series(d.PAIRS, value, (mode, result))
            series(d.RESERVATIONS, waiting, (mode,))
            series(d.ENFORCED, enforced_now, (mode,))

        return add

    return read
