"""Karpenter with its kwok provider beside the extender: nodes come for pods that need GPUs, full ones stay.

The nodes are objects that kwok keeps ready. The NodePool is the one of config/peers.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.model.node_inventory import INVENTORY, encode
from agent.model.pod import CORES, VGPU
from tests.bench import arrivals
from tests.cluster import extender_process, made_up
from tests.cluster.build import Parts
from tests.cluster.build.peers import KARPENTER, KWOK, BuiltPeer, Peer
from tests.cluster.made_up import GPUS
from tests.cluster.rig import REPOSITORY, Cluster, free_ports
from tests.cluster.waiting import NotYet, eventually
from tests.peers.program import install_kinds, running

POOL = REPOSITORY / "config" / "peers" / "karpenter.yaml"
MODE = {"nvidia-device-enable": "vgpu"}
MOST_NODES = 50
HALF = 50  # hundredths of a GPU
KEPT_SECONDS = 20.0  # several times consolidateAfter, and Karpenter's look every ten seconds
# Of a node and a pod, as kwok's own installation has them.
STAGES = (
    "node/fast/node-initialize",
    "node/heartbeat-with-lease/node-heartbeat-with-lease",
    "pod/fast/pod-ready",
    "pod/fast/pod-complete",
    "pod/fast/pod-delete",
)
Places = dict[str, str]  # node by pod


@pytest.fixture(scope="module")
def scaled(
    parts: Parts, port: int, peer: Callable[[Peer], BuiltPeer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster that Karpenter scales, with the extender."""
    folder = tmp_path_factory.mktemp("karpenter")
    karpenter, kwok = peer(KARPENTER), peer(KWOK)
    pool = POOL.read_text()
    with ExitStack() as stack:
        cluster = stack.enter_context(extender_process.directed(parts, port, queries_per_second=200))
        stack.enter_context(extender_process.serving(cluster, port, folder / "extender.log"))
        install_kinds(cluster, karpenter.manifests)
        selector = "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake"
        argv = [str(kwok.program), f"--kubeconfig={cluster.kubeconfig}", selector]
        argv += [f"--config={kwok.manifests / 'kustomize/stage' / name}.yaml" for name in STAGES]
        stack.enter_context(running(cluster, argv, folder / "kwok.log"))
        stack.enter_context(
            running(cluster, [str(karpenter.program)], folder / "karpenter.log", environment(folder))
        )
        eventually(lambda: applied(cluster, pool), timeout=60, what="the NodePool is taken", interval=0.5)
        yield cluster


def environment(folder: Path) -> dict[str, str]:
    """One type of instance: four GPUs in mode vgpu."""
    units = {VGPU.core: str(CORES * GPUS), VGPU.memory: str(arrivals.BLOCKS * GPUS)}
    place = {"karpenter.sh/capacity-type": "on-demand", "topology.kubernetes.io/zone": "zone-a"}
    requirements = [{"key": key, "operator": "In", "values": [value]} for key, value in place.items()]
    kind = {
        "name": "gpu-4",
        "offerings": [{"Price": 1.0, "Available": True, "Requirements": requirements}],
        "architecture": "amd64",
        "operatingSystems": ["linux"],
        "resources": {"cpu": "64", "memory": "512Gi", "pods": "110", **units},
    }
    file = folder / "instance-types.json"
    file.write_text(json.dumps([kind]))
    metrics, health = free_ports(2)
    return {
        "INSTANCE_TYPES_FILE_PATH": str(file),
        "DISABLE_LEADER_ELECTION": "true",
        "METRICS_PORT": str(metrics),
        "HEALTH_PROBE_PORT": str(health),
    }


def applied(cluster: Cluster, pool: str) -> None:
    wanted = yaml.safe_load(pool)
    # An agent publishes the GPUs of its node; here the node brings that along.
    wanted["spec"]["template"]["metadata"]["annotations"] = {INVENTORY: encode(arrivals.inventory(GPUS))}
    wanted["spec"]["disruption"]["budgets"] = [{"nodes": "100%"}]  # not a tenth of the nodes at a time
    node_class = {"apiVersion": "karpenter.kwok.sh/v1alpha1", "kind": "KWOKNodeClass"}
    try:
        cluster.apply({**node_class, "metadata": {"name": "default"}})
        cluster.apply(wanted)
    except Exception as error:  # the kinds are not served yet
        raise NotYet(str(error)) from error


def gpu_nodes(cluster: Cluster) -> set[str]:
    return {
        node["metadata"]["name"]
        for node in cluster.find_all("Node")
        if MODE.items() <= node["metadata"]["labels"].items()
    }


def pods(cluster: Cluster, prefix: str, count: int, size: int) -> None:
    for number in range(count):
        made_up.pod(cluster, f"{prefix}-{number}", size, nodeSelector=MODE)


def placed(cluster: Cluster, count: int, timeout: float) -> Places:
    """Wait until so many pods have nodes, and no other pods are there."""

    def found() -> Places:
        there = cluster.find_all("Pod")
        places: dict[str, Any] = {pod["metadata"]["name"]: pod["spec"].get("nodeName") for pod in there}
        if len(places) != count or not all(places.values()):
            raise NotYet(f"{sum(map(bool, places.values()))} of {len(places)}, {count} wanted")
        return places

    return eventually(found, timeout=timeout, what=f"{count} pods have nodes", interval=0.5)


def nodes_left(cluster: Cluster, expected: set[str], timeout: float) -> None:
    def gone() -> None:
        if (found := gpu_nodes(cluster)) != expected:
            raise NotYet(f"{len(found)} nodes")

    eventually(gone, timeout=timeout, what=f"{len(expected)} nodes are left", interval=0.5)


@pytest.mark.timeout(600, func_only=True)
def test_karpenter_adds_and_keeps_nodes(scaled: Cluster) -> None:
    assert gpu_nodes(scaled) == set()
    # Eight halves are one node full of them.
    pods(scaled, "half", 2 * GPUS, HALF)
    halves = placed(scaled, 2 * GPUS, timeout=120)
    (full,) = set(halves.values())
    # As many nodes more as pods take a node each.
    pods(scaled, "whole", MOST_NODES - 1, CORES * GPUS)
    everything = placed(scaled, MOST_NODES - 1 + 2 * GPUS, timeout=240)
    assert len(set(everything.values())) == MOST_NODES
    # A node that pods fill by parts of GPUs is no emptier than others: all stay, and so do their pods.
    time.sleep(KEPT_SECONDS)
    assert gpu_nodes(scaled) == set(everything.values())
    assert placed(scaled, len(everything), timeout=10) == everything
    # What is empty goes; what is full of parts stays.
    for number in range(MOST_NODES - 1):
        scaled.delete("Pod", f"whole-{number}", grace_seconds=0)
    nodes_left(scaled, {full}, timeout=240)
    assert placed(scaled, 2 * GPUS, timeout=10) == halves
