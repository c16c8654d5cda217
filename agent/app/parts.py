"""Parts of which the agent is built. Each is complete when it exists, and none changes afterwards."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVarTuple

from anyio.abc import TaskGroup

from agent.cluster.reach import ClusterAccess
from agent.holdings.holdings import HoldingsWatch
from agent.inventory.actor import Inventory
from agent.inventory.snapshot import Snapshot
from agent.kit.tasks import Cell, Supervisor
from agent.kubelet.endpoint import Endpoint
from agent.modes.planner import STARTING, Phase, SwitchState
from agent.nvml.event_watch import WorkerThread
from agent.nvml.port import NvmlPort
from agent.settings import Settings
from agent.web.server import HttpServer

# Why the node cannot serve, and what works less well than it should: for probes, status and metrics.


class Readiness:
    """Of one agent, from its first moment to its last; rooms that are built are asked for remarks."""

    def __init__(self, inventory: Cell[Snapshot], holdings: HoldingsWatch) -> None:
        self._inventory = inventory
        self._holdings = holdings
        self.endpoints: list[Endpoint] = []  # grows as modes are first used
        self.switch: Cell[SwitchState] = Cell(STARTING)  # published by the mode switcher
        self.stopping = False
        self._remarks: list[Callable[[], Sequence[str]]] = []

    def follow(self, *remarks: Callable[[], Sequence[str]]) -> None:
        """Take these into account: each answers degradations while pods are served, in sentences."""
        self._remarks += remarks

    def blockers(self) -> list[str]:
        """Why the node cannot serve, each in a sentence; empty: it can."""
        found = self.shortcomings()
        problem = self._inventory.value.problem
        if problem:
            found.append(problem)
        switch = self.switch.value
        if not self.endpoints and switch != STARTING and switch.phase in (Phase.SWITCHING, Phase.FAILED):
            # Before the first plan is in force there is no endpoint that could stand in the way.
            found.append(f"no resource is registered yet: {switch.message}")
        return found

    def shortcomings(self) -> list[str]:
        """Those of the blockers that another agent might not have: it starts, stops, or misses the kubelet.

        A missing driver and pods that are waited for are the node's: no update of the agent helps there.
        """
        found = ["the agent is stopping"] if self.stopping else []
        if self._holdings.problem:
            found.append(self._holdings.problem)
        found.extend(endpoint.blocker for endpoint in self.endpoints if endpoint.blocker)
        if self.switch.value == STARTING:
            found.append(f"no resource is registered yet: {STARTING.message}")
        return found

    def remarks(self) -> list[str]:
        return [text for remarks in self._remarks for text in remarks()]


Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, slots=True)
class Core:
    """The parts that an agent has from its first moment to its last."""

    settings: Settings  # of its start; `agent.app.reload` puts newer ones in force
    nvml: NvmlPort
    calls: WorkerThread  # makes all calls to NVML but the wait for events
    inventory: Inventory
    holdings: HoldingsWatch
    supervisor: Supervisor
    http: HttpServer
    readiness: Readiness
    cluster: ClusterAccess | None  # None: there is no way to the Kubernetes API


@dataclass(frozen=True, slots=True)
class Tasks:
    """Starts tasks that are started again when they fail, and end with the agent."""

    supervisor: Supervisor
    group: TaskGroup

    def start(self, name: str, task: Callable[[*Ts], Awaitable[None]], *arguments: *Ts) -> None:
        """Run `task(*arguments)` for ever, as `name` in logs, probes and metrics."""
        self.group.start_soon(self.supervisor.restarting, name, task, *arguments)
