"""Annotations of the Node object for others: who holds how much of each GPU, and the inventory."""

import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import anyio
import structlog

from agent.cluster.api import ApiError, now
from agent.cluster.node import OwnNode
from agent.inventory.snapshot import Snapshot
from agent.kit.tasks import Cell
from agent.kit.tasks import follow as follow_cells
from agent.model.gpu import Gpu
from agent.model.holding import GpuHolder, Growth, Place, Record, by_gpu
from agent.model.modes import Assignment, GpuMode, UnitKind
from agent.model.node_inventory import INVENTORY, GpuEntry, NodeInventory, encode

# Who holds how much of each GPU, as an annotation of the Node object: for `kubectl gpu`.
#
# It names no pod: each stands under a digest of its UID, which only those can compute who may read the pod.
# So everybody who may read nodes sees what is free, and the names of the own pods alone.

HOLDERS = "gpu-node-agent.io/holders"
HOLDERS_VERSION = 1
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
    document: dict[str, object] = {"v": HOLDERS_VERSION}
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
        for (gpu, unit), count in holder.holding.amounts.items():
            if gpu in names:
                amount["blocks" if unit.kind is UnitKind.MEMORY else "cores"] += count
    most = sorted(amounts, key=lambda key: (not key, key))
    for key in most[MOST_HOLDERS:]:
        if key:
            amounts.setdefault("", Counter()).update(amounts.pop(key))
    return [[key, each["cores"], each["blocks"]] for key, each in sorted(amounts.items())]


async def follow_holders(
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


# The node's inventory for schedulers, as an annotation of the Node object: on change only.

log = structlog.get_logger()

NOTHING: Mapping[str, Growth] = MappingProxyType({})
_NONE = Growth()
AHEAD_SECONDS = 3.0


def inventory_of(
    snapshot: Snapshot,
    assignment: Assignment,
    most_clients: int | None = None,
    grown: Mapping[str, Growth] = NOTHING,
) -> NodeInventory:
    """The inventory for schedulers. `most_clients`: a ceiling of clients below that of the mode.

    `grown`: by GPU (UUID), the growth of containers beyond the requests of their pods.
    """
    entries: dict[int, GpuEntry] = {}
    # A lost GPU keeps the index that another may have by now: those that can be offered come first.
    for state in sorted(snapshot.gpus, key=lambda each: not each.healthy):
        gpu, mode = state.gpu, assignment.of(state.uuid)
        row = mode.requested.row
        ceiling = row.client_ceiling(gpu, snapshot.driver) if row.client_ceiling else 0
        growth = grown.get(gpu.uuid, _NONE) if row.resizable else _NONE
        entry = GpuEntry(
            gpu.uuid,
            gpu.index,
            mode.requested,
            (gpu.memory_bytes - growth.memory_bytes) // _MIB,
            mode.offered or mode.claimable,
            state.cause,
            mode.replicas,
            min(ceiling, most_clients or ceiling),
            growth.cores,
        )
        entries.setdefault(gpu.index, entry)
    gpus = tuple(entry for _, entry in sorted(entries.items()))
    links = [
        snapshot.topology.pair(one.uuid, other.uuid)
        for at, one in enumerate(gpus)
        for other in gpus[at + 1 :]
    ]
    return NodeInventory(gpus, tuple(links))


async def follow_inventory(
    inventory: Cell[Snapshot],
    modes: Cell[Assignment],
    most_clients: int | None,
    notes: Cell[Mapping[str, str]],
    grown: Cell[Mapping[Place, Growth]],
) -> None:
    """Keep the annotation's text true in `notes`, for ever; nothing before the GPUs were seen."""

    def look() -> None:
        snapshot = inventory.value
        if snapshot.gpus:
            note = encode(inventory_of(snapshot, modes.value, most_clients, by_gpu(grown.value)))
            if notes.value.get(INVENTORY) != note:
                notes.publish({**notes.value, INVENTORY: note})

    await follow_cells(look, inventory, modes, grown)


def ahead(
    node: OwnNode,
    inventory: Cell[Snapshot],
    modes: Cell[Assignment],
    most_clients: int | None,
    grown: Cell[Mapping[Place, Growth]],
) -> Callable[[], Awaitable[None]]:
    """The writer of the annotation, where there is none, before units are offered for the first time.

    Pods that wait for such units are bound the moment that the node offers them. An extender that knows no
    inventory by then goes by totals, and some of those pods would die at admission. Bounded in time: with the
    API server away nothing is bound either.
    """

    async def write() -> None:
        if INVENTORY in node.annotations():
            return  # as it was before this process: the report writes differences
        problem = f"no answer within {AHEAD_SECONDS:g} s"
        with anyio.move_on_after(AHEAD_SECONDS):
            found = inventory_of(inventory.value, modes.value, most_clients, by_gpu(grown.value))
            note = {INVENTORY: encode(found)}
            try:
                await node.write_metadata({}, note)
            except ApiError as error:
                problem = str(error)
            else:
                return
        log.warning("inventory_not_written_ahead", problem=problem, effect="extenders go by totals meanwhile")

    return write
