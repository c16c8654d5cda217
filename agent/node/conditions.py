"""Writes on the Node object: labels of driver and GPUs, how far the mode is, and where a writing fails.

Everybody who may get nodes reads annotation and condition, and pods belong to many tenants: both count pods,
and name none. `status` and events, for which one needs other rights, have the names.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import anyio
import structlog

from agent.cluster.api import ApiError, now
from agent.cluster.node import OwnNode
from agent.inventory.actor import Transition
from agent.inventory.snapshot import Snapshot
from agent.kit.tasks import Backoff, Cell, follow
from agent.model.gpu import Gpu, Instance
from agent.model.health import FaultKind, HealthState
from agent.model.holding import Record
from agent.model.modes import OFFERED_MODES, SWITCHING, Assignment, Mode
from agent.model.pod import pods_counted
from agent.modes.planner import GpuSwitch, Phase, SwitchState
from agent.node.capacity import Capacity, SchedulingTaint
from agent.settings import Settings
from agent.telemetry import definitions as d
from agent.telemetry.series import Series

# Keeps cluster-autoscaler from removing the node while pods hold its GPUs in a mode that it cannot see.
#
# It knows `nvidia.com/gpu` alone: a node of a GPU group that lists none is unready to it, and never in use.

SCALE_DOWN = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
# Beside it where the agent has set it. One that a person set is left alone.
SCALE_DOWN_MARK = "gpu-node-agent.io/scale-down-disabled"
SEEN = "nvidia.com/gpu"


def holds_unseen(record: Record | None) -> bool | None:
    """Whether units are held that are not `nvidia.com/gpu`; None: nobody knows who holds what."""
    if record is None:
        return None
    return any(each.holding.resource != SEEN for holders in record.by_gpu.values() for each in holders)


def scale_down_changes(present: Mapping[str, str], held: bool | None) -> Mapping[str, str | None]:
    """Changes of a node's annotations; None removes one."""
    ours = SCALE_DOWN_MARK in present
    if held is None or (held and not ours and SCALE_DOWN in present):
        return {}
    if held:
        return {SCALE_DOWN: "true", SCALE_DOWN_MARK: "true"}
    return {SCALE_DOWN: None, SCALE_DOWN_MARK: None} if ours else {}


# Kubernetes events on the node about its GPUs.

Emit = Callable[[str, str, bool], None]  # reason, message, whether it is a warning


def node_events(emit: Emit) -> Callable[[Transition], None]:
    """A listener for `HealthCounters.listeners`. Reasons are listed in docs/names.md."""

    def listen(change: Transition) -> None:
        if change.before is None and change.after is HealthState.HEALTHY:
            return
        gpu = f"GPU {change.uuid} (index {change.index})"
        if change.after is HealthState.UNHEALTHY and change.before is not HealthState.PROBATION:
            reason = "GPULost" if change.fault is FaultKind.LOST else "GPUUnhealthy"
            emit(reason, f"{gpu}: {change.cause}; its units are not handed out", True)
        elif change.after is HealthState.HEALTHY and change.before is not HealthState.SUSPECT:
            emit("GPURecovered", f"{gpu} is healthy again after: {change.cause}", False)

    return listen


# Labels that describe driver, GPUs and their instances, for people's node selectors.

MIB = 1 << 20
# GPU Feature Discovery sets one of these at least, and no other program does: where it runs, its labels are
# its own. The timestamp can be turned off.
GFD_MARK = "nvidia.com/gfd.timestamp"
GFD_MARKS = frozenset((GFD_MARK, "nvidia.com/gpu.machine", "nvidia.com/gpu.family"))
# NFD, which writes GFD's labels, lists its own in an annotation; a further instance of it has a prefix.
NFD_LABELS = "nfd.node.kubernetes.io/feature-labels"
# Those about instances that this agent wrote, without the prefix: it takes away no others.
LABELLED = "gpu-node-agent.io/labels"
# Set where the GPUs are simulated.
SIMULATED_LABEL = "gpu-node-agent.io/simulated"
_NVIDIA = "nvidia.com/"
GPU: Final = "nvidia.com/gpu"
NO_NOTES: Mapping[str, str] = MappingProxyType({})
PREFIX = next(mode.row.prefix for mode in OFFERED_MODES if mode.row.partitioned)
CAPABLE, STRATEGY = "nvidia.com/mig.capable", "nvidia.com/mig.strategy"
_ENGINES = ("copy", "decoder", "encoder", "jpeg", "ofa")
ATTRIBUTES = ("multiprocessors", "slices.gi", "slices.ci", *(f"engines.{each}" for each in _ENGINES))
_PARTS = ("product", "count", "replicas", "memory", *ATTRIBUTES)
OWN = (CAPABLE, STRATEGY, *(f"{GPU}.{each}" for each in ATTRIBUTES))


def labels_of(
    snapshot: Snapshot,
    assignment: Assignment,
    present: Mapping[str, str],
    strategy: str | None = None,
    notes: Mapping[str, str] = NO_NOTES,
) -> dict[str, str | None]:
    """CUDA labels, and GPU labels unless GPU Feature Discovery sets those. Empty while there is no driver.

    `present`, `notes`: the labels and annotations that the node has now; GPU Feature Discovery may come and
    go at any time. `strategy`: by which instances are offered. None for a label that is to go.
    """
    if snapshot.driver is None or not snapshot.gpus:
        return {}
    major, minor = snapshot.driver.cuda_version
    labels = {"cuda-major-version": str(major), "cuda-minor-version": str(minor)}
    if beside_gfd(present):
        return {**labels, **dict.fromkeys(left_over(notes) & present.keys())}
    gpus = [each.gpu for each in snapshot.gpus]
    first = gpus[0]
    # Of the GPU with the most time slices. OpenCost believes `count` where it is there.
    slices = [assignment.of(each.uuid).replicas for each in gpus if not each.mig_enabled]
    labels |= {
        "nvidia.com/gpu.product": first.product,
        "nvidia.com/gpu.count": str(len(gpus)),
        "nvidia.com/gpu.replicas": str(max(slices, default=0)),
        "nvidia.com/gpu.memory": str(first.memory_bytes // MIB),
        "nvidia.com/gpu.compute.major": str(first.compute_capability[0]),
        "nvidia.com/gpu.compute.minor": str(first.compute_capability[1]),
        **_instance_labels(gpus, strategy),
    }
    return {key: label_value(text) for key, text in labels.items()} | dict.fromkeys(
        (written(notes) & present.keys()) - labels.keys()
    )


def label_value(text: str) -> str:
    """Text as a label's value: letters, digits, dash, dot, underscore; 63 at most (Kubernetes' labels)."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:63].strip("-._")


def _instance_labels(gpus: Sequence[Gpu], strategy: str | None) -> Mapping[str, str]:
    """`strategy`: mixed or single; None: instances are not offered."""
    labels = {CAPABLE: str(any(each.mig_switch for each in gpus)).lower()}
    if strategy is None:
        return labels
    labels[STRATEGY] = strategy
    parted = [each for each in gpus if each.mig_enabled]
    first: dict[str, tuple[Gpu, Instance]] = {}
    counts: dict[str, int] = {}
    for gpu in parted:
        for instance in gpu.instances:
            if instance.profile:
                profile = instance.profile.replace("+", ".")
                first.setdefault(profile, (gpu, instance))
                counts[profile] = counts.get(profile, 0) + 1
    if strategy == "mixed":
        for profile, (gpu, instance) in first.items():
            name = f"{PREFIX}{profile}"
            labels |= _described(name, gpu, instance, profile, counts[profile])
    elif parted:
        alike = len(first) == 1 and all(each.instances for each in gpus)
        if alike:
            ((profile, (gpu, instance)),) = first.items()
            labels |= _described(GPU, gpu, instance, profile, counts[profile])
        else:
            labels[f"{GPU}.product"] = f"{parted[0].product}-MIG-INVALID"
            labels |= dict.fromkeys((f"{GPU}.{part}" for part in ("count", "replicas", "memory")), "0")
    return labels


def strategy_of(state: SwitchState, configured: str) -> str | None:
    """By which strategy instances are offered, or will be; None: they are not."""
    modes = {mode.mode for each in state.gpus for mode in (each.active, each.wanted)}
    return configured if any(mode.row.partitioned for mode in modes) else None


def beside_gfd(present: Mapping[str, str]) -> bool:
    return not GFD_MARKS.isdisjoint(present)


def written(notes: Mapping[str, str]) -> frozenset[str]:
    """Labels about instances that this agent wrote."""
    keys = (f"{_NVIDIA}{each}" for each in notes.get(LABELLED, "").split(","))
    return frozenset(key for key in keys if of_instances(key))


def left_over(notes: Mapping[str, str]) -> frozenset[str]:
    """Of these, those that nobody keeps true any more, where GPU Feature Discovery came after this agent."""
    theirs = _of_nfd(notes)
    return frozenset() if theirs.isdisjoint(GFD_MARKS) else written(notes) - theirs


def _of_nfd(notes: Mapping[str, str]) -> frozenset[str]:
    lists = (text for key, text in notes.items() if key == NFD_LABELS or key.endswith(f".{NFD_LABELS}"))
    return frozenset(key for text in lists for key in text.split(","))


def _record(
    notes: Mapping[str, str], present: Mapping[str, str], labels: Mapping[str, str | None]
) -> dict[str, str | None]:
    """The annotation about labels, once `labels` are written: with them, so that none is ever forgotten."""
    keys = written(notes) | {key for key in labels if of_instances(key)}
    ours = sorted(key for key in keys - _of_nfd(notes) if labels.get(key, present.get(key)) is not None)
    return {LABELLED: ",".join(key.removeprefix(_NVIDIA) for key in ours) or None}


def of_instances(key: str) -> bool:
    """Whether GPU Feature Discovery, or this agent, describes instances by that label."""
    if key in OWN:
        return True
    return key.startswith(PREFIX) and key.endswith(tuple(f".{part}" for part in _PARTS))


def _described(
    name: str, gpu: Gpu, instance: Instance, profile: str, count: int
) -> Iterator[tuple[str, str]]:
    yield f"{name}.product", f"{gpu.product}-MIG-{profile}"
    yield f"{name}.count", str(count)
    yield f"{name}.replicas", "1"
    yield f"{name}.memory", str(instance.memory_bytes // MIB)
    figures = (instance.multiprocessors, instance.slices, instance.compute_slices, *instance.engines)
    yield from ((f"{name}.{part}", str(value)) for part, value in zip(ATTRIBUTES, figures, strict=False))


# Writes on the Node object how far the mode is: a label, an annotation, a condition, events.

log = structlog.get_logger()

MODE_LABEL = "gpu-node-agent.io/mode"
STATE_ANNOTATION = "gpu-node-agent.io/state"
CONDITION = "GPUModeReady"
SPACING_SECONDS = 1.0
RETRY_SECONDS = 5.0
LONGEST_RETRY_SECONDS = 60.0
LONGEST_MESSAGE = 400
NONE = "none"  # the mode wanted, and in force, where there is none

EVENT_REASONS = {
    Phase.APPLIED: "ModeApplied",
    Phase.SWITCHING: "ModeSwitching",
    Phase.BLOCKED: "ModeBlocked",
    Phase.FAILED: "ModeFailed",
}
CONDITION_REASONS = {phase: phase.value.capitalize() for phase in Phase}


# The labels that a node with certain labels and annotations is to have; None for one that is to go.
Labels = Callable[[Mapping[str, str], Mapping[str, str]], Mapping[str, str | None]]
# Changes of annotations for a node with certain ones; None removes one.
Changes = Callable[[Mapping[str, str]], Mapping[str, str | None]]


class NodeStateWriter:
    """Level-triggered: writes differences to the Node object, at most once a second."""

    def __init__(
        self,
        node: OwnNode,
        state: Cell[SwitchState],
        *,
        labels: Labels = lambda *_: {},
        annotations: Cell[Mapping[str, str]] | None = None,
        changes: Changes = lambda _: {},
        wake_on: Sequence[Cell[Any]] = (),
    ) -> None:
        """`labels`, `annotations`, `changes` (of annotations): further ones, of other rooms.

        They are computed at each comparison from those of the node, so that none is written
        over one that has become somebody else's. `wake_on`: cells that they depend on, too.
        """
        self._node = node
        self._state = state
        self._labels = labels
        self._annotations = annotations or Cell[Mapping[str, str]]({})
        self._changes = changes
        self._wake_on = (state, node.changes, self._annotations, *wake_on)
        self._recorded: tuple[Phase, str, str] | None = None
        self._retry = Backoff(RETRY_SECONDS, LONGEST_RETRY_SECONDS)
        self.problem: str | None = None  # why the Node object could not be written last
        self.patches = 0
        self.failures = 0

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            wake = Cell(None)
            group.start_soon(follow, partial(wake.publish, None), *self._wake_on)
            while True:
                seen = wake.version
                pause = await self._write()
                await anyio.sleep(pause)
                if not pause or self.problem is None:  # without a pause there was nothing to write
                    await wake.wait_change(seen)

    async def _write(self) -> float:
        """Write all differences; how long to leave the API server alone, in seconds. `problem`: it failed."""
        state = self._state.value
        self._record_event(state)
        known = self._node.labels()
        if known is None:
            return 0.0
        there = self._node.annotations()
        labels = {MODE_LABEL: mode_in_force(state), **self._labels(known, there)}
        wrong = {key: value for key, value in labels.items() if known.get(key) != value}
        annotations = {
            STATE_ANNOTATION: encode(state),
            **self._annotations.value,
            **self._changes(there),
            **_record(there, known, labels),
        }
        stale = {key: text for key, text in annotations.items() if there.get(key) != text}
        status = "True" if state.phase is Phase.APPLIED else "False"
        says = (status, CONDITION_REASONS[state.phase], _message(state))
        # By the node, as all else: an older write whose answer was lost may be carried out after a newer one.
        condition = self._node.condition(CONDITION)
        as_it_should = condition is not None and condition.says == says
        if not wrong and not stale and as_it_should:
            self.problem = None  # a write whose answer was lost was carried out, or is not wanted any more
            return 0.0
        try:
            if wrong or stale:
                await self._node.write_metadata(wrong, stale)
                self.patches += 1
            if not as_it_should:
                same = condition is not None and condition.status == status and condition.last_transition_time
                await self._node.write_condition(CONDITION, *says, same or now())
                self.patches += 1
        except ApiError as error:
            if self.problem is None:
                log.warning("node_not_written", problem=str(error))
            self.problem = str(error)
            self.failures += 1
            return self._retry.next()
        self.problem = None
        self._retry.reset()
        return SPACING_SECONDS

    @property
    def nothing_to_give_back(self) -> bool:
        """Whether nothing is wanted of this node and nothing is offered: perhaps no agent is, either."""
        state = self._state.value
        return (state.phase, state.desired, state.applied) == (Phase.APPLIED, NONE, NONE)

    def _record_event(self, state: SwitchState) -> None:
        shown = (state.phase, state.desired, state.message)
        if shown == self._recorded:
            return
        self._recorded = shown
        text = f"mode {state.desired}: {state.message}" if state.message else f"mode {state.desired}"
        self._node.event(EVENT_REASONS[state.phase], text, state.phase in (Phase.BLOCKED, Phase.FAILED))


def report_on(
    settings: Settings,
    node: OwnNode,
    switch: Cell[SwitchState],
    inventory: Cell[Snapshot],
    assignment: Cell[Assignment],
    record: Cell[Record | None],
    annotations: Cell[Mapping[str, str]],
) -> NodeStateWriter:
    """The writer of all of it, as configured."""
    fixed = {SIMULATED_LABEL: "true"} if settings.simulator.profile else {}

    def labels(present: Mapping[str, str], notes: Mapping[str, str]) -> Mapping[str, str | None]:
        # At first nobody knows how GPUs are offered, and what an agent before this one wrote stands.
        if not settings.node_labels or not switch.value.gpus:
            return fixed
        strategy = strategy_of(switch.value, settings.mig.strategy)
        return {**labels_of(inventory.value, assignment.value, present, strategy, notes), **fixed}

    def changes(present: Mapping[str, str]) -> Mapping[str, str | None]:
        guarded = settings.cluster.scale_down_guard
        return scale_down_changes(present, holds_unseen(record.value) if guarded else False)

    return NodeStateWriter(
        node,
        switch,
        labels=labels,
        annotations=annotations,
        changes=changes,
        wake_on=(inventory, assignment, record),
    )


def mode_in_force(state: SwitchState) -> str:
    """The value of the mode label: the applied word, or `switching` while GPUs differ from it."""
    if state.phase in (Phase.APPLIED, Phase.BLOCKED):
        return state.applied
    return SWITCHING


def encode(state: SwitchState) -> str:
    """The state annotation: compact JSON, the same text for the same state."""
    document: dict[str, object] = {
        "state": state.phase.value,
        "desired": state.desired,
        "message": _message(state),
        "gpus": {str(gpu.index): _gpu(gpu) for gpu in state.gpus},
    }
    return json.dumps(document, separators=(",", ":"), sort_keys=True)


def _message(state: SwitchState) -> str:
    return pods_counted(state.message)[:LONGEST_MESSAGE]


def _gpu(gpu: GpuSwitch) -> dict[str, object]:
    entry: dict[str, object] = {"active": gpu.active.requested.value}
    if gpu.active.replicas > 1:
        entry["replicas"] = gpu.active.replicas
    if gpu.wanted.requested is not gpu.active.requested:
        entry["desired"] = gpu.wanted.requested.value
    if gpu.waiting_for:
        entry["waitingFor"] = len(gpu.waiting_for)
    refused = gpu.wanted.reason if gpu.wanted.refused else ""  # while it still drains, too
    reason = gpu.problem or (gpu.active.reason if gpu.active.mode is Mode.OFF else refused)
    if reason:
        entry["reason"] = pods_counted(reason)[:120]
    return entry


# Those who patch the own Node object, and what is to be said where that fails.

PATCHED = {"status": "node.status", "taint": "the node's taint", "report": "the Node object"}

# By the part that they patch.
Writers = Mapping[str, Capacity | SchedulingTaint | NodeStateWriter]


def remarks(writers: Writers) -> list[str]:
    """An API server that can be read, but not be written to."""
    return [
        f"{PATCHED[name]} cannot be patched: {writer.problem}"
        for name, writer in writers.items()
        if writer.problem
    ]


def metrics(writers: Writers) -> Iterator[Series]:
    """How often each part was patched, and how often that failed."""
    for name, writer in writers.items():
        yield d.NODE_PATCHES, writer.patches, (name, "ok")
        yield d.NODE_PATCHES, writer.failures, (name, "failed")
