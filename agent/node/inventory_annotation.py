"""The node's inventory for schedulers, as an annotation of the Node object: on change only."""

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

import anyio
import structlog

from agent.cluster.own_node import NodeNotWritten, OwnNode
from agent.inventory.snapshot import Snapshot
from agent.kit.cell import Cell
from agent.kit.follow import follow as follow_cells
from agent.model.growth import Growth, Place, by_gpu
from agent.model.modes import Assignment
from agent.model.node_inventory import INVENTORY, GpuEntry, NodeInventory, encode

log = structlog.get_logger()

_MIB = 1 << 20
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


async def follow(
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
            except NodeNotWritten as error:
                problem = str(error)
            else:
                return
        log.warning("inventory_not_written_ahead", problem=problem, effect="extenders go by totals meanwhile")

    return write
