"""Series of GPUs' health, and of what of them is free."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from agent.inventory.actor import Inventory
from agent.inventory.snapshot import GpuState, Snapshot, boot_seconds
from agent.kit.tasks import Cell
from agent.model.health import HealthState
from agent.model.holding import Record
from agent.model.modes import OFFERED_MODES, UNCLAIMED, Assignment, GpuMode, Mode
from agent.model.placement import FreeGpu, unusable, usual_mix
from agent.model.pod import CORES
from agent.model.xids import UNKNOWN, XIDS, XidClass
from agent.nvml.event_watch import EventWatch
from agent.telemetry import definitions as d
from agent.telemetry.container_use import Uses
from agent.telemetry.containers import ContainerShare, by_gpu
from agent.telemetry.series import Series

# Metrics of health: states, transitions, Xids, and how well the watching itself works.


def health_collector(inventory: Inventory, events: EventWatch) -> Iterator[Series]:
    """By GPU, then of the node."""
    snapshot, counters, now = inventory.snapshot.value, inventory.counters, boot_seconds()
    for state in snapshot.gpus:
        uuid = state.uuid
        labels = (uuid, str(state.gpu.index))
        for one in HealthState:
            yield d.GPU_HEALTH_STATE, one is state.health.state, (*labels, one.value)
            yield d.GPU_TRANSITIONS, counters.transitions.get((uuid, one.value), 0), (*labels, one.value)
        yield d.GPU_PROBATION_LEFT, max(0.0, (state.health.until or now) - now), labels
        yield d.GPU_ECC_EVENTS, counters.ecc_events.get(uuid, 0), labels
        yield d.GPU_EVENTS_WATCHED, uuid in events.watched, labels
        for (gpu, xid), count in sorted(counters.xids.items()):
            if gpu == uuid:
                yield d.GPU_XIDS, count, (*labels, str(xid))
                if (uuid, xid) in counters.xid_times:
                    told = (*labels, str(xid), _xid_class(xid))
                    yield d.GPU_LAST_XID_TIME, counters.xid_times[uuid, xid], told
    yield d.EVENT_WAIT_FAILURES, events.failures, ()
    # As long as NVML cannot be closed, it is not released.
    yield d.NVML_RELEASED, snapshot.released_until is not None and snapshot.let_go == "", ()


def _xid_class(xid: int) -> str:
    """Who has to act: the program's owner, the machine's, or nobody."""
    kind = XIDS.get(xid, UNKNOWN).kind
    return kind.value if kind in (XidClass.APPLICATION, XidClass.INFORMATIONAL) else "hardware"


# Free GPUs of the node by mode: how many, the largest part that is free, and what no usual pod can use.


def free_collector(
    snapshot: Cell[Snapshot],
    assignment: Cell[Assignment],
    record: Cell[Record | None],
    uses: Cell[Uses],
    most_clients: int | None,
) -> Iterator[Series]:
    """Nothing until it is known who holds what. `most_clients`: a ceiling below that of the mode."""
    known = record.value
    if known is None or (known.holdings and not uses.version):
        return
    yield from free_series(
        snapshot.value, assignment.value, (each.use.share for each in uses.value.containers), most_clients
    )


def free_series(
    snapshot: Snapshot,
    assignment: Assignment,
    shares: Iterable[ContainerShare],
    most_clients: int | None = None,
) -> Iterator[Series]:
    held = by_gpu(shares)
    yield from _claimable(snapshot, assignment, held, most_clients)
    for mode in OFFERED_MODES:
        if mode.row.partitioned:  # nobody says what part of its GPU an instance is
            continue
        there = [
            (state, assignment.of(state.uuid))
            for state in snapshot.gpus
            if assignment.of(state.uuid).plugin_mode is mode
        ]
        if not there:
            continue
        offered = [(state, now) for state, now in there if state.healthy and now.offered]
        if mode.row.pair is None:
            yield from _counted(mode, offered, held)
        else:
            yield from _measured(
                mode,
                [
                    _free(
                        state, mode, held.get(state.uuid, ()), _clients(state, mode, snapshot, most_clients)
                    )
                    for state, _ in offered
                ],
            )


def _claimable(
    snapshot: Snapshot,
    assignment: Assignment,
    held: Mapping[str, Sequence[ContainerShare]],
    most_clients: int | None,
) -> Iterator[Series]:
    """Devices of DRA: one that nobody holds may be had whole, one with shares in parts."""
    there = [(state, assignment.of(state.uuid)) for state in snapshot.gpus if assignment.of(state.uuid).dra]
    if not there:
        return
    whole, parts = 0, [0.0]
    for state, now in there:
        if not (state.healthy and now.claimable):
            continue
        shares = held.get(state.uuid, ())
        if not shares:
            whole += 1
            parts.append(1.0)
        elif now.mode.row.pair:
            clients = _clients(state, now.mode, snapshot, most_clients)
            parts.append(_free(state, now.mode, shares, clients).largest_share / CORES)
    yield d.FREE_GPUS, whole, (UNCLAIMED.value,)
    yield d.FREE_COMPUTE, sum(parts), (UNCLAIMED.value,)
    yield d.LARGEST_FREE, max(parts), (UNCLAIMED.value,)
    yield d.UNUSABLE_COMPUTE, 0, (UNCLAIMED.value,)


def _clients(state: GpuState, mode: Mode, snapshot: Snapshot, most: int | None) -> int:
    """How many containers may hold shares of a GPU; 0: as many as have room."""
    ceiling = mode.row.client_ceiling
    clients = ceiling(state.gpu, snapshot.driver) if ceiling else 0
    return min(clients, most or clients)


def _counted(
    mode: Mode, offered: Sequence[tuple[GpuState, GpuMode]], held: Mapping[str, Sequence[ContainerShare]]
) -> Iterator[Series]:
    """Whole GPUs and time slices: none is of no use."""
    parts = [
        # Rounded: six sixths are less than one.
        round(
            max(0.0, 1.0 - sum(1.0 if each.held is None else each.held for each in held.get(state.uuid, ()))),
            9,
        )
        for state, _ in offered
    ]
    whole = [part for part, (_, now) in zip(parts, offered, strict=True) if part == 1 and now.replicas == 1]
    slices = [1 / now.replicas for part, (_, now) in zip(parts, offered, strict=True) if part > 0]
    yield d.FREE_GPUS, len(whole), (mode.value,)
    yield d.FREE_COMPUTE, sum(parts), (mode.value,)
    yield d.LARGEST_FREE, max(slices, default=0.0), (mode.value,)
    yield d.UNUSABLE_COMPUTE, 0, (mode.value,)


def _measured(mode: Mode, gpus: Sequence[FreeGpu]) -> Iterator[Series]:
    yield d.FREE_GPUS, sum(gpu.untouched for gpu in gpus), (mode.value,)
    yield d.FREE_COMPUTE, sum(gpu.cores for gpu in gpus) / CORES, (mode.value,)
    yield d.LARGEST_FREE, max((gpu.largest_share for gpu in gpus), default=0) / CORES, (mode.value,)
    yield d.UNUSABLE_COMPUTE, unusable(gpus, usual_mix()) / CORES, (mode.value,)


def _free(state: GpuState, mode: Mode, shares: Sequence[ContainerShare], clients: int) -> FreeGpu:
    """`clients`: how many containers may hold shares of it; 0: as many as have room."""
    pair = mode.row.pair
    assert pair is not None
    blocks = pair.blocks(state.gpu.memory_bytes)
    # All cores with all memory: other than by growth, nothing else may be on the GPU then.
    whole = any(each.core_limit == 1 and each.memory_limit >= state.gpu.memory_bytes for each in shares)
    full = bool(clients) and len(shares) >= clients
    held = sum((each.core_limit or 0.0) / each.sharers for each in shares)
    cores = 0 if whole else CORES - round(CORES * held)
    memory = sum(each.memory_limit / each.sharers for each in shares)
    taken = blocks if whole or full else round(memory / pair.block_bytes)
    return FreeGpu(
        state.uuid, state.gpu.index, max(0, cores), max(0, blocks - taken), blocks, untouched=not shares
    )
