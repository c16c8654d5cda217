"""Metrics of health: states, transitions, Xids, and how well the watching itself works."""

from collections.abc import Callable

from agent.inventory.actor import Inventory
from agent.inventory.clock import boot_seconds
from agent.model.health import HealthState
from agent.nvml.event_watch import EventWatch
from agent.telemetry import definitions as d
from agent.telemetry.reading import Add


def health_collector(inventory: Inventory, events: EventWatch) -> Callable[[], Callable[[Add], None]]:
    """The metrics of health."""

    def read() -> Callable[[Add], None]:
        snapshot = inventory.snapshot.value
        states = snapshot.gpus
        # As long as it cannot be closed, it is not.
        released = snapshot.released_until is not None and snapshot.let_go == ""
        counters = inventory.counters
        transitions, xids, ecc = dict(counters.transitions), dict(counters.xids), dict(counters.ecc_events)
        times = dict(counters.xid_times)
        watched, failures, now = events.watched, events.failures, boot_seconds()

        def add(series: Add) -> None:
            for state in states:
                labels = (state.uuid, str(state.gpu.index))
                for one in HealthState:
                    series(d.GPU_HEALTH_STATE, one is state.health.state, (*labels, one.value))
                    series(
                        d.GPU_TRANSITIONS, transitions.get((state.uuid, one.value), 0), (*labels, one.value)
                    )
                left = 0.0 if state.health.until is None else max(0.0, state.health.until - now)
                series(d.GPU_PROBATION_LEFT, left, labels)
                series(d.GPU_ECC_EVENTS, ecc.get(state.uuid, 0), labels)
                series(d.GPU_EVENTS_WATCHED, state.uuid in watched, labels)
                for (uuid, xid), count in sorted(xids.items()):
                    if uuid == state.uuid:
                        series(d.GPU_XIDS, count, (*labels, str(xid)))
                        if (uuid, xid) in times:
                            series(d.GPU_LAST_XID_TIME, times[uuid, xid], (*labels, str(xid)))
            series(d.EVENT_WAIT_FAILURES, failures, ())
            series(d.NVML_RELEASED, released, ())

        return add

    return read
