"""The wings of the agent, and the mode that still has a module of this package."""

from collections.abc import Mapping, Sequence

from agent.app import build_vgpu
from agent.app.mode_parts import ModeContext, ModeParts
from agent.kubelet.plugin_types import ResourcePlugin
from agent.kubelet.podresources import Holding
from agent.model.modes import OFFERED_MODES, Mode
from agent.modes.wing import Document, Node, Place, Wing
from agent.mps.wing import MpsWing
from agent.whole.wing import Whole

WINGS: tuple[type[Wing], ...] = (Whole, MpsWing)


class PartsVgpu(Wing):
    """A mode that is not a wing yet."""

    mode = Mode.VGPU

    def __init__(self, parts: ModeParts) -> None:
        self.parts = parts

    @classmethod
    async def build(cls, node: Node) -> "PartsVgpu":
        raise NotImplementedError

    def plugins(self) -> Sequence[ResourcePlugin]:
        return self.parts.plugins

    def enforced(self) -> str | None:
        return self.parts.enforced()

    def holder_facts(self, holding: Holding, uuid: str) -> Document:
        pair, limits = self.mode.row.pair, self.parts.limits
        known = limits and pair and holding.resource == pair.memory
        return {"limits": limits.document(holding, uuid)} if known and limits else {}

    def allotted(self) -> Mapping[Place, float]:
        return self.parts.limits.allotted() if self.parts.limits else {}


async def build_wings(context: ModeContext) -> Mapping[Mode, Wing]:
    """All modes of the table, allowed by the configuration or not: that may change while the agent runs."""
    wings: dict[Mode, Wing] = {each.mode: await each.build(context.node) for each in WINGS}
    if Mode.VGPU not in wings:
        wings[Mode.VGPU] = PartsVgpu(await build_vgpu.build(context))
    return {mode: wings[mode] for mode in OFFERED_MODES}
