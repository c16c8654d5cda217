"""The composition root: builds the rooms, runs the task tree, stops it in order."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import structlog
from anyio.abc import TaskGroup, TaskStatus

from agent import __version__
from agent.inventory.actor import Inventory
from agent.inventory.scanner import Scanner
from agent.kit.lock import Taken, exclusive
from agent.kit.supervise import FatalError, Supervisor
from agent.kubelet.api import ResourcePlugin
from agent.kubelet.endpoint import Endpoint
from agent.kubelet.holdings import HoldingsWatch
from agent.kubelet.podresources import PodResources
from agent.model.modes import Mode
from agent.modes.switcher import ModeSwitcher
from agent.nvml.lane import Lane
from agent.nvml.port import NvmlPort
from agent.plugins.inject import Injector, NodeSoftware
from agent.plugins.pgpu import PgpuPlugin
from agent.settings import Settings
from agent.telemetry.page import MetricsPage
from agent.telemetry.reading import Sources
from agent.telemetry.sampler import Sampler
from agent.web.probes import Probes
from agent.web.server import HttpServer

if TYPE_CHECKING:
    from agent.cluster.api import KubeApi
    from agent.cluster.events import EventRecorder
    from agent.cluster.node import NodeObject
    from agent.cluster.pods import PodCache

log = structlog.get_logger()

# An agent that is being replaced may need this long to leave.
LOCK_SECONDS = 10.0
# The first list should be the true one: an empty list first would make the kubelet's figures dip.
FIRST_SCAN_SECONDS = 2.0


@dataclass
class ClusterAccess:
    """What the agent has of the Kubernetes API."""

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
    calls: Lane
    http: HttpServer
    endpoints: list[Endpoint] = field(default_factory=list)
    cluster: ClusterAccess | None = None
    stopping: bool = False

    @property
    def http_port(self) -> int:
        """The port of /metrics, /healthz and /readyz."""
        return self.http.port

    def blockers(self) -> list[str]:
        """Why the node cannot serve, each in a sentence; empty: it can."""
        found = ["the agent is stopping"] if self.stopping else []
        problem = self.inventory.snapshot.value.problem
        if problem:
            found.append(problem)
        found.extend(endpoint.blocker for endpoint in self.endpoints if endpoint.blocker)
        return found


@asynccontextmanager
async def running(settings: Settings, nvml: NvmlPort) -> AsyncIterator[Agent]:
    """Run the node agent while the context is open; leaving it stops everything in order.

    A fatal task that fails cancels the body and leaves as an exception group. Raises FatalError when
    another agent serves this node.
    """
    agent = Agent(
        settings,
        Inventory(),
        HoldingsWatch(PodResources(Path(settings.kubelet.root))),
        Supervisor(),
        Lane("calls"),
        HttpServer(settings.http.address, settings.http.port),
    )
    async with _alone(Path(settings.host.run)), anyio.create_task_group() as outer:
        log.info("agent_starting", version=__version__)
        outer.start_soon(agent.supervisor.fatal, "inventory", agent.inventory.run)
        # The probes are asked from the first moment on and until the last.
        Probes(agent.supervisor, agent.blockers).add_to(agent.http)
        await outer.start(_serve_http, agent)
        async with anyio.create_task_group() as inner:
            await _start(agent, nvml, inner)
            log.info("agent_started", http_port=agent.http_port)
            try:
                yield agent
            finally:
                agent.stopping = True
                log.info("agent_stopping")
                inner.cancel_scope.cancel()
        outer.cancel_scope.cancel()
    if agent.cluster:
        await agent.cluster.api.close()
    agent.calls.close()
    log.info("agent_stopped")


async def _serve_http(agent: Agent, *, task_status: TaskStatus[int]) -> None:
    async def serve() -> None:
        await agent.http.serve(task_status=task_status)

    await agent.supervisor.fatal("http", serve)


async def _start(agent: Agent, nvml: NvmlPort, group: TaskGroup) -> None:
    settings, supervisor, inventory = agent.settings, agent.supervisor, agent.inventory
    scanner = Scanner(nvml, agent.calls, inventory)
    group.start_soon(supervisor.restarting, "scanner", scanner.run)
    sampler = Sampler(nvml, agent.calls, inventory.snapshot, settings.sampling.interval_seconds)
    group.start_soon(supervisor.restarting, "sampler", sampler.run)
    sources = Sources(inventory, sampler, [agent.calls], agent.endpoints, supervisor, agent.blockers)
    MetricsPage(sources).add_to(agent.http)
    group.start_soon(supervisor.restarting, "holdings", agent.holdings.run)
    agent.cluster = await _reach_cluster(settings)
    if agent.cluster:
        group.start_soon(supervisor.restarting, "node watch", agent.cluster.node.run)
        group.start_soon(supervisor.restarting, "pod watch", agent.cluster.pods.run)
        group.start_soon(supervisor.restarting, "events", agent.cluster.events.run)
    injector = Injector(settings)
    await anyio.to_thread.run_sync(injector.look, None)
    with anyio.move_on_after(FIRST_SCAN_SECONDS):
        await inventory.snapshot.wait_change(0)
    wanted = Mode.OFF if settings.default_mode == "none" else Mode(settings.default_mode)
    switcher = ModeSwitcher(inventory.snapshot, wanted)
    group.start_soon(supervisor.restarting, "mode switcher", switcher.run)
    pgpu = PgpuPlugin(inventory.snapshot, switcher.assignment, agent.holdings.cell, injector)
    group.start_soon(supervisor.restarting, f"plugin {pgpu.resource}", pgpu.run)
    _serve_resource(agent, pgpu, group)
    if agent.cluster:
        group.start_soon(
            supervisor.restarting, "injection", _follow_node_software, agent.cluster.node, injector
        )


def _serve_resource(agent: Agent, plugin: ResourcePlugin, group: TaskGroup) -> None:
    settings = agent.settings
    endpoint = Endpoint(
        plugin,
        Path(settings.kubelet.root),
        settings.device_plugins_folder,
        settings.kubelet.registration,
        settings.kubelet.registry_wait_seconds,
    )
    agent.endpoints.append(endpoint)
    group.start_soon(agent.supervisor.restarting, f"endpoint {plugin.resource}", endpoint.run)


async def _reach_cluster(settings: Settings) -> ClusterAccess | None:
    """Build the rooms of the Kubernetes API where there is a way to it; makes no call."""
    wish = settings.cluster
    if wish.access == "off":
        return None
    # Importing the client takes a tenth of a second and 5 MiB: only where it is used.
    from agent.cluster.api import connect  # noqa: PLC0415
    from agent.cluster.events import EventRecorder  # noqa: PLC0415
    from agent.cluster.lean import NoClusterAccess  # noqa: PLC0415
    from agent.cluster.node import NodeObject  # noqa: PLC0415
    from agent.cluster.pods import PodCache  # noqa: PLC0415

    try:
        api = await connect(Path(wish.kubeconfig) if wish.kubeconfig else None)
    except NoClusterAccess as error:
        if wish.access == "required":
            raise FatalError(f"cluster.access is required, but {error}") from error
        log.info("no_cluster_access", reason=str(error))
        return None
    name = wish.node_name or os.uname().nodename
    return ClusterAccess(api, NodeObject(api, name), PodCache(api, name), EventRecorder(api, name))


async def _follow_node_software(node: "NodeObject", injector: Injector) -> None:
    """Tell the injector the versions of kubelet and runtime whenever the Node object tells new ones."""
    async for _ in node.reflector.items.values():
        if node.value:
            info = node.value.status.node_info
            software = NodeSoftware(info.kubelet_version, info.container_runtime_version)
            if software != injector.software:
                await anyio.to_thread.run_sync(injector.look, software)


@asynccontextmanager
async def _alone(folder: Path) -> AsyncIterator[None]:
    """Two agents on one node would take each other's sockets away: the second waits, then gives up."""
    deadline = anyio.current_time() + LOCK_SECONDS
    while True:
        lock = exclusive(folder / "agent.lock")
        try:
            lock.__enter__()
        except Taken as error:
            if anyio.current_time() >= deadline:
                raise FatalError(f"another agent serves this node ({error}); stop it first") from error
            await anyio.sleep(0.1)
            continue
        except OSError as error:
            raise FatalError(
                f"{folder}: cannot be used as the agent's run folder: {error.strerror}"
            ) from error
        break
    try:
        yield
    finally:
        lock.__exit__(None, None, None)
