"""A node by its Node object: versions, and the resources on offer there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agent.cluster.api import ApiError, connect
from agent.cluster.lean import NoClusterAccess
from agent.cluster.node import ApiNode, read_node
from agent.injection.inject import NodeSoftware
from agent.model.modes import OFFERED_MODES
from agent.node.conditions import MODE_LABEL
from agent.settings import ClusterSettings

OFF = (None, "none")  # the label of the mode in force while the agent offers nothing


@dataclass(frozen=True, slots=True)
class CheckedNode:
    software: NodeSoftware
    labels: Mapping[str, str] = field(default_factory=dict)
    offered: tuple[str, ...] = ()  # resources by which GPUs can be asked for there

    @property
    def offered_by_others(self) -> tuple[str, ...]:
        """Resources that are on offer while no agent of ours offers any."""
        return self.offered if self.labels.get(MODE_LABEL) in OFF else ()


class NodeNotRead(Exception):
    """The Node object cannot be read; the text says why."""


async def node_facts(cluster: ClusterSettings) -> CheckedNode:
    """Ask the API server. Raises NodeNotRead."""
    if cluster.access == "off":
        raise NodeNotRead("cluster.access is off")
    name = cluster.own_node
    try:
        async with await connect(Path(cluster.kubeconfig) if cluster.kubeconfig else None) as api:
            node = await read_node(api, name)
    except (NoClusterAccess, ApiError) as error:
        raise NodeNotRead(str(error)) from error
    if node is None:
        raise NodeNotRead(f"there is no node {name}; cluster.nodeName names another one")
    return facts_of(node)


def facts_of(node: ApiNode) -> CheckedNode:
    """The facts of a Node object that was read."""
    info = node.status.node_info
    ours = {resource for mode in OFFERED_MODES for resource in mode.resources}
    # Not capacity: the kubelet keeps that for minutes when an agent has gone.
    amounts = node.status.allocatable
    offered = sorted(name for name in ours & set(amounts) if amounts[name] != "0")
    software = NodeSoftware(info.kubelet_version, info.container_runtime_version)
    return CheckedNode(software, node.metadata.labels, tuple(offered))
