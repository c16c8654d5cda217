"""Metrics of MPS: daemons, their clients, and how many more a GPU takes."""

from collections.abc import Callable, Iterator, Mapping

from agent.kit.cell import Cell
from agent.mps.clients import Overview
from agent.mps.daemon_status import DaemonState, DaemonStatus
from agent.telemetry import definitions as d
from agent.telemetry.reading import Series


def mps_collector(
    statuses: Cell[Mapping[str, DaemonStatus]],
    overviews: Cell[Mapping[str, Overview]],
    ceiling: Callable[[str], int],
) -> Iterator[Series]:
    """By GPU; of those that have a daemon."""
    for uuid, status in statuses.value.items():
        for state in DaemonState:
            yield d.MPS_DAEMON, status.state is state, (uuid, state.value)
        yield d.MPS_RESTARTS, status.restarts, (uuid,)
        yield d.MPS_FAULTS, status.faults, (uuid,)
        yield d.MPS_CUT, status.cut, (uuid,)
        yield d.MPS_CLIENT_CEILING, ceiling(uuid), (uuid,)
    for uuid, overview in overviews.value.items():
        yield d.MPS_CLIENTS, len(overview.clients), (uuid,)
        yield d.MPS_SILENT_PODS, len(overview.silent), (uuid,)
