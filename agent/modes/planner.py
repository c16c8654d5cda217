"""From what is wanted and what the GPUs can do to what each GPU shall be sold as: pure."""

from collections.abc import Callable, Mapping

from agent.inventory.snapshot import GpuState, Snapshot
from agent.model.layout import LayoutError, Target, resolve
from agent.model.modes import GpuMode, Mode
from agent.modes.desired import Desired

MIG_REASON = "the GPU is in MIG mode, which no mode of this agent sells; turn MIG off with nvidia-smi -mig 0"

# Why a GPU cannot be sold in a mode, in words; None: it can.
Gate = Callable[[GpuState, Mode], str | None]


def no_gate(_: GpuState, __: Mode) -> str | None:
    """A gate that lets everything pass."""
    return None


def plan(snapshot: Snapshot, desired: Desired, gate: Gate = no_gate) -> Mapping[str, GpuMode]:
    """What each GPU shall be sold as, by UUID. Raises LayoutError where the layout does not fit the node."""
    targets = resolve(desired.entries, [state.gpu for state in snapshot.gpus])
    return {state.uuid: _gated(state, targets[state.uuid], gate) for state in snapshot.gpus}


def _gated(state: GpuState, target: Target, gate: Gate) -> GpuMode:
    if target.mode is Mode.OFF:
        return GpuMode(reason="no mode is set for this GPU")
    reason = MIG_REASON if state.gpu.mig_enabled else gate(state, target.mode)
    if reason:
        return GpuMode(reason=reason)
    return GpuMode(target.mode, replicas=target.replicas)


__all__ = ["Gate", "LayoutError", "no_gate", "plan"]
