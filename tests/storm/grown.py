"""Units that vGPU containers have grown by, as the agent under test knows them."""

from collections.abc import Mapping

from agent.app.agent import Agent
from agent.app.build_modes import PartsVgpu
from agent.app.vgpu_limits import VgpuLimits
from agent.model.modes import Mode


def grown_of(agent: Agent | None) -> Mapping[str, frozenset[str]]:
    """By GPU; none while no agent runs, and where none has limits."""
    wing = agent.wings[Mode.VGPU] if agent else None
    limits = wing.parts.limits if isinstance(wing, PartsVgpu) else None
    parts = limits.parts if isinstance(limits, VgpuLimits) else None
    return parts.isolation.grown if parts else {}
