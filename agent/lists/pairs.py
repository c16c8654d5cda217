"""The pairing of a mode with a pair, and its metrics: how many were granted, refused, given up."""

from collections.abc import Iterator, Mapping, Sequence

from agent.model.placement import PlacementPolicy, lowest
from agent.model.preference import choose
from agent.model.units import ResourcePair
from agent.modes.wing import Node
from agent.pairing.pair_rules import PairRules
from agent.pairing.pairing import Pairing, PairingStats
from agent.pairing.resolver import RequesterResolver
from agent.telemetry import definitions as d
from agent.telemetry.reading import Series


def pairing_of(node: Node, pair: ResourcePair, placement: str, reservation_seconds: float) -> Pairing:
    """The pairing of a mode; whole GPUs, where the pair has them, are the best connected ones.

    `placement` is the policy of a pod that names none, `reservation_seconds` how long a pair is reserved for
    a container that has one member of it.
    """

    def connected(free: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        return choose(node.snapshot.value.topology, free, must_include, size)

    rules = PairRules(
        pair,
        PlacementPolicy(placement),
        reservation_seconds,
        connected if pair.whole_gpus else lowest,
        node.name,
    )
    return Pairing(rules, RequesterResolver(pair, node.holdings, node.pods), node.recorder)


def pairs_collector(
    mode: str, stats: PairingStats, reserved: int, fences: Mapping[str, bool]
) -> Iterator[Series]:
    """The metrics of a mode. `reserved`: pairs that are reserved and not complete; `fences`: which hold."""
    yield d.PAIRS, stats.granted, (mode, "granted")
    yield d.PAIRS, stats.refused, (mode, "refused")
    yield d.PAIRS, stats.expired, (mode, "expired")
    yield d.RESERVATIONS, reserved, (mode,)
    for fence, holds in fences.items():
        yield d.ENFORCED, holds, (mode, fence)
