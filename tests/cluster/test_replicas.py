"""Replicas of a Deployment on nodes that exist as objects only: what the real kube-scheduler does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.model.placement import HINT
from tests.cluster import extender_process, made_up
from tests.cluster.api import Object
from tests.cluster.build import Parts
from tests.cluster.made_up import GPUS
from tests.cluster.rig import Cluster
from tests.cluster.waiting import NotYet, eventually

NODES = 3
SIZE = 25


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
        deploy(directed, NODES)
        first = places(directed)
        assert len({node for node, _ in first}) == len(first) == NODES
        deploy(directed, NODES * GPUS)
        assert len(set(places(directed))) == NODES * GPUS
        deploy(directed, NODES * GPUS + 2)
        assert len(places(directed)) == NODES * GPUS + 2, "there is room beside others"
        directed.delete("Deployment", "web", grace_seconds=0)
        eventually(lambda: none_left(directed), timeout=60, what="the replicas are gone")
        for number in range(2):
            made_up.pod(directed, f"alone-{number}", SIZE)
        alone = [pod for pod in made_up.settled(directed) if pod["metadata"]["name"].startswith("alone-")]
        assert len({place(pod) for pod in alone}) == 1


def deploy(cluster: Cluster, replicas: int) -> None:
    labels = {"app": "web"}
    template = {"metadata": {"labels": labels}, "spec": made_up.pod_spec(SIZE)}
    metadata = {"name": "web", "namespace": "default"}
    deployment = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    cluster.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": deployment})


def none_left(cluster: Cluster) -> None:
    if left := cluster.find_all("Pod"):
        raise NotYet(f"{len(left)} pods")


def places(cluster: Cluster) -> list[tuple[str, str]]:
    """Node and GPU of each replica, once nothing more is bound."""
    return [place(pod) for pod in made_up.settled(cluster)]


def place(pod: Object) -> tuple[str, str]:
    return pod["spec"]["nodeName"], pod["metadata"]["annotations"][f"{HINT}0"]
