"""The inventory actor: the one task that changes the inventory and publishes it."""

from collections.abc import Sequence

import anyio
import anyio.lowlevel
import structlog

from agent.inventory.health_counters import HealthCounters, Listener
from agent.inventory.messages import Message
from agent.inventory.reducer import reduce
from agent.inventory.snapshot import Snapshot
from agent.kit.cell import Cell
from agent.kit.mailbox import Mailbox
from agent.model.health import Rules

log = structlog.get_logger()

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
