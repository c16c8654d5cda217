"""Builds the writers of the own Node object: capacity and taint ahead of the kubelet, and the report."""

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
from agent.model.growth import Growth, Place
from agent.model.modes import Assignment
from agent.modes.resources import ResourceSet
from agent.node import holders_annotation, inventory_annotation, scale_down
from agent.node.capacity import Capacity, KubeletMute, Offer
from agent.node.conditions import NodeStateWriter
from agent.node.inherited import Inherited
from agent.node.labels import SIMULATED_LABEL, labels_of
from agent.node.taint import SchedulingTaint
from agent.node.withdrawal import Withdrawals
from agent.node.writers import Writers

if TYPE_CHECKING:
    from agent.cluster.pods import PodCache


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
    fixed = {SIMULATED_LABEL: "true"} if settings.simulator.profile else {}

    strategy = settings.mig.strategy if settings.modes.mig else None

    def labels(present: Mapping[str, str]) -> Mapping[str, str | None]:
        if not settings.node_labels:
            return fixed
        return {**labels_of(inventory.value, assignment.value, present, strategy), **fixed}

    def changes(present: Mapping[str, str]) -> Mapping[str, str | None]:
        guarded = settings.cluster.scale_down_guard
        return scale_down.wanted(present, scale_down.holds_unseen(record.value) if guarded else False)

    return NodeStateWriter(
        node,
        core.readiness.switch,
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
        inventory_annotation.follow,
        core.inventory.snapshot,
        assignment,
        core.settings.mps.most_clients,
        parts.annotations,
        grown,
    )
    tasks.start(
        "holders note",
        holders_annotation.follow,
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
