"""Compares modes in force with wanted ones, and puts the difference into words."""

from collections.abc import Collection, Mapping, Sequence

import structlog

from agent.inventory.snapshot import Snapshot
from agent.model.holding import GpuHolder
from agent.model.ids import SEPARATOR, parse
from agent.model.modes import Assignment, GpuMode, Mode
from agent.modes.switch_state import GpuSwitch
from agent.modes.transition import ModeStage, ModeState

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
    """The mode that a GPU must be in, since pods got units of it that way before this process began."""
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
