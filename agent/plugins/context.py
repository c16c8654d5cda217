"""The inputs for the plugins of a mode. A module of the mode's name in this package has `build`.

Those of vGPU and MPS take further ones, limits and daemons, from the composition root.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from agent.inventory.snapshot import Snapshot
from agent.kit.cell import Cell
from agent.kubelet.plugin_types import ResourcePlugin
from agent.kubelet.podresources import RecordReader
from agent.model.modes import Assignment, Mode
from agent.model.placement import PlacementPolicy, lowest
from agent.model.preference import choose
from agent.model.units import ResourcePair
from agent.pairing.pair_rules import PairRules
from agent.pairing.pairing import Pairing
from agent.pairing.pod_access import PodSource, Recorder
from agent.pairing.resolver import RequesterResolver
from agent.plugins.inject import Injector
from agent.settings import Settings


@dataclass(frozen=True, slots=True)
class PluginContext:
    settings: Settings
    inventory: Cell[Snapshot]
    modes: Cell[Assignment]
    record: RecordReader
    injector: Injector
    pods: PodSource = field(default_factory=PodSource)
    recorder: Recorder = field(default_factory=Recorder)
    node: str = ""  # its name; empty: there is no way to the Kubernetes API


def pairing_of(
    context: PluginContext, pair: ResourcePair, placement: str, reservation_seconds: float
) -> Pairing:
    """The pairing of a mode; whole GPUs, where the pair has them, are the best connected ones.

    `placement` is the policy of a pod that names none, `reservation_seconds` how long a pair is promised to a
    container that has one member of it.
    """

    def connected(free: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        return choose(context.inventory.value.topology, free, must_include, size)

    rules = PairRules(
        pair,
        PlacementPolicy(placement),
        reservation_seconds,
        connected if pair.whole_gpus else lowest,
        context.node,
    )
    return Pairing(rules, RequesterResolver(pair, context.record, context.pods), context.recorder)


class PluginModule(Protocol):
    """A module of this package that is named like a mode."""

    def build(self, context: PluginContext) -> list[ResourcePlugin]:
        """The mode's resources; none is registered before the mode is first used."""


def module_of(mode: Mode) -> PluginModule:
    """The module of a mode. Raises ImportError."""
    return cast("PluginModule", importlib.import_module(f"{__package__}.{mode.value}"))
