"""From what is wanted and what GPUs can do to what each is to be offered as, and how far the node is."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import anyio
import structlog

from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.tasks import Backoff
from agent.model.holding import GpuHolder
from agent.model.modes import SEPARATOR, Assignment, GpuMode, Mode, parse
from agent.model.node_inventory import LayoutError, Target, resolve
from agent.modes.desired import Desired
from agent.modes.transition import ModeStage, ModeState
from agent.modes.wing import NO_WINGS, Wings

# How far the node is on its way to what is wanted: for people, the Node object, metrics and status.


class Phase(Enum):
    """The node's mode as a whole; the value stands in the state annotation."""

    APPLIED = "applied"
    SWITCHING = "switching"
    BLOCKED = "blocked"  # nothing will change until somebody acts
    FAILED = "failed"  # setting up failed; it is tried again


@dataclass(frozen=True, slots=True)
class GpuSwitch:
    """One GPU: what it is offered as, what it shall be offered as, and what stands between."""

    index: int
    uuid: str
    active: GpuMode
    wanted: GpuMode
    waiting_for: tuple[str, ...] = ()  # pods (namespace/name) that hold it in the old mode
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SwitchState:
    phase: Phase
    desired: str  # the word that was asked for
    message: str
    gpus: tuple[GpuSwitch, ...] = ()
    applied: str = "none"  # the word that was in force last

    def remarks(self) -> list[str]:
        """A request that cannot be obeyed."""
        if self.phase not in (Phase.BLOCKED, Phase.FAILED):
            return []
        return [f"mode {self.desired} is not in force: {self.message}"]


STARTING = SwitchState(Phase.SWITCHING, "none", "the agent is starting")


# When set-ups that failed are tried again: all of a node together, at ever longer intervals.

FIRST_SECONDS = 5.0
LONGEST_SECONDS = 1800.0


class Retry:
    """The node's one clock for failed set-ups."""

    def __init__(self) -> None:
        self._backoff = Backoff(FIRST_SECONDS, LONGEST_SECONDS)
        self._at: float | None = None
        self._depends_on: object = None

    @property
    def seconds(self) -> float | None:
        """Until the next try; None: none is waited for."""
        return None if self._at is None else max(0.05, self._at - anyio.current_time())

    def failed(self, depends_on: object) -> None:
        """A round of tries is over, and some failed; again is nothing.

        `depends_on`: what the outcome may depend on, compared by value; once it differs the next try is due.
        """
        if self._at is None:
            self._depends_on = depends_on
            self._at = anyio.current_time() + self._backoff.next()

    def due(self, depends_on: object) -> bool:
        """Whether to try again now; if so, the round has begun."""
        if self._at is None:
            return False
        if depends_on != self._depends_on:
            self._backoff.reset()
        elif anyio.current_time() < self._at:
            return False
        self._at = None
        return True

    def reset(self) -> None:
        """Nothing failed, or something else is wanted."""
        self._backoff.reset()
        self._at = None


# Compares modes in force with wanted ones, and puts the difference into words.

log = structlog.get_logger()


def log_changes(before: Assignment, states: Mapping[str, ModeState], listed: Mapping[str, GpuMode]) -> None:
    """Log what `listed` changes: one line for GPUs that change in the same way."""
    alike: dict[tuple[ModeStage, GpuMode], list[str]] = {}
    for uuid, mode in listed.items():
        if mode != before.of(uuid):
            alike.setdefault((states[uuid].stage, mode), []).append(uuid)
    for (stage, mode), gpus in alike.items():
        details = {"mode": mode.mode.value, "selling": mode.offered, "reason": mode.reason or None}
        log.info("gpu_mode", gpus=gpus, stage=stage.value, **details)


def must_drain(active: GpuMode, wanted: GpuMode) -> bool:
    """Whether a GPU has to be free of holders before it can become what is wanted."""
    if active.dra and wanted.dra:
        return False  # its claims choose
    return active.mode is not Mode.OFF and active.list_key != wanted.list_key


def in_use(
    assignment: Assignment,
    targets: Mapping[str, GpuMode],
    holders: Mapping[str, Sequence[GpuHolder]],
    apart: Collection[str],
) -> Mapping[str, tuple[str, ...]]:
    """GPUs that would have to drain for these targets, and who holds them; those in `apart` do not count."""
    return {
        uuid: pods_of(holders[uuid])
        for uuid, wanted in targets.items()
        if uuid not in apart and holders.get(uuid) and must_drain(assignment.of(uuid), wanted)
    }


def handed_out_here(
    holders: Mapping[str, Sequence[GpuHolder]], had: Collection[Mode]
) -> Mapping[str, Sequence[GpuHolder]]:
    """Without holders of instances, where this agent never had their mode.

    Instances have the same names and IDs by NVIDIA's plugin, whose resources the kubelet would take from it.
    """
    return {
        uuid: ours
        for uuid, held in holders.items()
        if (ours := [each for each in held if not each.mode.row.partitioned or each.mode in had])
    }


def taken_over(held: Sequence[GpuHolder], wanted: GpuMode) -> GpuMode:
    """The mode that a GPU must be in, since pods got units of it that way before this process began.

    A checkpoint names pods that have ended, too: their units may have been of a mode before.
    """

    def doubt(holder: GpuHolder) -> tuple[bool, bool]:
        return not holder.holding.namespace, not holder.holding.listed

    least = min(doubt(each) for each in held)
    held = [each for each in held if doubt(each) == least]
    mode, sliced = held[0].mode, held[0].replica
    if held[0].holding.share:
        return GpuMode(mode, dra=True)
    # How many replicas there were only matters to a list; those that are held must be on it.
    numbers = [parse(text).number for holder in held for text in holder.holding.ids if holder.replica]
    replicas = max(numbers, default=0) + 1
    if wanted.mode is mode and (wanted.replicas > 1) is sliced and wanted.replicas >= replicas:
        replicas = wanted.replicas
    return GpuMode(mode, replicas=replicas)


def pods_of(holders: Sequence[GpuHolder]) -> tuple[str, ...]:
    """namespace/name of the holders, each once."""
    return tuple(sorted({holder.pod for holder in holders}))


def named(waiting: Mapping[str, tuple[str, ...]], most: int = 5) -> tuple[int, str]:
    """How many pods there are, and the first of them in a list."""
    pods = sorted({pod for names in waiting.values() for pod in names})
    more = f" and {len(pods) - most} more" if len(pods) > most else ""
    return len(pods), ", ".join(pods[:most]) + more


def uncounted(holders: Mapping[str, Sequence[GpuHolder]], assignment: Assignment) -> str:
    """How much room of GPUs on offer the scheduler does not see because others drain, in words; empty: none.

    It subtracts what all bound pods ask for from the node's allocatable units, and units that are held on
    GPUs that drain are allocatable no more.
    """
    offered = {each.mode for each in assignment.gpus.values() if each.offered}
    counts: dict[str, int] = {}
    for uuid, held in holders.items():
        mode = assignment.of(uuid)
        if mode.offered or mode.mode not in offered:
            continue
        for holding in (each.holding for each in held):
            here = sum(text.partition(SEPARATOR)[0] == uuid for text in holding.ids)
            if here:
                counts[holding.resource] = counts.get(holding.resource, 0) + here
    if not counts:
        return ""
    units = ", ".join(f"{count} {resource}" for resource, count in sorted(counts.items()))
    return (
        f"; {units} held on GPUs that drain are not on offer but still count as used: pods may stay Pending "
        "though other GPUs have room"
    )


def summary(targets: Mapping[str, GpuMode]) -> str:
    """`2 GPU(s) mps, 6 GPU(s) pgpu`; with the reason where one is off although a mode is wanted."""
    counts: dict[str, int] = {}
    for wanted in targets.values():
        text = wanted.requested.value + (f" in {wanted.replicas} slices" if wanted.replicas > 1 else "")
        if wanted.mode is Mode.OFF and wanted.refused:
            text += f" ({wanted.reason})"
        counts[text] = counts.get(text, 0) + 1
    return ", ".join(f"{count} GPU(s) {text}" for text, count in sorted(counts.items())) or "no GPU"


def switches_of(
    snapshot: Snapshot,
    assignment: Assignment,
    targets: Mapping[str, GpuMode],
    waiting: Mapping[str, tuple[str, ...]],
    problems: Mapping[str, str],
) -> tuple[GpuSwitch, ...]:
    """The state of each GPU, for status, Node object and metrics."""
    return tuple(
        GpuSwitch(
            state.gpu.index,
            state.uuid,
            assignment.of(state.uuid),
            targets.get(state.uuid, assignment.of(state.uuid)),
            waiting.get(state.uuid, ()),
            problems.get(state.uuid, ""),
        )
        for state in snapshot.gpus
    )


# From what is wanted and what the GPUs can do to what each GPU shall be offered as: pure.

MIG_REASON = (
    "the GPU is in MIG mode, and only mode mig offers its instances; ask for mig, or turn MIG off with "
    "nvidia-smi -mig 0"
)


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
    snapshot: Snapshot, desired: Desired, standing: Desired | None, wings: Wings = NO_WINGS, lacks: str = ""
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
