"""Writes on the Node object how far the mode is: a label, an annotation, a condition, events.

Everybody who may get nodes reads annotation and condition, and pods belong to many tenants: both count pods,
and name none. `status` and events, for which one needs other rights, have the names.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import structlog

from agent.cluster.own_node import NodeNotWritten, OwnNode
from agent.kit.backoff import Backoff
from agent.kit.cell import Cell
from agent.kit.follow import follow
from agent.kit.timestamps import now
from agent.model.modes import SWITCHING, Mode
from agent.model.pod_names import pods_counted
from agent.modes.switch_state import GpuSwitch, Phase, SwitchState

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


# The labels that a node with certain labels is to have; None for one that is to go.
Labels = Callable[[Mapping[str, str]], Mapping[str, str | None]]
# Changes of annotations for a node with certain ones; None removes one.
Changes = Callable[[Mapping[str, str]], Mapping[str, str | None]]


class NodeStateWriter:
    """Level-triggered: writes differences to the Node object, at most once a second."""

    def __init__(
        self,
        node: OwnNode,
        state: Cell[SwitchState],
        *,
        labels: Labels = lambda _: {},
        annotations: Cell[Mapping[str, str]] | None = None,
        changes: Changes = lambda _: {},
        wake_on: Sequence[Cell[Any]] = (),
    ) -> None:
        """`labels`, `annotations`, `changes` (of annotations): further ones, of other rooms.

        Labels and changes are computed at each comparison from those of the node, so that none is written
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
        labels = {MODE_LABEL: mode_in_force(state), **self._labels(known)}
        wrong = {key: value for key, value in labels.items() if known.get(key) != value}
        there = self._node.annotations()
        annotations = {STATE_ANNOTATION: encode(state), **self._annotations.value, **self._changes(there)}
        stale = {key: text for key, text in annotations.items() if there.get(key) != text}
        status = "True" if state.phase is Phase.APPLIED else "False"
        says = (status, CONDITION_REASONS[state.phase], _message(state))
        # By the node, as all else: an older write whose answer was lost may be carried out after a newer one.
        condition = self._node.condition(CONDITION)
        as_it_should = condition is not None and condition[:3] == says
        if not wrong and not stale and as_it_should:
            self.problem = None  # a write whose answer was lost was carried out, or is not wanted any more
            return 0.0
        try:
            if wrong or stale:
                await self._node.write_metadata(wrong, stale)
                self.patches += 1
            if not as_it_should:
                same = condition is not None and condition.status == status and condition.changed
                await self._node.write_condition(CONDITION, *says, same or now())
                self.patches += 1
        except NodeNotWritten as error:
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
