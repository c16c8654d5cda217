"""Builds the modes of the table: wings, and beside them those that still have a module of this package."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from agent.app.mode_parts import ModeContext, ModeModule, ModeParts
from agent.kubelet.podresources import Holding
from agent.model.modes import OFFERED_MODES, Mode
from agent.modes.wing import Wing
from agent.mps.wing import MpsWing
from agent.whole.wing import Whole

WINGS: tuple[type[Wing], ...] = (Whole, MpsWing)


async def build_modes(context: ModeContext) -> Mapping[Mode, ModeParts]:
    """All modes of the table, allowed by the configuration or not: that may change while the agent runs."""
    wings = {each.mode: each for each in WINGS}
    return {
        mode: _parts_of(await wings[mode].build(context.node), context)
        if mode in wings
        else await cast("ModeModule", import_module(f"{__package__}.build_{mode.value}")).build(context)
        for mode in OFFERED_MODES
    }


def _parts_of(wing: Wing, context: ModeContext) -> ModeParts:
    """A wing as the modes without one are seen, its tasks started."""
    context.core.collectors.append(wing.metrics)
    context.core.readiness.degradations.append(wing.remarks)
    for task in wing.tasks():
        context.tasks.start(task.name, task.run)
    return ModeParts(
        wing.plugins(),
        wing if wing.prepares else None,
        wing.obstacle,
        lambda uuid: wing.gpu_facts(uuid).get("mps"),
        wing.enforced,
        WingLimits(wing) if wing.mode.row.resizable else None,
    )


class WingLimits:
    """Limits of a wing's containers, as those without one have them."""

    def __init__(self, wing: Wing) -> None:
        self._wing = wing
        self.allotted = wing.allotted

    def document(self, holding: Holding, gpu: str) -> Mapping[str, Any] | None:
        return self._wing.holder_facts(holding, gpu).get("limits")
