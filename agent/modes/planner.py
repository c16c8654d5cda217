"""From what is wanted and what the GPUs can do to what each GPU shall be offered as: pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from agent.inventory.snapshot import GpuState, Snapshot
from agent.model.modes import GpuMode, Mode
from agent.model.node_layout import LayoutError, Target, resolve
from agent.modes.desired import Desired
from agent.modes.wing import Wing

MIG_REASON = (
    "the GPU is in MIG mode, and only mode mig offers its instances; ask for mig, or turn MIG off with "
    "nvidia-smi -mig 0"
)

Wings = Mapping[Mode, Wing]
NO_WINGS: Wings = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Plan:
    """The mode of each GPU, by UUID. A `problem` is why that is not the requested one."""

    targets: Mapping[str, GpuMode]
    problem: str | None = None
    obeys: bool = True  # the request; False: what stood before


def plan(
    snapshot: Snapshot, desired: Desired, wings: Wings = NO_WINGS, lacks: str = ""
) -> Mapping[str, GpuMode]:
    """The mode of each GPU, by UUID. Raises LayoutError where the layout does not fit the node."""
    found = resolve(desired.entries, [state.gpu for state in snapshot.gpus])
    return _gated_targets(snapshot, found, wings, lacks)


def decide(
    snapshot: Snapshot,
    desired: Desired,
    standing: Desired | None,
    wings: Wings = NO_WINGS,
    lacks: str = "",
) -> Plan:
    """The plan for a request; for one that cannot be obeyed that for `standing`, the last one that could.

    `standing` is followed as far as it goes: a GPU that it names may be gone.
    `lacks`: why no container of the node would get all that is to come with a GPU.
    """
    problem = desired.problem
    if desired.entries:
        try:
            targets = plan(snapshot, desired, wings, lacks)
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
    return Plan(_gated_targets(snapshot, found, wings, lacks), problem, obeys=False)


def _all_refused(targets: Mapping[str, GpuMode]) -> str | None:
    """Why the modes refuse a request on all GPUs; None: they do not, or nothing is wanted."""
    reasons = sorted({target.reason for target in targets.values() if target.refused})
    return "; ".join(reasons) if reasons and all(t.mode is Mode.OFF for t in targets.values()) else None


def _gated_targets(
    snapshot: Snapshot, targets: Mapping[str, Target], wings: Wings, lacks: str
) -> Mapping[str, GpuMode]:
    return {state.uuid: _gated(state, targets[state.uuid], wings, lacks) for state in snapshot.gpus}


def _gated(state: GpuState, target: Target, wings: Wings, lacks: str) -> GpuMode:
    if target.mode is Mode.OFF:
        return GpuMode(reason="no mode is set for this GPU")
    wing, dra = wings.get(target.mode), target.mode.row.by_claims
    if state.gpu.mig_enabled and not target.mode.row.partitioned:
        undone = next((text for each in wings.values() if (text := each.undoes(state))), "")
        return GpuMode(reason=undone or MIG_REASON, refused=not undone)
    if reason := (wing.obstacle(state) if wing else "") or lacks:
        return GpuMode(reason=reason, refused=True)
    return GpuMode(target.mode, replicas=target.replicas, dra=dra, instances=target.instances)
