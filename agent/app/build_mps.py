"""Starts the wing of MPS, and hands it to the rest of the agent."""

from agent.app.mode_parts import ModeContext, ModeParts
from agent.mps.wing import MpsWing


async def build(context: ModeContext) -> ModeParts:
    """See agent.app.mode_parts.ModeModule."""
    core, cluster = context.core, context.cluster
    pods, recorder = (cluster.pods, cluster.events) if cluster else (None, None)
    wing = await MpsWing.build(
        context.plugins, core.nvml, core.calls, context.desired, context.uses, pods, recorder
    )
    for name, task in wing.tasks():
        context.tasks.start(name, task)
    core.collectors.append(wing.metrics)
    core.readiness.degradations.append(wing.remarks)
    return ModeParts(wing.plugins(), wing, refusal=wing.obstacle, daemon=wing.daemon, enforced=wing.enforced)
