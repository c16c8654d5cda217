"""Requests for GPUs that no node can ever grant, ones that a node may, and workloads that make them."""

from typing import Any

from tests.cluster.rig import Cluster


def limits(**more: str) -> dict[str, str]:
    names = {"vcore": "tencent.com/vcuda-core", "vmemory": "tencent.com/vcuda-memory"}
    names |= {"mcore": "nvidia.com/mps-core", "mmemory": "nvidia.com/mps-memory", "gpu": "nvidia.com/gpu"}
    return {names[key]: value for key, value in more.items()}


IMPOSSIBLE = {
    "core without memory": (limits(vcore="20"), "without tencent.com/vcuda-memory: add"),
    "150 cores": (limits(vcore="150", vmemory="8"), "must be a multiple of 100"),
    "1010 cores": (limits(vcore="1010", vmemory="8"), "must be a multiple of 100"),
    "more of MPS than a GPU": (limits(mcore="200", mmemory="4"), "a share lies on one GPU"),
    "MPS core alone": (limits(mcore="20"), "add nvidia.com/mps-memory"),
    "MPS memory alone": (limits(mmemory="2"), "add nvidia.com/mps-core"),
    "two modes": (limits(gpu="1", vcore="20", vmemory="8"), "GPUs in two modes"),
    "two kinds of shares": (limits(mcore="10", mmemory="1", vcore="20", vmemory="8"), "GPUs in two modes"),
}
POSSIBLE: tuple[dict[str, str], ...] = (
    limits(gpu="2"),
    limits(vcore="20", vmemory="8"),
    limits(vcore="200"),
    limits(vcore="1k"),
    limits(vmemory="8"),
    limits(mcore="100", mmemory="4"),
    {},
)


def workload(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    meta = {"name": name, "labels": {"app": name}}
    template = {"metadata": {"labels": {"app": name}}, "spec": spec}
    if kind == "Pod":
        return {"apiVersion": "v1", "kind": kind, "metadata": meta, "spec": spec}
    if kind == "Deployment":
        outer = {"replicas": 0, "selector": {"matchLabels": {"app": name}}, "template": template}
        return {"apiVersion": "apps/v1", "kind": kind, "metadata": meta, "spec": outer}
    if kind == "Job":
        spec = {"suspend": True, "template": template}
        return {"apiVersion": "batch/v1", "kind": kind, "metadata": meta, "spec": spec}
    spec = {"schedule": "0 0 1 1 *", "suspend": True, "jobTemplate": {"spec": {"template": template}}}
    return {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": meta, "spec": spec}


def created(cluster: Cluster, manifest: dict[str, Any]) -> None:
    """Ask the API server whether it would take the object; nothing is stored."""
    path = cluster.api.path(manifest["apiVersion"], manifest["kind"], "default")
    cluster.api.request("POST", f"{path}?dryRun=All", manifest)
