"""The wings: the modes that this agent offers GPUs in, each with a plugin server of its own."""

from agent.mig.wing import MigWing
from agent.modes.wing import Wing
from agent.mps.wing import MpsWing
from agent.vgpu.wing import VgpuWing
from agent.whole.wing import WholeWing

# Allowed by the configuration or not: that may change while the agent runs.
WINGS: tuple[type[Wing], ...] = (WholeWing, VgpuWing, MpsWing, MigWing)
