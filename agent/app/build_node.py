"""Builds what writes the own Node object ahead of the kubelet: capacity and the scheduling taint."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import anyio

from agent.app.agent import Agent, ClusterAccess, NodeParts
from agent.cluster.own_node import OwnNode
from agent.kit.cell import Cell
from agent.kubelet.podresources import PodResourcesUnavailable
from agent.model.modes import Assignment
from agent.modes.resources import ResourceSet
from agent.node.capacity import Capacity, KubeletMute, Offer
from agent.node.inherited import Inherited
from agent.node.taint import SchedulingTaint
from agent.node.withdrawal import Withdrawals


def build_node(
    agent: Agent, cluster: ClusterAccess, node: OwnNode, resources: ResourceSet, assignment: Cell[Assignment]
) -> NodeParts:
    """Make the parts; `run_node` is their task."""
    offer = Offer(
        assignment, resources.figures, resources.delivered, _taken_in(agent), resources.register_again
    )
    taint = SchedulingTaint(node)
    capacity = Capacity(node, offer, taint)
    withdrawals = Withdrawals(node, offer, capacity, taint, _unserved(agent, cluster))
    inherited = Inherited(node, offer, capacity, taint, resources.names)
    return NodeParts(taint, capacity, withdrawals, inherited)


async def run_node(parts: NodeParts, resources: ResourceSet) -> None:
    """Keep the node's status and its taint true, for ever."""
    async with anyio.create_task_group() as group:
        # In this order: a taint that stands already is left alone until the figures are right.
        group.start_soon(parts.inherited.run)
        group.start_soon(parts.taint.run)
        group.start_soon(parts.capacity.run)
        group.start_soon(resources.follow_lists, parts.capacity.wake)


def _taken_in(agent: Agent) -> Callable[[], Awaitable[Mapping[str, int] | None]]:
    """How many healthy devices the kubelet knows of each resource."""

    async def taken_in() -> Mapping[str, int] | None:
        try:
            return await agent.holdings.client.allocatable()
        except PodResourcesUnavailable as error:
            if error.unsupported:
                return None
            raise KubeletMute from error  # the holdings watch says why

    return taken_in


def _unserved(agent: Agent, cluster: ClusterAccess) -> Callable[[], Awaitable[frozenset[str]]]:
    from agent.node.unadmitted_pods import unadmitted  # noqa: PLC0415  loads the API client's room

    pods = cluster.pods
    return partial(
        unadmitted,
        lambda: None if pods.reflector.problem else pods.pods(),
        lambda: {endpoint.plugin.resource for endpoint in agent.endpoints},
        agent.holdings.refresh,
    )
