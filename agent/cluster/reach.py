"""Builds the way to the Kubernetes API, where there is one."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from agent.kit.supervise import FatalError
from agent.settings import Settings

if TYPE_CHECKING:
    from agent.cluster.api import KubeApi
    from agent.cluster.event_recorder import EventRecorder
    from agent.cluster.node import NodeObject
    from agent.cluster.pods import PodCache

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    api: "KubeApi"
    node: "NodeObject"
    pods: "PodCache"
    events: "EventRecorder"


async def reach_cluster(settings: Settings) -> ClusterAccess | None:
    """Build the clients where there is a way to the API; makes no call. Raises FatalError."""
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
