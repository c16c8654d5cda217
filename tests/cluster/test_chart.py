"""The chart on clusters that differ: one without any GPU, and what `preset: auto` makes of others."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chart import helm
from tests.cluster import manifests
from tests.cluster.build import agent_image
from tests.cluster.install_fixtures import an_installation, audit, open_cluster
from tests.cluster.installation import NAMESPACE, RELEASE, Installation
from tests.cluster.rig import Cluster
from tests.cluster.waiting import NotYet, eventually

__all__ = ["audit", "open_cluster"]

GPU = "nvidia.com/gpu"
SCRAPE = """
import urllib.request
print(urllib.request.urlopen("http://127.0.0.1:9446/metrics", timeout=10).read().decode())
"""

RUNTIME_CLASS = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": "nvidia"},
    "handler": "nvidia",
}
POLICIES = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "clusterpolicies.nvidia.com"},
    "spec": {
        "group": "nvidia.com",
        "scope": "Cluster",
        "names": {"kind": "ClusterPolicy", "plural": "clusterpolicies", "singular": "clusterpolicy"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
                },
            }
        ],
    },
}


class Simulated(Installation):
    """As the README's command installs it; nothing of the node's own is used."""

    def values(self) -> dict[str, Any]:
        repository, _, tag = agent_image.IMAGE.rpartition(":")
        return {
            "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
            "hostNetwork": True,
            "simulator": {"enabled": True, "profile": "dgx-h200"},
        }


@pytest.fixture
def simulated(open_cluster: Cluster) -> Iterator[Installation]:
    with an_installation(open_cluster, Simulated) as made:
        yield made


def _offered(cluster: Cluster, count: int) -> dict[str, Any]:
    def offered() -> dict[str, Any]:
        node = cluster.get("Node", cluster.node)
        if node["status"]["allocatable"].get(GPU) != str(count):
            raise NotYet(json.dumps(node["status"]["allocatable"]))
        return node

    return eventually(offered, timeout=60, what=f"{count} GPUs are allocatable", interval=0.2)


def test_simulated_node_by_chart(simulated: Installation) -> None:
    cluster = simulated.cluster
    simulated.install()
    pod = simulated.ready_agent()["metadata"]["name"]
    assert _offered(cluster, 8)["metadata"]["labels"]["gpu-node-agent.io/simulated"] == "true"

    def switched() -> None:  # the label follows what the kubelet offers
        mode = cluster.get("Node", cluster.node)["metadata"]["labels"]["gpu-node-agent.io/mode"]
        if mode != "pgpu":
            raise NotYet(mode)

    eventually(switched, timeout=30, what="the node is in mode pgpu", interval=0.2)

    cluster.apply(manifests.pod("tries", manifests.container("main", limits={GPU: 3})))
    cluster.wait_pod("tries")
    seen = cluster.exec("tries", "main", ["sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES"]).strip().split(",")
    assert len(seen) == 3

    def ask(*words: str) -> str:
        return cluster.exec(pod, "agent", ["gpu-node-agent", *words], namespace=NAMESPACE)

    said = ask("status", "-o", "wide")
    assert "the GPUs are simulated" in said
    assert all(uuid in said for uuid in seen)
    assert "done" in ask("fault", "xid", "79", "--gpu", "0")
    _offered(cluster, 7)
    page = subprocess.run(
        cluster.reaching_api([sys.executable, "-c", SCRAPE]),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    series = [line for line in page.splitlines() if line and not line.startswith("#")]
    assert all('{simulated="true"' in line for line in series)
    assert any("gpu_agent_gpu_xids_total" in line and 'xid="79"' in line for line in series)

    simulated.helm("uninstall", RELEASE, "--wait", "--timeout=100s")
    labels = cluster.get("Node", cluster.node)["metadata"]["labels"]
    assert "gpu-node-agent.io/simulated" not in labels


def _policy(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "nvidia.com/v1",
        "kind": "ClusterPolicy",
        "metadata": {"name": "cluster-policy"},
        "spec": spec,
    }


@pytest.fixture
def bare(open_cluster: Cluster) -> Iterator[Installation]:
    with an_installation(open_cluster) as made:
        yield made


def _said(bare: Installation) -> str:
    arguments = ["--create-namespace", "--set", "image.repository=example.com/agent", "--dry-run=server"]
    return bare.helm("install", RELEASE, str(helm.CHART), *arguments)


def test_auto_follows_the_cluster(bare: Installation) -> None:
    cluster = bare.cluster
    made = []

    def apply(document: dict[str, Any]) -> None:
        made.append(document)
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(document))

    try:
        assert "Preset toolkit: " in _said(bare)
        apply(RUNTIME_CLASS)
        said = _said(bare)
        assert "Preset runtimeclass: " in said
        assert "RuntimeClass nvidia is there" in said
        apply(POLICIES)
        cluster.kubectl(
            "wait", "--for=condition=Established", "--timeout=20s", "crd/clusterpolicies.nvidia.com"
        )
        assert "Preset runtimeclass: " in _said(bare)  # the operator's kind alone is no operator
        apply(_policy())
        said = _said(bare)
        assert "Preset operator: " in said
        assert "runtimeClassName: nvidia" in said
        assert 'path: "/run/nvidia/driver"' in said
        apply(_policy(driver={"enabled": False}, cdi={"nriPluginEnabled": True}))
        said = _said(bare)
        assert "with its NRI plugin" in said
        assert "runtimeClassName: nvidia" not in said
        assert "privileged: true" in said
    finally:
        for document in reversed(made):
            where = (str(document["kind"]), str(document["metadata"]["name"]))
            cluster.kubectl("delete", *where, "--ignore-not-found", "--timeout=30s")
