"""A node as it was before any agent ran on it."""

from collections.abc import Iterable

from agent.model.node_inventory import INVENTORY
from agent.modes import withholding
from agent.node.annotations import HOLDERS
from agent.node.conditions import MODE_LABEL, STATE_ANNOTATION
from tests.cluster.rig_node import RigNode


def forget_resources(cluster: RigNode, labels: Iterable[str]) -> None:
    """Take from kubelet and Node object all that they know of devices, and `labels` of a test. Blocks."""
    cluster.stop("kubelet")
    for path in cluster.cdi_dir.iterdir():
        path.unlink()
    for path in (cluster.kubelet_root / "device-plugins").glob("*checkpoint"):
        path.unlink()
    for path in (cluster.kubelet_root / "plugins_registry").glob("*.sock"):
        path.unlink()  # a killed agent leaves it, and the kubelet keeps dialling
    node = cluster.api.path("v1", "Node", None, cluster.node)
    status = cluster.api.get(node)["status"]
    foreign = {name: None for name in status["capacity"] if "/" in name}
    cluster.api.merge_patch(f"{node}/status", {"status": {"capacity": foreign, "allocatable": foreign}})
    # A cordon is what a test leaves that fails between.
    annotations = dict.fromkeys((STATE_ANNOTATION, INVENTORY, HOLDERS, withholding.ANNOTATION))
    # The taint is what an agent leaves that is killed in mid-switch.
    metadata = {"labels": dict.fromkeys((*labels, MODE_LABEL)), "annotations": annotations}
    cluster.api.merge_patch(node, {"metadata": metadata, "spec": {"taints": None}})
    cluster.start("kubelet")
