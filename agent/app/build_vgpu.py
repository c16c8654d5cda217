"""Builds vGPU: its resources, and the limits of containers where they are enforced."""

from collections.abc import Iterator
from functools import partial

from agent.app.mode_parts import ModeContext, ModeParts
from agent.app.vgpu_limits import NO_FENCES, VgpuLimits, build_limits
from agent.kit.cell import Cell
from agent.lists.pairs import pairs_collector
from agent.model.modes import Assignment, Mode
from agent.telemetry.reading import Series
from agent.vgpu import plugin as vgpu


async def build(context: ModeContext) -> ModeParts:
    """Build the two resources; rooms of limits are loaded only where there may be some."""
    core = context.core
    grown = await build_limits(context)
    limits = grown if isinstance(grown, VgpuLimits) else None
    shares, plugins = vgpu.build(context.node, limits, grown.units_grown if grown else None)
    if grown:
        grown.follow_resizes(context, shares)
    if limits:
        core.readiness.degradations.append(partial(_remarks, limits, context.node.assignment))

    def pairs() -> Iterator[Series]:
        pairing = shares.pairing
        return pairs_collector(
            "vgpu", pairing.stats, pairing.waiting, limits.fences() if limits else NO_FENCES
        )

    core.collectors.append(pairs)
    return ModeParts(plugins, enforced=limits.enforced if limits else lambda: "no", limits=limits)


def _remarks(limits: VgpuLimits, assignment: Cell[Assignment]) -> list[str]:
    problem = limits.problem
    if problem and any(each.mode is Mode.VGPU for each in assignment.value.gpus.values()):
        return [f"vGPU containers start without the enforcement library: {problem}"]
    return []
