"""Builds the way to the Kubernetes API, where there is one."""

from dataclasses import dataclass
from pathlib import Path

import structlog

from agent.cluster.api import KubeApi, connect
from agent.cluster.event_recorder import EventRecorder
from agent.cluster.lean import NoClusterAccess
from agent.cluster.node import OwnNode
from agent.cluster.pods import PodCache
from agent.kit.tasks import FatalError
from agent.settings import Settings

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    api: KubeApi
    node: OwnNode
    pods: PodCache

    @property
    def events(self) -> EventRecorder:
        return self.node.events

    @property
    def problem(self) -> str | None:
        """Why the API server cannot be followed; None: it can."""
        reflectors = (self.node.reflector, self.pods.reflector)
        return next((each.problem for each in reflectors if each.problem), None)

    def remarks(self) -> list[str]:
        """An API server that cannot be read."""
        if self.problem is None:
            return []
        text = (
            f"the API server cannot be followed: {self.problem}; the last mode asked for stays in force, and "
            "the scheduler hears of changes at the kubelet's next tick"
        )
        return [text]


async def reach_cluster(settings: Settings) -> ClusterAccess | None:
    """Build the clients where there is a way to the API; makes no call. Raises FatalError."""
    configured = settings.cluster
    if configured.access == "off":
        return None
    try:
        api = await connect(Path(configured.kubeconfig) if configured.kubeconfig else None)
    except NoClusterAccess as error:
        if configured.access == "required":
            raise FatalError(f"cluster.access is required, but {error}") from error
        log.info("no_cluster_access", reason=str(error))
        return None
    name = configured.own_node
    node = OwnNode(api, name)
    return ClusterAccess(api, node, PodCache(api, name, lambda: node.uid))
