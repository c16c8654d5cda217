"""Nodes that exist as objects only: no kubelet runs their pods, but they are scheduled as if one did."""

import time
from typing import Any

from agent.model.modes import ResourcePair
from agent.model.node_inventory import INVENTORY, encode
from agent.model.placement import ASSIGNED, HINT
from agent.model.pod import CORES, VGPU
from tests.bench import arrivals
from tests.cluster.rig import Cluster
from tests.pace import scaled

GPUS = 4  # of each node
QUIET_SECONDS = 6.0  # nothing was bound for so long: nothing more will be


def node(cluster: Cluster, name: str) -> None:
    """A ready node whose agent has published its GPUs."""
    units = {VGPU.core: str(CORES * GPUS), VGPU.memory: str(arrivals.BLOCKS * GPUS)}
    bare_node(cluster, name, {INVENTORY: encode(arrivals.inventory(GPUS))}, units)


def bare_node(
    cluster: Cluster,
    name: str,
    annotations: dict[str, str] | None = None,
    units: dict[str, str] | None = None,
) -> None:
    """A ready node with these annotations and extended resources."""
    metadata = {"name": name, "labels": {"made-up": "true"}, "annotations": annotations or {}}
    cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": metadata})
    amounts = {"cpu": "64", "memory": "512Gi", "pods": "200", **(units or {})}
    ready = {"type": "Ready", "status": "True", "reason": "Made", "message": "up"}
    cluster.api.request(
        "PATCH",
        f"/api/v1/nodes/{name}/status",
        {"status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}},
        content_type="application/strategic-merge-patch+json",
    )


def pod(
    cluster: Cluster,
    name: str,
    size: int,
    annotations: dict[str, str] | None = None,
    pair: ResourcePair = VGPU,
    **spec: Any,
) -> None:
    """A pod for these nodes; `spec`: more of its spec."""
    metadata = {"name": name, "namespace": "default", "annotations": annotations or {}}
    made = {**pod_spec(size, pair), **spec}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": made})


def pod_spec(size: int, pair: ResourcePair = VGPU) -> dict[str, Any]:
    """The spec of a pod that asks for hundredths of GPUs and as much memory."""
    limits = {pair.core: str(size)}
    if size < CORES:
        limits[pair.memory] = str(size * arrivals.BLOCKS // CORES) if pair is VGPU else "5"
    return {
        "containers": [{"name": "main", "image": "none", "resources": {"limits": limits}}],
        "nodeSelector": {"made-up": "true"},
        "tolerations": [{"operator": "Exists"}],  # no kubelet keeps these nodes ready
        "terminationGracePeriodSeconds": 0,  # nor ends their pods
    }


def claiming_pod(cluster: Cluster, name: str, claims: list[dict[str, str]]) -> None:
    """A pod for these nodes that asks for claims (DRA)."""
    metadata = {"name": name, "namespace": "default"}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": claiming_spec(claims)})


def claiming_spec(claims: list[dict[str, str]]) -> dict[str, Any]:
    """The spec of such a pod."""
    used = [{"name": each["name"]} for each in claims]
    return {
        "containers": [{"name": "main", "image": "none", "resources": {"claims": used}}],
        "resourceClaims": claims,
        "nodeSelector": {"made-up": "true"},
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": 0,
    }


def holder(cluster: Cluster, name: str, size: int, node: str, gpu: int, **spec: Any) -> None:
    """A pod that holds a part of one GPU already."""
    chosen = {f"{HINT}0": str(gpu), ASSIGNED: "true"}
    pod(cluster, name, size, chosen, nodeName=node, **spec)


def bound(cluster: Cluster) -> list[dict[str, Any]]:
    """Pods that have a node."""
    return [pod for pod in cluster.find_all("Pod") if pod["spec"].get("nodeName")]


def settled(cluster: Cluster) -> list[dict[str, Any]]:
    """The bound pods, once nothing more is bound."""
    known, since = -1, time.monotonic()
    deadline = since + scaled(120)
    while time.monotonic() < deadline:
        found = bound(cluster)
        if len(found) != known:
            known, since = len(found), time.monotonic()
        elif time.monotonic() - since > scaled(QUIET_SECONDS):
            return found
        time.sleep(0.5)
    raise AssertionError("pods are bound for minutes without an end")
