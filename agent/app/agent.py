"""The running agent as one value: its rooms, as probes, metrics, commands and tests see them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from agent.inventory.actor import Inventory
from agent.inventory.gpu_monitor import GpuMonitor
from agent.inventory.snapshot import GpuState
from agent.kit.cell import Cell
from agent.kit.supervise import Supervisor
from agent.kubelet.endpoint import Endpoint
from agent.kubelet.holdings import HoldingsWatch
from agent.kubelet.plugin_types import ResourcePlugin
from agent.model.modes import Mode
from agent.modes.cordon_book import CordonBook
from agent.modes.sources import DesiredSource
from agent.modes.switch_state import STARTING, Phase, SwitchState
from agent.modes.switcher import ModeSwitcher
from agent.mps.clients import ClientWatch, Overview
from agent.mps.daemon_manager import DaemonManager
from agent.node.capacity import Capacity
from agent.node.conditions import NodeStateWriter
from agent.node.driver_upgrade import DriverUpgrade
from agent.node.inherited import Inherited
from agent.node.taint import SchedulingTaint
from agent.node.withdrawal import Withdrawals
from agent.nvml.worker_thread import WorkerThread
from agent.settings import Settings
from agent.telemetry.reading import Collector, Sources
from agent.web.server import HttpServer

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from agent.cdi.keeper import SpecificationKeeper
    from agent.cluster.api import KubeApi
    from agent.cluster.event_recorder import EventRecorder
    from agent.cluster.node import NodeObject
    from agent.cluster.pods import PodCache
    from agent.plugins.shared_pair import SharedPair


class Limits(Protocol):
    """Limits of vGPU containers, whose room is imported only where they are enforced."""

    @property
    def problem(self) -> str | None:
        """Why containers start without the library, though they should have it; None: they have it."""

    def units_grown(self, uuid: str) -> frozenset[str]:
        """Units of memory of a GPU that containers have grown by: nobody else may be offered them."""

    def follow_resizes(self, agent: "Agent", shares: "SharedPair", group: "TaskGroup") -> None:
        """Start what keeps grown units out of the pools, and resizes containers where that is allowed."""

    def fences(self) -> Mapping[str, bool]:
        """Which fences hold for containers that start now."""

    @property
    def computes(self) -> bool:
        """Whether containers that start now are held to compute, where they get the library."""

    def allotted(self) -> Mapping[tuple[str, str, str, str], float]:
        """Share of the GPU that containers may use now, 0..1; by namespace, pod, container and GPU."""

    def document(self, namespace: str, pod: str, container: str, gpu: str) -> Mapping[str, Any] | None:
        """The limits of a container, for `status`; None: it has none, and is not measured."""


@dataclass
class MpsParts:
    """The parts of MPS that the rest of the agent uses."""

    manager: DaemonManager
    clients: ClientWatch
    plugins: list[ResourcePlugin]
    ceiling: Callable[[str], int]
    # Why a pod can undo its caps; None: it cannot.
    caps_problem: Callable[[], str | None]
    # What works less well than it should, each in a sentence.
    remarks: Callable[[], list[str]]

    def report(self, uuid: str) -> dict[str, Any] | None:
        """A GPU's daemon for `status`; None: it has none. Limits hold per client process."""
        status = self.manager.statuses.value.get(uuid)
        if status is None:
            return None
        overview = self.clients.overviews.value.get(uuid, Overview())
        return {
            "state": status.state.value,
            "reason": status.reason,
            "pid": status.pid,
            "server": status.server,
            "serverState": status.server_state.value if status.server_state else None,
            "adopted": status.adopted,
            "restarts": status.restarts,
            "faults": status.faults,
            "multiUser": status.multi_user,
            "privateSharedMemory": status.private_shm,
            "limitsHoldPer": "client process",
            "capsAdvisory": self.caps_problem(),
            "clientCeiling": self.ceiling(uuid),
            "clients": [{"pid": each.pid, "pod": each.pod or None} for each in overview.clients],
            "podsWithoutClient": sorted(overview.silent),
            "podsWithManyClients": sorted(overview.crowded),
            "podsAboveCap": sorted(overview.exceeding),
            "rootPods": sorted(overview.rooted),
            "podsOfOtherUsers": sorted(overview.apart),
        }

    def gate(self, agent: "Agent") -> Callable[[GpuState, Mode], str | None]:
        """Why a GPU cannot be offered in mode MPS."""

        def gate(state: GpuState, mode: Mode) -> str | None:
            if mode is not Mode.MPS:
                return None
            return self.manager.refusal(state.gpu, agent.inventory.snapshot.value.driver)

        return gate


@dataclass
class NodeParts:
    """The writers of the node's status and of its taint."""

    taint: SchedulingTaint
    capacity: Capacity
    withdrawals: Withdrawals
    inherited: Inherited


@dataclass
class ClusterAccess:
    """The agent's access to the Kubernetes API."""

    api: "KubeApi"
    node: "NodeObject"
    pods: "PodCache"
    events: "EventRecorder"


@dataclass
class Agent:
    """A running agent, as probes, metrics and tests see it."""

    settings: Settings
    inventory: Inventory
    holdings: HoldingsWatch
    supervisor: Supervisor
    calls: WorkerThread
    http: HttpServer
    endpoints: list[Endpoint] = field(default_factory=list)
    cluster: ClusterAccess | None = None
    desired: DesiredSource | None = None
    switcher: ModeSwitcher | None = None
    node: NodeParts | None = None
    state_writer: NodeStateWriter | None = None
    cordons: CordonBook | None = None
    driver_upgrade: DriverUpgrade | None = None  # None: no API server, or not wanted
    gpu_monitor: GpuMonitor | None = None
    mps: MpsParts | None = None
    # Keeps our own CDI specification of the GPUs; None: NVIDIA's generator is not at hand, or not wanted.
    gpu_specification: "SpecificationKeeper | None" = None
    limits: Limits | None = None  # of vGPU containers; None: nothing enforces them
    # Bytes by GPU that vGPU containers have beyond what their pods asked for.
    grown: Cell[Mapping[str, int]] = field(default_factory=lambda: Cell({}))
    sources: Sources | None = None
    # What rooms beyond the common ones show at /metrics.
    collectors: list[Collector] = field(default_factory=list)
    configuration_problem: str | None = None  # of the newest file, while an older one is in force
    stopping: bool = False

    @property
    def http_port(self) -> int:
        """The port of /metrics and the probes."""
        return self.http.port

    def blockers(self) -> list[str]:
        """Why the node cannot serve, each in a sentence; empty: it can."""
        found = self.shortcomings()
        problem = self.inventory.snapshot.value.problem
        if problem:
            found.append(problem)
        switch = self._switch
        if not self.endpoints and switch != STARTING and switch.phase in (Phase.SWITCHING, Phase.FAILED):
            # Before the first plan is in force there is no endpoint that could stand in the way.
            found.append(f"no resource is registered yet: {switch.message}")
        return found

    def shortcomings(self) -> list[str]:
        """Those of the blockers that another agent might not have: it starts, stops, or misses the kubelet.

        A missing driver and pods that are waited for are the node's: no update of the agent helps there.
        """
        found = ["the agent is stopping"] if self.stopping else []
        if self.holdings.problem:
            found.append(self.holdings.problem)
        found.extend(endpoint.blocker for endpoint in self.endpoints if endpoint.blocker)
        if self._switch == STARTING:
            found.append(f"no resource is registered yet: {STARTING.message}")
        return found

    @property
    def _switch(self) -> SwitchState:
        return self.switcher.state.value if self.switcher else STARTING
