"""The wings of the agent, and those modes that still have a module of this package."""

from collections.abc import Mapping, Sequence

from agent.app import build_mps, build_vgpu
from agent.app.mode_parts import ModeContext, ModeParts
from agent.inventory.snapshot import GpuState
from agent.kubelet.plugin_types import ResourcePlugin
from agent.kubelet.podresources import Holding
from agent.model.gpu import Gpu
from agent.model.modes import OFFERED_MODES, Mode
from agent.modes.wing import Document, Node, Place, Wing
from agent.whole.wing import Whole

WINGS: tuple[type[Wing], ...] = (Whole,)


class PartsWing(Wing):
    """A mode that is not a wing yet."""

    def __init__(self, parts: ModeParts) -> None:
        self.parts = parts

    @classmethod
    async def build(cls, node: Node) -> "PartsWing":
        raise NotImplementedError

    def plugins(self) -> Sequence[ResourcePlugin]:
        return self.parts.plugins

    def obstacle(self, state: GpuState) -> str:
        return self.parts.refusal(state) or ""

    async def prepare(self, gpu: Gpu) -> None:
        if self.parts.backend:
            await self.parts.backend.prepare(gpu)

    async def give_back(self, gpu: Gpu) -> None:
        if self.parts.backend:
            await self.parts.backend.give_back(gpu)

    def depends_on(self) -> object:
        return self.parts.backend.depends_on() if self.parts.backend else None

    def enforced(self) -> str | None:
        return self.parts.enforced()


class PartsMps(PartsWing):
    mode = Mode.MPS
    prepares = True

    def gpu_facts(self, uuid: str) -> Document:
        return {"mps": self.parts.daemon(uuid)}


class PartsVgpu(PartsWing):
    mode = Mode.VGPU

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
    if Mode.MPS not in wings:
        wings[Mode.MPS] = PartsMps(await build_mps.build(context))
    return {mode: wings[mode] for mode in OFFERED_MODES}
