"""Who holds how much of each GPU, as an annotation of the Node object: for `kubectl gpu`.

It names no pod: each stands under a digest of its UID, which only those can compute who may read the pod. So
everybody who may read nodes sees what is free, and the names of the own pods alone.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio

from agent.inventory.snapshot import Snapshot
from agent.kit.cell import Cell
from agent.kit.follow import follow as follow_cells
from agent.kit.timestamps import now
from agent.model.gpu import Gpu
from agent.model.holding import GpuHolder, Record
from agent.model.ids import parse
from agent.model.modes import Assignment, GpuMode
from agent.model.units import UnitKind

HOLDERS = "gpu-node-agent.io/holders"
VERSION = 1
DIGITS = 12  # of a digest
MOST_HOLDERS = 64  # of one GPU that are listed; the rest is one entry without a digest
SPACING_SECONDS = 2.0  # pods come in bursts, and every write wakes those who watch nodes
_MIB = 1 << 20

Uids = Mapping[tuple[str, str], str]  # of pods, by namespace and name


def digest(uid: str) -> str:
    return hashlib.sha256(uid.encode()).hexdigest()[:DIGITS]


def text_of(snapshot: Snapshot, modes: Assignment, pods: Record | None, uids: Uids, lost: str | None) -> str:
    """The annotation. `lost`: since when the kubelet's records cannot be read, in RFC 3339."""
    holders = pods.by_gpu if pods is not None else {}
    document: dict[str, object] = {"v": VERSION}
    if lost:
        document["lost"] = lost
    document["gpus"] = {
        state.uuid: {
            **_amounts(state.gpu, modes.of(state.uuid)),
            "h": _holders(holders.get(state.uuid, ()), _names(state.gpu), uids),
        }
        for state in snapshot.gpus
    }
    return json.dumps(document, separators=(",", ":"))


def _amounts(gpu: Gpu, mode: GpuMode) -> dict[str, object]:
    """How much the GPU has in its mode: cores (or whole GPUs, or time slices), blocks, MiB of a block."""
    pair = mode.mode.row.pair
    if pair is None:
        return {"t": [len(gpu.instances) if mode.mode.row.partitioned else mode.replicas, 0, 0]}
    return {"t": [100, pair.blocks(gpu.memory_bytes), pair.block_bytes // _MIB]}


def _names(gpu: Gpu) -> frozenset[str]:
    """With one of these begins each device ID of the GPU."""
    return frozenset((gpu.uuid, *(each.uuid for each in gpu.instances)))


def _holders(holders: Sequence[GpuHolder], names: frozenset[str], uids: Uids) -> list[list[object]]:
    amounts: dict[str, Counter[str]] = {}
    for holder in holders:
        uid = uids.get((holder.holding.namespace, holder.holding.pod))
        amount = amounts.setdefault(digest(uid) if uid else "", Counter())
        if share := holder.holding.share:
            amount.update({"cores": share.cores or 1, "blocks": share.memory})
        for text in holder.holding.ids:
            if text.partition("::")[0] in names:
                kind = parse(text).unit.kind
                amount["blocks" if kind is UnitKind.MEMORY else "cores"] += 1
    most = sorted(amounts, key=lambda key: (not key, key))
    for key in most[MOST_HOLDERS:]:
        if key:
            amounts.setdefault("", Counter()).update(amounts.pop(key))
    return [[key, each["cores"], each["blocks"]] for key, each in sorted(amounts.items())]


async def follow(
    snapshot: Cell[Snapshot],
    modes: Cell[Assignment],
    record: Cell[Record | None],
    pod_changes: Cell[Any],
    uids: Callable[[], Uids],
    notes: Cell[Mapping[str, str]],
) -> None:
    """Keep the annotation's text true in `notes`, for ever; nothing before the record was read once."""
    last: Record | None = None
    lost: str | None = None
    wake: Cell[None] = Cell(None)

    def look() -> None:
        nonlocal last, lost
        if record.value is not None:
            last, lost = record.value, None
        elif lost is None:
            lost = now()
        if last is None or not snapshot.value.gpus:
            return
        text = text_of(snapshot.value, modes.value, last, uids(), lost)
        if notes.value.get(HOLDERS) != text:
            notes.publish({**notes.value, HOLDERS: text})

    async with anyio.create_task_group() as group:
        group.start_soon(follow_cells, lambda: wake.publish(None), snapshot, modes, record, pod_changes)
        seen = wake.version
        while True:
            look()
            await anyio.sleep(SPACING_SECONDS)
            seen = await wake.wait_change(seen)
