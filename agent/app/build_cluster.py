"""Builds the rooms of the Kubernetes API, where there is a way to it, and starts their tasks."""

from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread
import structlog

from agent.app.degradations import api_server
from agent.app.parts import ClusterAccess, Core, Tasks
from agent.injection.inject import Injector, NodeSoftware
from agent.kit.supervise import FatalError
from agent.pairing.pod_access import PodSource, Recorder
from agent.settings import Settings
from agent.status.node_events import node_events

if TYPE_CHECKING:
    from agent.cluster.node import NodeObject

log = structlog.get_logger()


async def reach_cluster(settings: Settings) -> ClusterAccess | None:
    """Build the rooms of the Kubernetes API where there is a way to it; makes no call. Raises FatalError."""
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


def follow_cluster(cluster: ClusterAccess, core: Core, tasks: Tasks) -> None:
    """Watch the node and its pods, send events; the record of who holds what learns of the pods."""
    from agent.node import refused_pods  # noqa: PLC0415  loads the client
    from agent.pairing.cluster_pods import ClusterPods  # noqa: PLC0415  as above

    tasks.start("node watch", cluster.node.reflector.run)
    ClusterPods(cluster.pods).inform(core.holdings)
    tasks.start("pod watch", cluster.pods.reflector.run)
    tasks.start("events", cluster.events.run)
    tasks.start("refused pods", refused_pods.follow, cluster.pods.reflector.items, cluster.events)
    core.readiness.degradations.append(lambda: api_server(cluster))
    core.inventory.counters.listeners.append(node_events(cluster.events.node))


def build_pod_ports(
    settings: Settings, cluster: ClusterAccess | None, tasks: Tasks
) -> tuple[PodSource, Recorder]:
    """The node's pods, and reports to their owners; without an API server nothing is behind them."""
    if cluster is None:
        return PodSource(), Recorder()
    from agent.pairing.cluster_pods import ClusterPods, ClusterRecorder  # noqa: PLC0415  loads the client

    recorder = ClusterRecorder(cluster.api, cluster.events, settings.vgpu.write_choice)
    tasks.start("choices", recorder.run)
    return ClusterPods(cluster.pods), recorder


async def follow_node_software(node: "NodeObject", injector: Injector) -> None:
    """Pass the versions of kubelet and runtime to the injector whenever the Node object shows new ones."""
    async for _ in node.reflector.items.values():
        if node.value:
            info = node.value.status.node_info
            software = NodeSoftware(info.kubelet_version, info.container_runtime_version)
            if software != injector.software:
                await anyio.to_thread.run_sync(injector.look, software)
                injector.looked.publish(software)
