"""Starts the tasks of the Kubernetes API, where there is a way to it."""

from typing import TYPE_CHECKING

from agent.app.parts import Tasks
from agent.cluster.reach import ClusterAccess
from agent.holdings.holdings import HoldingsWatch
from agent.injection.inject import Injector, NodeSoftware
from agent.pairing.pod_access import PodSource, Recorder
from agent.settings import Settings

if TYPE_CHECKING:
    from agent.cluster.node import NodeObject


def follow_cluster(
    cluster: ClusterAccess | None, settings: Settings, holdings: HoldingsWatch, tasks: Tasks
) -> tuple[PodSource, Recorder]:
    """Watch the node and its pods, send events; the record of who holds what learns of the pods.

    Answers the pods, and reports to their owners; without an API server nothing is behind them.
    """
    if cluster is None:
        return PodSource(), Recorder()
    from agent.node import refused_pods  # noqa: PLC0415  loads the client
    from agent.pairing.cluster_pods import ClusterPods, ClusterRecorder  # noqa: PLC0415  as above

    pods = ClusterPods(cluster.pods)
    pods.inform(holdings)
    recorder = ClusterRecorder(cluster.api, cluster.events, settings.vgpu.write_choice)
    tasks.start("node watch", cluster.node.reflector.run)
    tasks.start("pod watch", cluster.pods.reflector.run)
    tasks.start("events", cluster.events.run)
    tasks.start("refused pods", refused_pods.follow, cluster.pods.reflector.items, cluster.events)
    tasks.start("choices", recorder.run)
    return pods, recorder


async def follow_node_software(node: "NodeObject", injector: Injector) -> None:
    """Pass the versions of kubelet and runtime to the injector whenever the Node object shows new ones."""
    async for _ in node.reflector.items.values():
        if node.value:
            info = node.value.status.node_info
            software = NodeSoftware(info.kubelet_version, info.container_runtime_version)
            if software != injector.software:
                await injector.update(software)
