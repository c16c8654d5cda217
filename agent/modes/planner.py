"""From what is wanted and what the GPUs can do to which GPU is sold in which mode: pure."""

from agent.inventory.snapshot import GpuState, Snapshot
from agent.model.modes import Assignment, GpuMode, Mode

MIG_REASON = "the GPU is in MIG mode, which no mode of this agent sells; turn MIG off with nvidia-smi -mig 0"


def plan(snapshot: Snapshot, wanted: Mode) -> Assignment:
    """Every GPU that passes its gates in the mode that is wanted for the node."""
    return Assignment({state.uuid: _gated(state, wanted) for state in snapshot.gpus})


def _gated(state: GpuState, wanted: Mode) -> GpuMode:
    if wanted is Mode.OFF:
        return GpuMode(reason="no mode is set for this node")
    if state.gpu.mig_enabled:
        return GpuMode(reason=MIG_REASON)
    return GpuMode(wanted)
