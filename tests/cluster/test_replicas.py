"""Replicas of a Deployment on nodes that exist as objects only: what the real kube-scheduler does."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.model.placement import HINT
from agent.model.pod import CORES
from tests.cluster import extender_process, made_up
from tests.cluster.api import Object
from tests.cluster.build import Parts
from tests.cluster.made_up import GPUS
from tests.cluster.rig import Cluster
from tests.cluster.waiting import NotYet, eventually

NODES = 3
SIZE = 25
Place = tuple[str, str]  # node, and index of a GPU


@pytest.fixture(scope="module")
def directed(parts: Parts, port: int) -> Iterator[Cluster]:
    """A cluster with made-up nodes beside its own, and the shipped weight of the extender's scores."""
    with extender_process.directed(parts, port) as running:
        for number in range(NODES):
            made_up.node(running, f"made-up-{number}")
        yield running


def test_replicas_spread_over_gpus(directed: Cluster, port: int, tmp_path: Path) -> None:
    """First over nodes, then over GPUs, then beside each other; pods without an owner go on packing."""
    with extender_process.serving(directed, port, tmp_path / "extender.log"):
        for number in range(1, NODES * GPUS + 1):
            found = deployed(directed, number)
            assert len(set(found)) == number
            assert len({node for node, _ in found}) == min(number, NODES)
        # All at once, on GPUs that have room for four each.
        found = deployed(directed, 2 * NODES * GPUS)
        assert max(Counter(found).values()) < CORES // SIZE
        directed.delete("Deployment", "web", grace_seconds=0, api_version="apps/v1")
        bound(directed, 0)
        for number in range(2):
            made_up.pod(directed, f"alone-{number}", SIZE)
            found = bound(directed, number + 1)
        assert len(set(found)) == 1


def deployed(cluster: Cluster, replicas: int) -> list[Place]:
    """Scale the Deployment; the place of each replica."""
    labels = {"app": "web"}
    template = {"metadata": {"labels": labels}, "spec": made_up.pod_spec(SIZE)}
    metadata = {"name": "web", "namespace": "default"}
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    cluster.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})
    return bound(cluster, replicas)


def bound(cluster: Cluster, count: int) -> list[Place]:
    """Wait until so many pods have a node, and no others are there."""

    def found() -> list[Place]:
        pods = cluster.find_all("Pod")
        places = [place(pod) for pod in pods if pod["spec"].get("nodeName")]
        if not len(places) == len(pods) == count:
            raise NotYet(f"{len(places)} of {len(pods)}")
        return places

    return eventually(found, timeout=60, what=f"{count} pods have nodes", interval=0.1)


def place(pod: Object) -> Place:
    return pod["spec"]["nodeName"], pod["metadata"]["annotations"][f"{HINT}0"]
