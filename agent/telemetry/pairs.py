"""Metrics of paired resources (vGPU, MPS): how many pairs were granted, refused, given up."""

from collections.abc import Callable, Mapping

from agent.pairing.pairing import PairingStats
from agent.telemetry import definitions as d
from agent.telemetry.reading import Add


def pairs_collector(
    mode: str,
    stats: PairingStats,
    enforced: Callable[[], Mapping[str, bool]],
    reserved: Callable[[], int] = lambda: 0,
) -> Callable[[], Callable[[Add], None]]:
    """The metrics of the pair of `mode`.

    `enforced` answers which fences hold; `reserved` how many pairs are promised and not complete.
    """

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
            for fence, holds in enforced_now.items():
                series(d.ENFORCED, holds, (mode, fence))

        return add

    return read
