"""The inventory actor: the one task that changes the inventory, publishes it and counts its events."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import structlog

from agent.inventory.reducer import Accused, KernelXidSeen, Message, reduce
from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.tasks import Cell, Mailbox
from agent.model.health import FaultKind, HealthState, Rules

# Events of the GPUs since the agent started: counters for metrics, transitions for listeners.

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Transition:
    """A GPU's health went from one state to another; `before` None: it is seen for the first time."""

    uuid: str
    index: int
    before: HealthState | None
    after: HealthState
    cause: str
    fault: FaultKind | None


Listener = Callable[[Transition], None]


@dataclass
class HealthCounters:
    """Counters by GPU. Listeners are called on the event loop and must not block."""

    transitions: Counter[tuple[str, str]] = field(default_factory=Counter)  # (UUID, state entered)
    xids: Counter[tuple[str, int]] = field(default_factory=Counter)  # (UUID, Xid)
    ecc_events: Counter[str] = field(default_factory=Counter)  # by UUID, uncorrectable errors
    last_xid: dict[str, int] = field(default_factory=dict)
    # (UUID, Xid) -> seconds since 1970: a rate misses the birth of a series, this does not.
    xid_times: dict[tuple[str, int], float] = field(default_factory=dict)
    listeners: list[Listener] = field(default_factory=list)

    def count(self, message: Message, snapshot: Snapshot) -> None:
        """Count an event, whatever it did to its GPU."""
        match message:
            case Accused(uuid, fault):
                self._count_fault(uuid, fault.kind, fault.number)
            case KernelXidSeen(xid):
                for state in snapshot.gpus:
                    if state.gpu.pci_bus_id.startswith(f"{xid.bus}."):
                        self._count_fault(state.uuid, FaultKind.XID, xid.number)
            case _:
                return

    def _count_fault(self, uuid: str, kind: FaultKind, number: int) -> None:
        if kind is FaultKind.XID:
            self.xids[uuid, number] += 1
            self.last_xid[uuid] = number
            self.xid_times[uuid, number] = time.time()
        elif kind is FaultKind.ECC:
            self.ecc_events[uuid] += 1

    def announce(self, before: Snapshot, after: Snapshot) -> None:
        """Count, log and hand on every transition between two snapshots."""
        for change in transitions(before, after):
            if change.before is not None or change.after is not HealthState.HEALTHY:
                self.transitions[change.uuid, change.after.value] += 1
                _log(change)
            for listener in self.listeners:
                listener(change)


def transitions(before: Snapshot, after: Snapshot) -> Iterator[Transition]:
    """The changes of health states between two snapshots, GPUs seen for the first time included."""
    for state in after.gpus:
        known = before.by_uuid.get(state.uuid)
        if known is None or known.health.state is not state.health.state:
            yield _transition(known, state)


def _transition(known: GpuState | None, state: GpuState) -> Transition:
    health = state.health if state.health.fault else (known.health if known else state.health)
    return Transition(
        state.uuid,
        state.gpu.index,
        known.health.state if known else None,
        state.health.state,
        health.cause,
        health.fault.kind if health.fault else None,
    )


def _log(change: Transition) -> None:
    keys = {"gpu": change.uuid, "index": change.index, "cause": change.cause}
    match change.after:
        case HealthState.SUSPECT:
            log.warning("gpu_suspect", **keys)
        case HealthState.UNHEALTHY:
            log.error("gpu_unhealthy", **keys)
        case HealthState.PROBATION:
            log.info("gpu_on_probation", **keys)
        case HealthState.HEALTHY:
            log.info("gpu_recovered", gpu=change.uuid, index=change.index, was=change.cause)


# The inventory actor: the one task that changes the inventory and publishes it.

MAILBOX_SIZE = 256
# Of the event loop, from a snapshot by plugin and stream until the list has left on its socket.
TURNS_TO_THE_SOCKET = 4


class Inventory:
    """The inventory as other rooms have it: the newest snapshot to read, a mailbox to write to."""

    def __init__(self, rules: Rules | None = None, listeners: Sequence[Listener] = ()) -> None:
        """`listeners` hear of each change of a GPU's health, see HealthCounters."""
        self.rules = rules or Rules()
        self.snapshot: Cell[Snapshot] = Cell(Snapshot())
        self.mailbox: Mailbox[Message] = Mailbox(MAILBOX_SIZE)
        self.counters = HealthCounters(listeners=list(listeners))

    async def run(self) -> None:
        """Serve the mailbox for ever. Fatal when it ends: without it the agent would serve stale truth."""
        async for message in self.mailbox:
            before = self.snapshot.value
            after = reduce(before, message, self.rules)
            self.counters.count(message, after)
            if after is before:
                continue
            self.snapshot.publish(after)
            # A verdict must not wait for its own log line.
            for _ in range(TURNS_TO_THE_SOCKET):
                await anyio.lowlevel.checkpoint()
            _log_changes(before, after)
            self.counters.announce(before, after)


def _log_changes(before: Snapshot, after: Snapshot) -> None:
    """Log what changed between two snapshots, health apart: transitions, never states."""
    if after.problem != before.problem:
        if after.problem and after.released_until is not None:
            log.info("nvml_released", problem=after.problem)
        elif after.problem:
            log.error("nvml_unavailable", problem=after.problem)
        elif after.driver:
            log.info("nvml_ready", driver=after.driver.version, gpus=len(after.gpus))
    for state in after.gpus:
        known = before.by_uuid.get(state.uuid)
        if known is None:
            log.info("gpu_found", gpu=state.uuid, index=state.gpu.index, product=state.gpu.product)
        elif known.gpu != state.gpu:
            log.info("gpu_changed", gpu=state.uuid, index=state.gpu.index, minor=state.gpu.minor)
    for gone in set(after.unreadable) - set(before.unreadable):
        log.error("gpu_unreadable", index=gone.index, cause=gone.cause)
