"""The inputs for the plugins of a mode. A module of the mode's name in this package has `build`.

vGPU and MPS need rooms above this one (isolation, daemons) and are built by the composition root itself.
"""

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

from agent.inventory.snapshot import Snapshot
from agent.kit.cell import Cell
from agent.kubelet.plugin_types import ResourcePlugin
from agent.kubelet.podresources import RecordReader
from agent.model.modes import Assignment, Mode
from agent.plugins.inject import Injector
from agent.settings import Settings


@dataclass(frozen=True, slots=True)
class PluginContext:
    """The node as plugins see it."""

    settings: Settings
    inventory: Cell[Snapshot]
    modes: Cell[Assignment]
    record: RecordReader
    injector: Injector


class PluginModule(Protocol):
    """A module of this package that is named like a mode."""

    def build(self, context: PluginContext) -> list[ResourcePlugin]:
        """The mode's resources; none is registered before the mode is first used."""


def module_of(mode: Mode) -> PluginModule:
    """The module of a mode. Raises ImportError."""
    return cast("PluginModule", importlib.import_module(f"{__package__}.{mode.value}"))
