"""Builds the rooms of the node agent and starts their tasks; `app` says in which order they stop."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import structlog
from anyio.abc import TaskGroup

from agent.app.agent import Agent, ClusterAccess
from agent.app.build_cdi import build_cdi, start_cdi
from agent.app.build_mps import MpsBackend, build_mps
from agent.app.build_node import build_node, run_node
from agent.app.build_telemetry import build_telemetry
from agent.app.degradations import remarks
from agent.app.vgpu_limits import NO_FENCES, Grown, VgpuLimits, build_limits
from agent.inventory.gpu_monitor import GpuMonitor
from agent.inventory.snapshot import NOT_YET
from agent.kit.cell import Cell
from agent.kit.supervise import FatalError
from agent.kubelet.endpoint import Endpoint
from agent.kubelet.plugin_types import ResourcePlugin
from agent.model.modes import OFFERED_MODES, Assignment, Mode
from agent.model.node_layout import Entry
from agent.modes.cordon_book import CordonBook
from agent.modes.desired import ModeCatalog
from agent.modes.last_request import LastRequest
from agent.modes.mode_metrics import Patching, modes_collector
from agent.modes.resources import ResourceSet
from agent.modes.sources import DesiredSource
from agent.modes.switcher import ModeSwitcher
from agent.node import inventory_annotation as inventory_note
from agent.node.conditions import NodeStateWriter
from agent.node.driver_upgrade import DriverUpgrade
from agent.node.labels import SIMULATED_LABEL, labels_of
from agent.nvml.port import NvmlPort
from agent.pairing.ports import PodSource, Recorder
from agent.plugins import vgpu
from agent.plugins.context import PluginContext, module_of
from agent.plugins.inject import Injector, NodeSoftware
from agent.plugins.shared_pair import no_fence, none_grown
from agent.settings import Settings
from agent.status import top
from agent.status.commands import Commands
from agent.status.node_events import node_events
from agent.status.report import StatusSources
from agent.telemetry.health_metrics import health_collector
from agent.telemetry.pairs import pairs_collector
from agent.web.control import NAME as CONTROL_SOCKET
from agent.web.control import ControlServer

if TYPE_CHECKING:
    from agent.cluster.node import NodeObject

log = structlog.get_logger()

EndpointFactory = Callable[[ResourcePlugin], Endpoint]

# The first list should be the true one: an empty list first would make the kubelet's figures dip.
FIRST_LOOK_SECONDS = 2.0
# How long an API server that does not answer is waited for before the last known request is taken up.
FIRST_REQUEST_SECONDS = 3.0


async def start(agent: Agent, nvml: NvmlPort, group: TaskGroup) -> None:
    """Start everything but the inventory actor and the HTTP server, which run already."""
    settings, spawn = agent.settings, agent.supervisor.restarting
    inventory = agent.inventory
    agent.gpu_monitor = GpuMonitor(settings, nvml, agent.calls, inventory, agent.supervisor)
    await agent.gpu_monitor.start(group)
    agent.collectors.append(health_collector(inventory, agent.gpu_monitor.events))
    agent.sources = build_telemetry(agent, nvml, group)
    agent.cluster = await _reach_cluster(settings)
    if agent.cluster:
        group.start_soon(spawn, "node watch", agent.cluster.node.run)
        from agent.pairing.cluster_pods import ClusterPods  # noqa: PLC0415  loads the client

        ClusterPods(agent.cluster.pods).inform(agent.holdings, agent.cluster.node.name)
        group.start_soon(spawn, "pod watch", agent.cluster.pods.run)
        group.start_soon(spawn, "events", agent.cluster.events.run)
        inventory.counters.listeners.append(node_events(agent.cluster.events.node))
    injector, keeper = await build_cdi(agent)
    await anyio.to_thread.run_sync(injector.look, None)
    if agent.cluster:
        group.start_soon(spawn, "injection", _follow_node_software, agent.cluster.node, injector)
    with anyio.move_on_after(FIRST_LOOK_SECONDS):
        await agent.holdings.refresh()
        await inventory.snapshot.wait_for(lambda now: now.problem != NOT_YET)
    if keeper:
        await start_cdi(agent, keeper, injector, group)
    group.start_soon(spawn, "holdings", agent.holdings.run)
    await _start_modes(agent, nvml, injector, group)
    _serve_commands(agent, injector, group)


def _serve_commands(agent: Agent, injector: Injector, group: TaskGroup) -> None:
    """The socket of `gpu-node-agent status`, `clear-health` and `release`."""
    if agent.gpu_monitor is None or agent.switcher is None:
        return
    switch = agent.switcher.state

    def injection() -> tuple[str, str]:
        return "cdi" if injector.choice.cdi else "envvar", injector.choice.reason

    control = ControlServer(Path(agent.settings.host.run) / CONTROL_SOCKET)
    sources = StatusSources(
        agent.inventory,
        agent.gpu_monitor,
        agent.holdings,
        lambda: switch.value,
        injection,
        agent.blockers,
        lambda uuid: agent.mps.report(uuid) if agent.mps else None,
        lambda: remarks(agent),
        agent.cordons,
        agent.limits,
    )
    Commands(sources).add_to(control)
    if agent.sources:
        top.add_to(
            control,
            agent.sources,
            lambda: {one.uuid: one.active.mode.value for one in switch.value.gpus},
            lambda: agent.limits.allotted() if agent.limits else {},
        )
    group.start_soon(agent.supervisor.restarting, "control socket", control.serve)


async def _start_modes(agent: Agent, nvml: NvmlPort, injector: Injector, group: TaskGroup) -> None:
    settings, spawn, snapshot = agent.settings, agent.supervisor.restarting, agent.inventory.snapshot
    agent.desired = DesiredSource(catalog_of(settings))
    memory = LastRequest(Path(settings.host.state) / "mode")
    remembered = await memory.read()
    assignment: Cell[Assignment] = Cell(Assignment())
    source, recorder = _pod_ports(agent, group)
    agent.mps = await build_mps(agent, nvml, assignment, injector, group, source, recorder)
    context = PluginContext(settings, snapshot, assignment, agent.holdings, injector)
    grown = await build_limits(agent, nvml, injector, group, recorder, assignment)
    plugins: dict[Mode, list[ResourcePlugin]] = {
        Mode.VGPU: _vgpu_plugins(agent, assignment, injector, source, recorder, grown, group),
        Mode.MPS: agent.mps.plugins,
    }
    plugins |= {mode: module_of(mode).build(context) for mode in OFFERED_MODES if mode not in plugins}
    resources = ResourceSet(plugins, agent.endpoints, _endpoint_of(agent), agent.supervisor, group)
    writers: dict[str, Patching] = {}
    if agent.cluster:
        from agent.node.object import ClusterNode  # noqa: PLC0415  loads the API client's room

        own = ClusterNode(agent.cluster.node, agent.cluster.events)
        most = settings.mps.most_clients
        resources.before_first = inventory_note.ahead(own, snapshot, assignment, most, agent.grown)
        agent.node = build_node(agent, agent.cluster, own, resources, assignment)
        writers |= {"status": agent.node.capacity, "taint": agent.node.taint}
    node = own if agent.cluster else None
    agent.cordons = CordonBook(Path(settings.host.state) / "cordons.json", snapshot, node)
    await agent.cordons.restore()
    follows_upgrades = node is not None and settings.driver.release_for_upgrades
    cordons = Cell(agent.cordons.cell.value) if follows_upgrades else agent.cordons.cell
    agent.switcher = ModeSwitcher(
        snapshot,
        agent.desired.cell,
        assignment,
        agent.holdings,
        resources,
        announcer=agent.node.withdrawals if agent.node else None,
        backends={Mode.MPS: MpsBackend(agent.mps.manager)},
        gate=agent.mps.gate(agent),
        when_busy=settings.when_busy,
        standing=agent.desired.catalog.remembered(remembered),
        cordons=cordons,
    )
    if agent.sources:
        switcher = agent.switcher
        agent.sources.collectors.append(modes_collector(switcher.state, lambda: switcher.switches, writers))
    if settings.mode_file:
        group.start_soon(spawn, "mode file", agent.desired.follow_file, Path(settings.mode_file))
    elif agent.cluster:
        group.start_soon(spawn, "mode label", agent.desired.follow_node, own)
    else:
        agent.desired.from_default()
    with anyio.move_on_after(FIRST_REQUEST_SECONDS):
        await agent.desired.known.wait()
    agent.desired.from_memory(remembered)
    if follows_upgrades and node and agent.gpu_monitor:
        agent.driver_upgrade = DriverUpgrade(
            node, agent.gpu_monitor, snapshot, agent.switcher.state, agent.cordons.cell, cordons
        )
        agent.driver_upgrade.look()  # before the first mode is set up
        group.start_soon(spawn, "driver upgrades", agent.driver_upgrade.run)
    group.start_soon(spawn, "mode switcher", agent.switcher.run)
    group.start_soon(spawn, "cordons", agent.cordons.run)
    group.start_soon(spawn, "mode memory", memory.follow, agent.switcher.accepted)
    if agent.cluster and agent.node:
        group.start_soon(spawn, "node capacity", run_node, agent.node, resources)
        annotations: Cell[Mapping[str, str]] = Cell({})

        fixed = {SIMULATED_LABEL: "true"} if settings.simulator.profile else {}

        def labels(present: Mapping[str, str]) -> Mapping[str, str]:
            return {**(labels_of(snapshot.value, present) if settings.node_labels else {}), **fixed}

        agent.state_writer = writers["report"] = NodeStateWriter(
            own, agent.switcher.state, labels=labels, annotations=annotations, wake_on=(snapshot,)
        )
        group.start_soon(spawn, "node report", agent.state_writer.run)
        group.start_soon(
            spawn,
            "inventory note",
            inventory_note.follow,
            snapshot,
            assignment,
            most,
            annotations,
            agent.grown,
        )


def catalog_of(settings: Settings) -> ModeCatalog:
    """The modes that may be requested under a configuration."""
    allowed = settings.modes
    modes = [mode for mode in OFFERED_MODES if getattr(allowed, mode.value)]
    layouts = {
        name: tuple(Entry(tuple(map(str, entry.gpus)), Mode(entry.mode), entry.replicas) for entry in entries)
        for name, entries in settings.layouts.items()
    }
    return ModeCatalog(layouts, tuple(modes), settings.default_mode)


def _pod_ports(agent: Agent, group: TaskGroup) -> tuple[PodSource | None, Recorder | None]:
    """The node's pods and their owners, where there is an API server."""
    if not agent.cluster:
        return None, None
    from agent.pairing.cluster_pods import ClusterPods, ClusterRecorder  # noqa: PLC0415  loads the client

    write = agent.settings.vgpu.write_choice
    recorder = ClusterRecorder(agent.cluster.api, agent.cluster.events, write)
    group.start_soon(agent.supervisor.restarting, "choices", recorder.run)
    return ClusterPods(agent.cluster.pods), recorder


def _vgpu_plugins(
    agent: Agent,
    assignment: Cell[Assignment],
    injector: Injector,
    source: PodSource | None,
    recorder: Recorder | None,
    grown: Grown | None,
    group: TaskGroup,
) -> list[ResourcePlugin]:
    settings = agent.settings
    shares, plugins = vgpu.build(
        settings,
        agent.inventory.snapshot,
        assignment,
        injector,
        agent.holdings,
        source,
        recorder,
        agent.cluster.node.name if agent.cluster else "",
        grown if isinstance(grown, VgpuLimits) else no_fence,
        grown.units_grown if grown else none_grown,
    )
    if grown:
        grown.follow_resizes(agent, shares, group)
    agent.collectors.append(
        pairs_collector(
            "vgpu", shares.pairing.stats, lambda: _vgpu_fences(agent), lambda: shares.pairing.waiting
        )
    )
    return list(plugins)


def _vgpu_fences(agent: Agent) -> Mapping[str, bool]:
    return agent.limits.fences() if agent.limits else NO_FENCES


def _endpoint_of(agent: Agent) -> EndpointFactory:
    settings = agent.settings

    def endpoint(plugin: ResourcePlugin) -> Endpoint:
        return Endpoint(
            plugin,
            Path(settings.kubelet.root),
            settings.device_plugins_folder,
            agent.holdings.allocated,
        )

    return endpoint


async def _reach_cluster(settings: Settings) -> ClusterAccess | None:
    """Build the rooms of the Kubernetes API where there is a way to it; makes no call."""
    configured = settings.cluster
    if configured.access == "off":
        return None
    # Importing the client takes a tenth of a second and 5 MiB: only where it is used.
    from agent.cluster.api import connect  # noqa: PLC0415
    from agent.cluster.event_recorder import EventRecorder  # noqa: PLC0415
    from agent.cluster.lean import NoClusterAccess  # noqa: PLC0415
    from agent.cluster.node import NodeObject  # noqa: PLC0415
    from agent.cluster.pods import PodCache  # noqa: PLC0415

    try:
        api = await connect(Path(configured.kubeconfig) if configured.kubeconfig else None)
    except NoClusterAccess as error:
        if configured.access == "required":
            raise FatalError(f"cluster.access is required, but {error}") from error
        log.info("no_cluster_access", reason=str(error))
        return None
    name = configured.own_node
    node = NodeObject(api, name)
    return ClusterAccess(api, node, PodCache(api, name, lambda: node.uid), EventRecorder(api, name))


async def _follow_node_software(node: "NodeObject", injector: Injector) -> None:
    """Pass the versions of kubelet and runtime to the injector whenever the Node object shows new ones."""
    async for _ in node.reflector.items.values():
        if node.value:
            info = node.value.status.node_info
            software = NodeSoftware(info.kubelet_version, info.container_runtime_version)
            if software != injector.software:
                await anyio.to_thread.run_sync(injector.look, software)
                injector.looked.publish(software)
