"""Metrics of MPS: daemons, their clients, and how many more a GPU takes."""

from collections.abc import Callable, Mapping

from agent.kit.cell import Cell
from agent.mps.clients import Overview
from agent.mps.daemon_status import DaemonState, DaemonStatus
from agent.telemetry import definitions as d
from agent.telemetry.reading import Add, Collector


def mps_collector(
    statuses: Cell[Mapping[str, DaemonStatus]],
    overviews: Cell[Mapping[str, Overview]],
    ceiling: Callable[[str], int],
) -> Collector:
    """The metrics of MPS."""

    def read() -> Callable[[Add], None]:
        daemons, clients = statuses.value, overviews.value
        ceilings = {uuid: ceiling(uuid) for uuid in daemons}

        def add(series: Add) -> None:
            for uuid, status in daemons.items():
                for state in DaemonState:
                    series(d.MPS_DAEMON, status.state is state, (uuid, state.value))
                series(d.MPS_RESTARTS, status.restarts, (uuid,))
                series(d.MPS_FAULTS, status.faults, (uuid,))
                series(d.MPS_CLIENT_CEILING, ceilings[uuid], (uuid,))
            for uuid, overview in clients.items():
                series(d.MPS_CLIENTS, len(overview.clients), (uuid,))
                series(d.MPS_SILENT_PODS, len(overview.silent), (uuid,))

        return add

    return read
