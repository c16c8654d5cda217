"""Units that vGPU containers have grown by, as the agent under test knows them."""

from collections.abc import Mapping

from agent.app.agent import Agent
from agent.model.modes import Mode
from agent.vgpu.wing import VgpuWing


def grown_of(agent: Agent | None) -> Mapping[str, frozenset[str]]:
    """By GPU; none while no agent runs."""
    wing = agent.wings[Mode.VGPU] if agent else None
    return wing.limits.isolation.grown if isinstance(wing, VgpuWing) else {}
