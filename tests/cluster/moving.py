"""A node that moves between another agent and ours, by the commands of docs/migration.md."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster import manifests, nvidia_plugin
from tests.cluster.documented import commands
from tests.cluster.installation import NAMESPACE, Installation
from tests.cluster.rig import Cluster
from tests.cluster.waiting import NotYet, eventually
from tests.component.kubelet.peer import GPU, pod_resources

MIGRATION = Path("docs/migration.md")
# What the documents call it, and what it is called here.
OUR_NAMESPACE = "gpu-node-agent"
LABELS = ("gpu-agent", "nvidia.com/gpu.deploy.device-plugin", "nvidia.com/gpu.present")


def follow(installation: Installation, document: Path, heading: str) -> None:
    """Run the commands below a heading, each to its end."""
    cluster = installation.cluster
    for program, *words in commands(document, heading):
        assert program == "kubectl", f"{document}, {heading}: {program} is not played"
        named = [word.replace("NODE", cluster.node) for word in words]
        after = [
            NAMESPACE if before == "-n" and word == OUR_NAMESPACE else word for before, word in pairs(named)
        ]
        cluster.kubectl(*after, timeout=130)


def pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each word with the one before it."""
    return zip(("", *words), words, strict=False)


@contextmanager
def with_nvidia_plugin(installation: Installation) -> Iterator[None]:
    """NVIDIA's plugin offers the node's GPUs; afterwards it and its labels are gone."""
    cluster = installation.cluster
    path = cluster.api.path("v1", "Node", None, cluster.node)
    cluster.api.merge_patch(path, {"metadata": {"labels": {"nvidia.com/gpu.present": "true"}}})  # by GFD
    uuids = installation.node.machine.uuids
    try:
        cluster.apply(nvidia_plugin.daemon_set(Path("/var/lib/kubelet"), uuids))
        cluster.wait_allocatable(GPU, len(uuids), timeout=40)
        yield
    finally:
        cluster.delete(
            "DaemonSet", nvidia_plugin.NAME, namespace=nvidia_plugin.NAMESPACE, api_version="apps/v1"
        )
        labels = dict.fromkeys((*LABELS, "gpu-node-agent.io/mode"))
        patch = {"metadata": {"labels": labels}, "spec": {"unschedulable": None}}
        cluster.api.merge_patch(path, patch)
        cluster.wait_allocatable(GPU, 0, timeout=40)


def hold(cluster: Cluster, name: str, gpus: int) -> None:
    """A pod that holds whole GPUs, running."""
    cluster.apply(manifests.pod(name, manifests.container("main", limits={GPU: gpus})))
    cluster.wait_pod(name)


def held(cluster: Cluster) -> dict[str, frozenset[str]]:
    """The GPUs of each pod, as the kubelet has them; none is held twice."""
    with pod_resources(cluster.podresources_socket) as lister:
        found = {
            pod: frozenset(id_ for resource, id_ in entries if resource == GPU)
            for (pod, _), entries in lister.held().items()
            if entries
        }
    everything = [id_ for ids in found.values() for id_ in ids]
    assert len(everything) == len(set(everything)), f"a GPU is held twice: {found}"
    return found


def plugin_pods(cluster: Cluster) -> int:
    """How many pods NVIDIA's plugin has on the node."""
    selector = f"name={nvidia_plugin.LABEL}"
    return len(cluster.find_all("Pod", namespace=nvidia_plugin.NAMESPACE, labelSelector=selector))


def in_the_wrong_order(installation: Installation) -> None:
    """Our agent registers before NVIDIA's plugin leaves.

    A kubelet before 1.37 takes the resource for gone then, until the agent registers again. Later ones keep
    the endpoints of a resource apart (`endpointStore` of the device manager) and go on with the agent's.
    """
    cluster = installation.cluster
    cluster.kubectl("label", "node", cluster.node, "nvidia-device-enable=pgpu", "gpu-agent=moved")
    installation.ready_agent()
    cluster.kubectl("label", "node", cluster.node, "nvidia.com/gpu.deploy.device-plugin=false")
    eventually(lambda: _left(cluster), timeout=60, what="NVIDIA's plugin has left")
    if tuple(map(int, cluster.parts.kubernetes_version.split(".")[:2])) < (1, 37):
        cluster.wait_allocatable(GPU, 0)
    cluster.wait_allocatable(GPU, len(installation.node.machine.uuids), timeout=40)


def _left(cluster: Cluster) -> None:
    if count := plugin_pods(cluster):
        raise NotYet(f"{count} pods of the plugin")
