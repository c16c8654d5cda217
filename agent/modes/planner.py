"""From what is wanted and what the GPUs can do to what each GPU shall be offered as: pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agent.inventory.snapshot import GpuState, Snapshot
from agent.model.modes import GpuMode, Mode
from agent.model.node_layout import LayoutError, Target, resolve
from agent.modes.desired import Desired

MIG_REASON = "the GPU is in MIG mode, which no mode of this agent offers; turn MIG off with nvidia-smi -mig 0"

# Why a GPU cannot be offered in a mode, in words; None: it can.
Gate = Callable[[GpuState, Mode], str | None]


def no_gate(_: GpuState, __: Mode) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Plan:
    """The mode of each GPU, by UUID. A `problem` is why that is not the requested one."""

    targets: Mapping[str, GpuMode]
    problem: str | None = None
    obeys: bool = True  # the request; False: what stood before


def plan(snapshot: Snapshot, desired: Desired, gate: Gate = no_gate) -> Mapping[str, GpuMode]:
    """The mode of each GPU, by UUID. Raises LayoutError where the layout does not fit the node."""
    return _gated_targets(snapshot, resolve(desired.entries, [state.gpu for state in snapshot.gpus]), gate)


def decide(snapshot: Snapshot, desired: Desired, standing: Desired | None, gate: Gate = no_gate) -> Plan:
    """The plan for a request; for one that cannot be obeyed that for `standing`, the last one that could.

    `standing` is followed as far as it goes: a GPU that it names may be gone.
    """
    problem = desired.problem
    if desired.entries:
        try:
            targets = plan(snapshot, desired, gate)
        except LayoutError as error:
            problem = f"layout {desired.name}: {error}"
        else:
            refusals = _all_refused(targets)
            if refusals is None:
                return Plan(targets, problem)
            problem = f"no GPU can be offered as {desired.name}: {refusals}"
    problem = problem or "nothing is wanted"
    if standing is None:
        return Plan({}, problem, obeys=False)
    found = resolve(standing.entries, [state.gpu for state in snapshot.gpus], lenient=True)
    return Plan(_gated_targets(snapshot, found, gate), problem, obeys=False)


def _all_refused(targets: Mapping[str, GpuMode]) -> str | None:
    """Why the gates refuse a request on all GPUs; None: they do not, or nothing is wanted."""
    reasons = sorted({target.reason for target in targets.values() if target.refused})
    return "; ".join(reasons) if reasons and all(t.mode is Mode.OFF for t in targets.values()) else None


def _gated_targets(snapshot: Snapshot, targets: Mapping[str, Target], gate: Gate) -> Mapping[str, GpuMode]:
    return {state.uuid: _gated(state, targets[state.uuid], gate) for state in snapshot.gpus}


def _gated(state: GpuState, target: Target, gate: Gate) -> GpuMode:
    if target.mode is Mode.OFF:
        return GpuMode(reason="no mode is set for this GPU")
    reason = MIG_REASON if state.gpu.mig_enabled else gate(state, target.mode)
    if reason:
        return GpuMode(reason=reason, refused=True)
    return GpuMode(target.mode, replicas=target.replicas)
