"""The wings of the agent: a fourth mode is named here."""

from collections.abc import Mapping

from agent.model.modes import OFFERED_MODES, Mode
from agent.modes.wing import Node, Wing
from agent.mps.wing import MpsWing
from agent.vgpu.wing import VgpuWing
from agent.whole.wing import Whole

WINGS: tuple[type[Wing], ...] = (Whole, VgpuWing, MpsWing)


async def build_wings(node: Node) -> Mapping[Mode, Wing]:
    """All modes of the table, allowed by the configuration or not: that may change while the agent runs."""
    wings = {each.mode: await each.build(node) for each in WINGS}
    return {mode: wings[mode] for mode in OFFERED_MODES}
