"""Builds the rooms of the Kubernetes API, where there is a way to it, and starts their tasks."""

from typing import TYPE_CHECKING

import anyio.to_thread

from agent.app.degradations import api_server
from agent.app.parts import Core, Tasks
from agent.cluster.reach import ClusterAccess
from agent.injection.inject import Injector, NodeSoftware
from agent.pairing.pod_access import PodSource, Recorder
from agent.settings import Settings
from agent.status.node_events import node_events

if TYPE_CHECKING:
    from agent.cluster.node import NodeObject


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
