"""Metrics of health: states, transitions, Xids, and how well the watching itself works."""

from collections.abc import Iterator

from agent.inventory.actor import Inventory
from agent.kit.timestamps import boot_seconds
from agent.model.health import HealthState
from agent.model.xids import UNKNOWN, XIDS, XidClass
from agent.nvml.event_watch import EventWatch
from agent.telemetry import definitions as d
from agent.telemetry.reading import Series


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
