"""Builds vGPU: its resources, and the limits of containers where they are enforced."""

from typing import TYPE_CHECKING

from agent.app.mode_parts import ModeContext, ModeParts
from agent.app.parts import ClusterAccess
from agent.vgpu.node_limits import Surroundings
from agent.vgpu.wing import Vgpu

if TYPE_CHECKING:
    from agent.cluster.namespaces import NamespaceLabels


async def build(context: ModeContext) -> ModeParts:
    """Build the wing; of its limits nothing is on the host before the mode is first used."""
    core, cluster, plugins = context.core, context.cluster, context.plugins
    node = Surroundings(
        core.settings,
        core.nvml,
        core.calls,
        plugins.inventory,
        core.holdings.cell,
        context.uses,
        plugins.injector,
        plugins.recorder,
        cluster.pods if cluster else None,
        _labels(cluster) if cluster else None,
        context.grown,
        context.tasks.start,
    )
    wing = await Vgpu.build(plugins, node)
    core.readiness.degradations.append(wing.remarks)
    core.collectors.append(wing.metrics)
    return ModeParts(wing.plugins(), enforced=wing.enforced, limits=wing)


def _labels(cluster: ClusterAccess) -> "NamespaceLabels":
    from agent.cluster.namespaces import NamespaceLabels  # noqa: PLC0415  loads the client

    return NamespaceLabels(cluster.api)
