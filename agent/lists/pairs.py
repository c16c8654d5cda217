"""Metrics of paired resources (vGPU, MPS): how many pairs were granted, refused, given up."""

from collections.abc import Iterator, Mapping

from agent.pairing.pairing import PairingStats
from agent.telemetry import definitions as d
from agent.telemetry.reading import Series


def pairs_collector(
    mode: str, stats: PairingStats, reserved: int, fences: Mapping[str, bool]
) -> Iterator[Series]:
    """The metrics of a mode. `reserved`: pairs that are promised and not complete; `fences`: which hold."""
    yield d.PAIRS, stats.granted, (mode, "granted")
    yield d.PAIRS, stats.refused, (mode, "refused")
    yield d.PAIRS, stats.expired, (mode, "expired")
    yield d.RESERVATIONS, reserved, (mode,)
    for fence, holds in fences.items():
        yield d.ENFORCED, holds, (mode, fence)
