"""Parts of which the agent is built. Each is complete when it exists, and none changes afterwards."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVarTuple

from agent.app.readiness import Readiness
from agent.cluster.reach import ClusterAccess
from agent.holdings.holdings import HoldingsWatch
from agent.inventory.actor import Inventory
from agent.kit.tasks import Supervisor
from agent.nvml.port import NvmlPort
from agent.nvml.worker_thread import WorkerThread
from agent.settings import Settings
from agent.web.server import HttpServer

if TYPE_CHECKING:
    from anyio.abc import TaskGroup


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
    group: "TaskGroup"

    def start(self, name: str, task: Callable[[*Ts], Awaitable[None]], *arguments: *Ts) -> None:
        """Run `task(*arguments)` for ever, as `name` in logs, probes and metrics."""
        self.group.start_soon(self.supervisor.restarting, name, task, *arguments)
