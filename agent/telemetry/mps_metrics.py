"""Metrics of MPS: daemons, their clients, and how many more a GPU takes."""

from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Any, Protocol

from agent.kit.cell import Cell
from agent.telemetry import definitions as d
from agent.telemetry.reading import Add, Collector

STATES = ("stopped", "starting", "serving", "fault", "stopping")


class Daemon(Protocol):
    """A daemon's status."""

    @property
    def state(self) -> Enum:
        """One of STATES by its value."""

    @property
    def restarts(self) -> int:
        """Since the agent started."""

    @property
    def faults(self) -> int:
        """Since the agent started."""


class Overview(Protocol):
    """Clients of one GPU."""

    @property
    def clients(self) -> Collection[Any]:
        """All of them."""

    @property
    def silent(self) -> Collection[str]:
        """Pods with shares and without a client."""


def mps_collector(
    statuses: Cell[Mapping[str, Any]], overviews: Cell[Mapping[str, Any]], ceiling: Callable[[str], int]
) -> Collector:
    """The metrics of MPS."""

    def read() -> Callable[[Add], None]:
        daemons: Mapping[str, Daemon] = statuses.value
        clients: Mapping[str, Overview] = overviews.value
        ceilings = {uuid: ceiling(uuid) for uuid in daemons}

        def add(series: Add) -> None:
            for uuid, status in daemons.items():
                for state in STATES:
                    series(d.MPS_DAEMON, status.state.value == state, (uuid, state))
                series(d.MPS_RESTARTS, status.restarts, (uuid,))
                series(d.MPS_FAULTS, status.faults, (uuid,))
                series(d.MPS_CLIENT_CEILING, ceilings[uuid], (uuid,))
            for uuid, overview in clients.items():
                series(d.MPS_CLIENTS, len(overview.clients), (uuid,))
                series(d.MPS_SILENT_PODS, len(overview.silent), (uuid,))

        return add

    return read
