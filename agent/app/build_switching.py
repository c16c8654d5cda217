"""Builds the switching of modes: the request, the switcher, and the writers of its outcome."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import anyio

from agent.app.parts import Core, Tasks
from agent.cluster.own_node import OwnNode
from agent.cluster.reach import ClusterAccess
from agent.holdings.holdings import HoldingsWatch
from agent.kit.cell import Cell
from agent.kubelet.endpoint import Endpoint
from agent.kubelet.podresources import PodResourcesUnavailable
from agent.model.holding import Growth, Place
from agent.model.modes import Assignment
from agent.modes.resources import ResourceSet
from agent.node import scale_down
from agent.node.annotations import ahead, follow_holders, follow_inventory
from agent.node.capacity import Capacity, KubeletMute, Offer
from agent.node.conditions import SIMULATED_LABEL, NodeStateWriter, Writers, labels_of, strategy_of
from agent.node.driver_upgrade import Inherited
from agent.node.taint import SchedulingTaint
from agent.node.withdrawal import Withdrawals

if TYPE_CHECKING:
    from agent.cluster.pods import PodCache


from collections.abc import Collection
from pathlib import Path

from agent.holdings.record import Owners, pods_of_processes, pods_of_strangers
from agent.inventory.gpu_monitor import GpuMonitor
from agent.kubelet.wire import ResourcePlugin
from agent.model.modes import Mode
from agent.modes.cordons import CordonBook
from agent.modes.desired import ClaimRequests, Desired, DesiredSource, LastRequest, catalog_of
from agent.modes.switcher import ModeSwitcher
from agent.modes.unexplained import Unexplained
from agent.modes.wing import Wing
from agent.modes.withholding import Departed, Lingering
from agent.node.driver_upgrade import DriverUpgrade
from agent.nvml.processes import ProcessSweep
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
    pods: "PodCache"

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
        _taken_in(core.holdings),
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
        _report(core, node, assignment, annotations),
        annotations,
        cluster.pods,
    )


def _report(
    core: Core, node: OwnNode, assignment: Cell[Assignment], annotations: Cell[Mapping[str, str]]
) -> NodeStateWriter:
    settings, inventory, record = core.settings, core.inventory.snapshot, core.holdings.cell
    switch = core.readiness.switch
    fixed = {SIMULATED_LABEL: "true"} if settings.simulator.profile else {}

    def labels(present: Mapping[str, str], notes: Mapping[str, str]) -> Mapping[str, str | None]:
        # At first nobody knows how GPUs are offered, and what an agent before this one wrote stands.
        if not settings.node_labels or not switch.value.gpus:
            return fixed
        strategy = strategy_of(switch.value, settings.mig.strategy)
        return {**labels_of(inventory.value, assignment.value, present, strategy, notes), **fixed}

    def changes(present: Mapping[str, str]) -> Mapping[str, str | None]:
        guarded = settings.cluster.scale_down_guard
        return scale_down.wanted(present, scale_down.holds_unseen(record.value) if guarded else False)

    return NodeStateWriter(
        node,
        switch,
        labels=labels,
        annotations=annotations,
        changes=changes,
        wake_on=(inventory, assignment, record),
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
        partial(_uids, parts.pods),
        parts.annotations,
    )


def _uids(pods: "PodCache") -> Mapping[tuple[str, str], str]:
    return {(pod.metadata.namespace, pod.metadata.name): uid for uid, pod in pods.pods().items()}


async def _keep_amounts(parts: NodeParts, resources: ResourceSet) -> None:
    async with anyio.create_task_group() as group:
        # In this order: a taint that stands already is left alone until the figures are right.
        group.start_soon(parts.inherited.run)
        group.start_soon(parts.taint.run)
        group.start_soon(parts.capacity.run)
        group.start_soon(resources.follow_lists, parts.capacity.wake)


def _taken_in(holdings: HoldingsWatch) -> Callable[[], Awaitable[Mapping[str, int] | None]]:
    """How many healthy devices the kubelet knows of each resource."""

    async def taken_in() -> Mapping[str, int] | None:
        try:
            return await holdings.client.allocatable()
        except PodResourcesUnavailable as error:
            if error.unsupported:
                return None
            raise KubeletMute from error  # the holdings watch says why

    return taken_in


def _unserved(
    pods: "PodCache", endpoints: list[Endpoint], holdings: HoldingsWatch
) -> Callable[[], Awaitable[frozenset[str]]]:
    from agent.node.unadmitted_pods import unadmitted  # noqa: PLC0415  loads the API client's room

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
    own = _own_node(cluster) if cluster else None
    most = settings.mps.most_clients

    def endpoint_of(plugin: ResourcePlugin) -> Endpoint:
        root = Path(settings.kubelet.root)
        record = core.holdings
        return Endpoint(plugin, root, settings.device_plugins_folder, record.allocated, lambda: record.began)

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

    def gpus() -> Collection[str]:
        return tuple(snapshot.value.by_uuid)

    # Without the API server who is a stranger is never known.
    strangers = partial(pods_of_strangers, proc=proc)
    departed = Departed(gpus, strangers, record.known_pods, record.take_vanished) if core.cluster else None
    pids = ProcessSweep(core.nvml, core.calls).pids
    return Lingering(record.gpus_by_pod, pids, Owners(proc).of, record.holders, departed)


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


def _own_node(cluster: ClusterAccess) -> OwnNode:
    from agent.node.object import ClusterNode  # noqa: PLC0415  loads the API client's room

    return ClusterNode(cluster.node, cluster.events)
