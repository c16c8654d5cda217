"""Kueue counts claims (DRA) against quotas, by the classes that the chart makes.

The node exists as an object only, with slices as the agent publishes them; nothing runs on it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.chart import helm
from tests.cluster import made_up
from tests.cluster.api import ApiError
from tests.cluster.build import Parts
from tests.cluster.build.peers import KUEUE, BuiltPeer, Peer
from tests.cluster.claims_node import DRIVER, claim_of, template
from tests.cluster.real_rig import RESOURCES
from tests.cluster.rig import Cluster
from tests.cluster.waiting import NotYet, eventually
from tests.peers.program import documents
from tests.peers.test_kueue import API, QUEUE, applied, started, wait_bound, webhooks

NODE, TEAM = "claimed", "team"
SHARES, GPUS = f"{DRIVER}/shares", f"{DRIVER}/gpus"
CONFIGURATION = {
    "apiVersion": "config.kueue.x-k8s.io/v1beta2",
    "kind": "Configuration",
    "resources": {
        "excludeResourcePrefixes": ["cpu", "memory", "ephemeral-storage"],
        "deviceClassMappings": [
            {"name": SHARES, "deviceClassNames": ["gpu-mps"]},
            {"name": GPUS, "deviceClassNames": ["gpu-whole"]},
        ],
    },
}


@pytest.fixture(scope="module")
def cluster(parts: Parts) -> Iterator[Cluster]:
    """A cluster with a made-up node of two GPUs, which claims may have."""
    with Cluster(parts) as running:
        made_up.node(running, NODE)
        classes = helm.template(settings=["dra.enabled=true", "mps.enabled=true"])
        for each in (*[one for one in classes if one["kind"] == "DeviceClass"], *_slices()):
            running.apply(each)
        yield running


def _slices() -> Iterator[dict[str, Any]]:
    def one(name: str, **content: object) -> dict[str, Any]:
        pool = {"name": f"{DRIVER}/{NODE}", "generation": 1, "resourceSliceCount": 2}
        spec = {"driver": DRIVER, "nodeName": NODE, "pool": pool, **content}
        return {"apiVersion": RESOURCES, "kind": "ResourceSlice", "metadata": {"name": name}, "spec": spec}

    def device(gpu: str, mode: str, **content: object) -> dict[str, Any]:
        consumes = [{"counterSet": "gpus", "counters": {gpu: {"value": "1"}}}]
        attributes = {"mode": {"string": mode}}
        return {"name": f"{gpu}-{mode}", "attributes": attributes, "consumesCounters": consumes, **content}

    gpus = ("gpu-0", "gpu-1")
    cores = {"value": "100", "requestPolicy": {"default": "100", "validRange": {"min": "1", "step": "1"}}}
    memory = {
        "value": "40Gi",
        "requestPolicy": {"default": "40Gi", "validRange": {"min": "1Gi", "step": "1Gi"}},
    }
    shared = {"allowMultipleAllocations": True, "capacity": {"cores": cores, "memory": memory}}
    counters = {gpu: {"value": "1"} for gpu in gpus}
    yield one("counters", sharedCounters=[{"name": "gpus", "counters": counters}])
    devices = [device(gpu, "mps", **shared) for gpu in gpus] + [device(gpu, "whole") for gpu in gpus]
    yield one("devices", devices=devices)


def _objects() -> list[dict[str, Any]]:
    quotas = [{"name": SHARES, "nominalQuota": 2}, {"name": GPUS, "nominalQuota": 1}]
    group = {"coveredResources": [SHARES, GPUS], "flavors": [{"name": "gpus", "resources": quotas}]}
    specs: dict[str, Any] = {
        "ResourceFlavor": {},
        "ClusterQueue": {"namespaceSelector": {}, "resourceGroups": [group]},
        "LocalQueue": {"clusterQueue": "gpus"},
    }
    made = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": TEAM}}]
    for kind, spec in specs.items():
        metadata = {"name": "gpus"} | ({"namespace": TEAM} if kind == "LocalQueue" else {})
        made.append({"apiVersion": API, "kind": kind, "metadata": metadata, "spec": spec})
    for name, spec in (("share", claim_of("mps", 10, 4)), ("whole", claim_of("whole"))):
        item = template(name, spec)
        item["metadata"]["namespace"] = TEAM
        made.append(item)
    return made


def _job(cluster: Cluster, name: str, pods: int, kind: str) -> None:
    claims = [{"name": "gpu", "resourceClaimTemplateName": kind}]
    spec = made_up.claiming_spec(claims) | {"restartPolicy": "Never"}
    metadata = {"name": name, "namespace": TEAM, "labels": {QUEUE: "gpus"}}
    body = {"parallelism": pods, "completions": pods, "template": {"spec": spec}}
    cluster.api.request(
        "POST", f"/apis/batch/v1/namespaces/{TEAM}/jobs", {"metadata": metadata, "spec": body}
    )


@pytest.mark.timeout(400, func_only=True)
def test_dra_quota_by_kueue(cluster: Cluster, peer: Callable[[Peer], BuiltPeer], tmp_path: Path) -> None:
    """Two shares and one whole GPU are the team's quota; the node has room for more."""
    made = peer(KUEUE)
    for each in documents(made.manifests / "config/components/crd/bases"):
        cluster.apply(each)
    # Kueue ends where the API server does not serve its kinds yet.
    eventually(partial(_served, cluster), timeout=60, what="the API server serves Kueue's kinds")
    with started(cluster, made.program, CONFIGURATION, tmp_path) as webhook:
        for each in webhooks(cluster, documents(made.manifests / "config/components/webhook"), webhook):
            cluster.apply(each)
        objects = _objects()
        eventually(
            partial(applied, cluster, objects), timeout=90, what="Kueue takes its objects", interval=0.5
        )
        _job(cluster, "pair", 2, "share")
        _job(cluster, "first", 1, "whole")
        wait_bound(cluster, {TEAM: {"pair": 2, "first": 1}})
        _job(cluster, "more", 1, "share")
        _job(cluster, "second", 1, "whole")
        for name in ("more", "second"):
            eventually(partial(_held_back, cluster, name), timeout=60, what=f"{name} waits for its quota")
        wait_bound(cluster, {TEAM: {"pair": 2, "first": 1}})
        path = f"/apis/batch/v1/namespaces/{TEAM}/jobs/pair"
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        cluster.api.request("DELETE", path, options)
        wait_bound(cluster, {TEAM: {"first": 1, "more": 1}})


def _served(cluster: Cluster) -> None:
    try:
        for kind in ("workloads", "clusterqueues", "localqueues", "resourceflavors", "cohorts", "topologies"):
            cluster.api.get(f"/apis/{API}/{kind}")
    except ApiError as error:
        raise NotYet(str(error)) from error


def _held_back(cluster: Cluster, name: str) -> None:
    """Raises NotYet until Kueue has said that a Job is above the quota."""
    workloads = cluster.find_all("Workload", namespace=TEAM, api_version=API)
    mine = [one for one in workloads if one["metadata"]["name"].startswith(f"job-{name}-")]
    said = [
        each["message"]
        for one in mine
        for each in one.get("status", {}).get("conditions", ())
        if each["type"] == "QuotaReserved" and each["status"] == "False"
    ]
    if not any("insufficient" in each for each in said):
        raise NotYet(str(said))
