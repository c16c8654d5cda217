"""The versions of kubelet and container runtime, as the Node object tells them."""

from pathlib import Path

import msgspec

from agent.cluster.api import ApiError, connect
from agent.cluster.lean import NoClusterAccess
from agent.cluster.node import Node
from agent.plugins.inject import NodeSoftware


class _NodeList(msgspec.Struct):
    items: list[Node]


async def node_software(kubeconfig: Path | None, name: str) -> NodeSoftware | None:
    """None where there is no way to the API server, or no such node."""
    try:
        api = await connect(kubeconfig)
    except NoClusterAccess:
        return None
    try:
        # A list of one: the agent's account may list nodes and needs no right to get them.
        data = await api.get("/api/v1/nodes", {"fieldSelector": f"metadata.name={name}"})
        items = msgspec.json.decode(data, type=_NodeList).items
    except (ApiError, msgspec.DecodeError):
        return None
    finally:
        await api.close()
    if not items:
        return None
    info = items[0].status.node_info
    return NodeSoftware(info.kubelet_version, info.container_runtime_version)
