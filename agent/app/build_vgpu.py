"""Builds vGPU: its resources, and the limits of containers where they are enforced."""

from collections.abc import Callable, Mapping
from functools import partial

from agent.app.mode_parts import Limits, ModeContext, ModeParts
from agent.app.vgpu_limits import VgpuLimits, build_limits
from agent.kit.cell import Cell
from agent.model.modes import Assignment, Mode
from agent.plugins import vgpu
from agent.plugins.shared_pair import no_fence, none_grown
from agent.telemetry.pairs import pairs_collector

NO_FENCES: Mapping[str, bool] = dict.fromkeys(("driver", "library", "sweep"), False)


async def build(context: ModeContext) -> ModeParts:
    """Build the two resources; rooms of limits are loaded only where there may be some."""
    core = context.core
    grown = await build_limits(context)
    enforced = grown if isinstance(grown, VgpuLimits) else None

    def limits() -> Limits | None:
        return enforced.parts if enforced else None

    def fences() -> Mapping[str, bool]:
        now = limits()
        return now.fences() if now else NO_FENCES

    shares, plugins = vgpu.build(
        context.plugins, enforced or no_fence, grown.units_grown if grown else none_grown
    )
    if grown:
        grown.follow_resizes(context, shares)
    core.readiness.degradations.append(partial(_remarks, limits, context.plugins.modes))
    core.collectors.append(
        pairs_collector("vgpu", shares.pairing.stats, fences, lambda: shares.pairing.waiting)
    )
    return ModeParts(plugins, limits=limits)


def _remarks(limits: Callable[[], Limits | None], assignment: Cell[Assignment]) -> list[str]:
    now = limits()
    problem = now.problem if now else None
    if problem and any(each.mode is Mode.VGPU for each in assignment.value.gpus.values()):
        return [f"vGPU containers start without the enforcement library: {problem}"]
    return []
