"""Builds vGPU: its resources, and the limits of containers where they are enforced."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import anyio.to_thread

from agent.app.mode_parts import Limits, ModeContext, ModeParts
from agent.kit.cell import Cell
from agent.model.modes import Assignment, Mode
from agent.plugins import vgpu
from agent.plugins.shared_pair import Fence, SharedPair, no_fence, none_grown
from agent.telemetry.pairs import pairs_collector


async def build(context: ModeContext) -> ModeParts:
    """Build the two resources; the room of limits is loaded only where there may be some."""
    settings = context.core.settings
    if settings.modes.vgpu and settings.vgpu.enforcement != "off":
        return await _with_limits(context)
    if settings.modes.vgpu and await anyio.to_thread.run_sync(_limited_before, Path(settings.host.state)):
        from agent.app.build_isolation import keep_limits  # noqa: PLC0415  a room that is off

        await keep_limits(settings, context.core.holdings.cell, context.tasks)
    _, plugins = _resources(context, no_fence, None)
    return ModeParts(plugins)


async def _with_limits(context: ModeContext) -> ModeParts:
    from agent.app.build_isolation import VgpuFence, build_isolation  # noqa: PLC0415  a room that may be off

    limits = await build_isolation(context)
    shares, plugins = _resources(context, VgpuFence(limits), limits)
    limits.follow_resizes(context, shares)
    context.core.readiness.degradations.append(partial(_remarks, limits, context.assignment))
    return ModeParts(plugins, limits=limits)


def _resources(
    context: ModeContext, fence: Fence, limits: Limits | None
) -> tuple[SharedPair, list[vgpu.VgpuPlugin]]:
    core, cluster = context.core, context.cluster
    shares, plugins = vgpu.build(
        core.settings,
        core.inventory.snapshot,
        context.assignment,
        context.injector,
        core.holdings,
        context.pods,
        context.recorder,
        cluster.node.name if cluster else "",
        fence,
        limits.units_grown if limits else none_grown,
    )
    core.collectors.append(
        pairs_collector(
            "vgpu",
            shares.pairing.stats,
            limits.fences if limits else _no_fences,
            lambda: shares.pairing.waiting,
        )
    )
    return shares, plugins


def _no_fences() -> Mapping[str, bool]:
    return dict.fromkeys(("driver", "library", "sweep"), False)


def _remarks(limits: Limits, assignment: Cell[Assignment]) -> list[str]:
    problem = limits.problem
    if problem and any(each.mode is Mode.VGPU for each in assignment.value.gpus.values()):
        return [f"vGPU containers start without the enforcement library: {problem}"]
    return []


def _limited_before(state: Path) -> bool:
    """Whether containers were given limits that may still run (`agent.isolation.copies`)."""
    return any((state / "limits").glob("*.json"))
