"""Builds the switching of modes: the request, the switcher, and the writers of its outcome."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio

from agent.app.parts import Core, Tasks
from agent.cluster.node import OwnNode
from agent.cluster.pods import PodCache
from agent.cluster.reach import ClusterAccess
from agent.holdings.holdings import HoldingsWatch
from agent.holdings.process_owners import Owners, pods_of_processes, pods_of_strangers
from agent.inventory.gpu_monitor import GpuMonitor
from agent.kit.tasks import Cell
from agent.kubelet.endpoint import Endpoint
from agent.kubelet.wire import ResourcePlugin
from agent.model.holding import Growth, Place
from agent.model.modes import Assignment, Mode
from agent.modes.desired import ClaimRequests, Desired, DesiredSource, LastRequest, catalog_of
from agent.modes.resources import ResourceSet
from agent.modes.switcher import ModeSwitcher
from agent.modes.unexplained import Unexplained
from agent.modes.wing import Wing
from agent.modes.withholding import CordonBook, Departed, Lingering
from agent.node.annotations import ahead, follow_holders, follow_inventory
from agent.node.capacity import Capacity, Offer, SchedulingTaint
from agent.node.conditions import NodeStateWriter, Writers, report_on
from agent.node.driver_upgrade import DriverUpgrade, Inherited
from agent.node.withdrawal import Withdrawals, unadmitted
from agent.nvml.sweep import ProcessSweep
from agent.settings import Settings
from agent.telemetry.sampler import Sampler

# Builds the writers of the own Node object: capacity and taint ahead of the kubelet, and the report.


@dataclass(frozen=True, slots=True)
class NodeParts:
    taint: SchedulingTaint
    capacity: Capacity
    withdrawals: Withdrawals
    inherited: Inherited
    report: NodeStateWriter
    annotations: Cell[Mapping[str, str]]  # further ones that the report writes
    pods: PodCache

    @property
    def writers(self) -> Writers:
        return {"status": self.capacity, "taint": self.taint, "report": self.report}


def build_node(
    core: Core, cluster: ClusterAccess, node: OwnNode, resources: ResourceSet, assignment: Cell[Assignment]
) -> NodeParts:
    """Make the parts; `start_node` starts their tasks."""
    offer = Offer(
        assignment,
        resources.figures,
        resources.delivered,
        core.holdings.client.allocatable,
        resources.register_again,
    )
    taint = SchedulingTaint(node)
    capacity = Capacity(node, offer, taint)
    unserved = _unserved(cluster.pods, core.readiness.endpoints, core.holdings)
    annotations: Cell[Mapping[str, str]] = Cell({})
    return NodeParts(
        taint,
        capacity,
        Withdrawals(node, offer, capacity, taint, unserved),
        Inherited(node, offer, capacity, taint, resources.names),
        report_on(
            core.settings,
            node,
            core.readiness.switch,
            core.inventory.snapshot,
            assignment,
            core.holdings.cell,
            annotations,
        ),
        annotations,
        cluster.pods,
    )


def start_node(
    parts: NodeParts,
    core: Core,
    tasks: Tasks,
    resources: ResourceSet,
    assignment: Cell[Assignment],
    grown: Cell[Mapping[Place, Growth]],
) -> None:
    """Keep the Node object true, for ever."""
    tasks.start("node capacity", _keep_amounts, parts, resources)
    tasks.start("node report", parts.report.run)
    tasks.start(
        "inventory note",
        follow_inventory,
        core.inventory.snapshot,
        assignment,
        core.settings.mps.most_clients,
        parts.annotations,
        grown,
    )
    tasks.start(
        "holders note",
        follow_holders,
        core.inventory.snapshot,
        assignment,
        core.holdings.cell,
        parts.pods.reflector.items,
        parts.pods.uids,
        parts.annotations,
    )


async def _keep_amounts(parts: NodeParts, resources: ResourceSet) -> None:
    async with anyio.create_task_group() as group:
        # In this order: a taint that stands already is left alone until the figures are right.
        group.start_soon(parts.inherited.run)
        group.start_soon(parts.taint.run)
        group.start_soon(parts.capacity.run)
        group.start_soon(resources.follow_lists, parts.capacity.wake)


def _unserved(
    pods: PodCache, endpoints: list[Endpoint], holdings: HoldingsWatch
) -> Callable[[], Awaitable[frozenset[str]]]:
    return partial(
        unadmitted,
        lambda: None if pods.reflector.problem else pods.pods(),
        lambda: {endpoint.plugin.resource for endpoint in endpoints},
        holdings.refresh,
    )


# Builds the switching of modes: the request, the resources, the switcher, and the writers of its outcome.

# How long an API server that does not answer is waited for before the last known request is taken up.
FIRST_REQUEST_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class ModeRequest:
    """The mode that is wanted, and the one that was before this process."""

    source: DesiredSource
    memory: LastRequest
    remembered: Desired | None  # None: no agent ran here before, or what it left cannot be read


@dataclass(frozen=True, slots=True)
class Switching:
    switcher: ModeSwitcher
    unexplained: Unexplained
    cordons: CordonBook
    resources: ResourceSet
    own: OwnNode | None  # None: there is no way to the Kubernetes API
    node: NodeParts | None  # None: the same
    upgrade: DriverUpgrade | None  # None: the same, or not wanted


async def build_request(settings: Settings) -> ModeRequest:
    """Where the wanted mode comes from; nothing is followed yet."""
    memory = LastRequest(Path(settings.host.state) / "mode")
    return ModeRequest(DesiredSource(catalog_of(settings)), memory, await memory.read())


async def build_switching(
    core: Core,
    tasks: Tasks,
    monitor: GpuMonitor,
    request: ModeRequest,
    wings: Mapping[Mode, Wing],
    assignment: Cell[Assignment],
    grown: Cell[Mapping[Place, Growth]],
    sampler: Sampler,
    lacks: Cell[str],
    claims: ClaimRequests | None = None,
) -> Switching:
    """Make the parts; `start_switching` starts their tasks."""
    settings, snapshot, readiness = core.settings, core.inventory.snapshot, core.readiness
    cluster = core.cluster
    own = cluster.node if cluster else None
    most = settings.mps.most_clients

    def endpoint_of(plugin: ResourcePlugin) -> Endpoint:
        root, folder = Path(settings.kubelet.root), settings.device_plugins_folder
        record = core.holdings
        endpoint = Endpoint(plugin, root, folder, record.allocated, lambda: record.newest)
        record.grants.append(endpoint.service.granted_lately)
        record.given.append(endpoint.service.given_lately)
        return endpoint

    resources = ResourceSet(
        {mode: wing.plugins for mode, wing in wings.items()},
        readiness.endpoints,
        endpoint_of,
        core.supervisor,
        tasks.group,
        before_first=ahead(own, snapshot, assignment, most, grown) if own else None,
    )
    core.holdings.rewrite = resources.send_again
    node = build_node(core, cluster, own, resources, assignment) if cluster and own else None
    cordons = CordonBook(Path(settings.host.state) / "cordons.json", snapshot, own)
    await cordons.restore()
    follows_upgrades = own is not None and settings.driver.release_for_upgrades
    in_force = Cell(cordons.cell.value) if follows_upgrades else cordons.cell

    lingering = _lingering(core)
    tasks.start("processes that stay", lingering.run)
    unexplained = _unexplained(core, sampler, lingering)
    tasks.start("processes of others", unexplained.run)

    switcher = ModeSwitcher(
        snapshot,
        request.source.cell,
        assignment,
        core.holdings,
        resources,
        state=readiness.switch,
        announcer=node.withdrawals if node else None,
        wings=wings,
        when_busy=settings.when_busy,
        standing=request.source.catalog.remembered(request.remembered),
        draining=request.memory.draining,
        cordons=in_force,
        lingering=lingering,
        unexplained=unexplained,
        lacks=lacks,
        claims=claims,
    )
    upgrade = None
    if own and follows_upgrades:
        upgrade = DriverUpgrade(own, monitor, snapshot, switcher.state, cordons.cell, in_force)
    return Switching(switcher, unexplained, cordons, resources, own, node, upgrade)


async def start_switching(
    parts: Switching, core: Core, tasks: Tasks, request: ModeRequest, grown: Cell[Mapping[Place, Growth]]
) -> None:
    """Follow the request, and switch once it is known, or has not come for a while."""
    settings, source = core.settings, request.source
    if settings.mode_file:
        tasks.start("mode file", source.follow_file, Path(settings.mode_file))
    elif parts.own:
        tasks.start("mode label", source.follow_node, parts.own)
    else:
        source.from_default()
    with anyio.move_on_after(FIRST_REQUEST_SECONDS):
        await source.known.wait()
    source.from_memory(request.remembered)
    if parts.upgrade:
        parts.upgrade.look()  # before the first mode is set up
        tasks.start("driver upgrades", parts.upgrade.run)
    tasks.start("mode switcher", parts.switcher.run)
    tasks.start("cordons", parts.cordons.run)
    tasks.start("mode memory", request.memory.follow, parts.switcher.accepted, parts.switcher.assignment)
    if parts.node:
        start_node(parts.node, core, tasks, parts.resources, parts.switcher.assignment, grown)


def _lingering(core: Core) -> Lingering:
    proc, snapshot, record = Path(core.settings.host.proc), core.inventory.snapshot, core.holdings

    # Without the API server who is a stranger is never known.
    strangers = partial(pods_of_strangers, proc=proc)
    departed = (
        Departed(
            lambda: tuple(snapshot.value.by_uuid),
            strangers,
            record.known_pods,
            record.take_vanished,
            record.may_be_static,
            snapshot,
        )
        if core.cluster
        else None
    )
    pids = ProcessSweep(core.nvml, core.calls).pids
    owners = Owners(proc).of
    return Lingering(record.gpus_by_pod, pids, owners, record.holders, departed, record.left_behind)


def _unexplained(core: Core, sampler: Sampler, lingering: Lingering) -> Unexplained:
    def processes() -> Mapping[str, Collection[int]]:
        return {
            uuid: [each.pid for each in taken.sample.processes]
            for uuid, taken in sampler.fresh().items()
            if taken.sample.processes is not None
        }

    settings = core.settings
    return Unexplained(
        core.holdings,
        processes,
        partial(pods_of_processes, proc=Path(settings.host.proc)),
        core.readiness.switch,
        lingering,
        strict=settings.unexplained_processes == "strict",
    )
