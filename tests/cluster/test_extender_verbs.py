"""Preemption, gangs and scores: what the real kube-scheduler makes of the extender's answers.

Nodes exist as objects only; which GPU each pod holds is set from the beginning.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.model.placement import HINT
from tests.cluster import extender_process, made_up
from tests.cluster.build import Parts
from tests.cluster.extender_process import Replica
from tests.cluster.made_up import GPUS
from tests.cluster.rig import Cluster
from tests.cluster.waiting import NotYet, eventually

NODES = 3
PRIORITIES = {"test-low": 1, "test-middle": 10, "test-high": 100}
RECORD = "/api/v1/namespaces/default/configmaps/gpu-node-agent-extender-gangs"
DRA = "resource.k8s.io/v1"
GROUPS = "scheduling.k8s.io/v1beta1"
IN_VAIN_SECONDS = 8.0  # several attempts of kube-scheduler, whose longest back-off here is 2 s


@pytest.fixture(scope="module")
def directed(parts: Parts, port: int) -> Iterator[Cluster]:
    """A cluster with made-up nodes beside its own, and priorities."""
    with extender_process.directed(parts, port) as running:
        for number in range(NODES):
            made_up.node(running, f"made-up-{number}")
        for name, value in PRIORITIES.items():
            kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": value}
            running.apply({**kind, "metadata": {"name": name}})
        yield running


@pytest.fixture(autouse=True)
def replica(directed: Cluster, port: int, tmp_path: Path) -> Iterator[Replica]:
    """The extender serves; pods of the test are removed afterwards."""
    with extender_process.serving(directed, port, tmp_path / "extender.log") as made:
        yield made
        for pod in directed.find_all("Pod"):
            directed.delete("Pod", pod["metadata"]["name"], grace_seconds=0)


def places(cluster: Cluster) -> dict[str, tuple[str, str]]:
    """Node and GPU of every bound pod by name."""
    return {
        pod["metadata"]["name"]: (pod["spec"]["nodeName"], pod["metadata"]["annotations"][f"{HINT}0"])
        for pod in made_up.bound(cluster)
    }


def wait_bound(cluster: Cluster, *names: str) -> None:
    """Wait until these pods have nodes."""

    def bound() -> None:
        if missing := set(names) - places(cluster).keys():
            events = [each["message"] for each in cluster.find_all("Event")][-5:]
            raise NotYet(f"{sorted(missing)}; {events}")

    eventually(bound, timeout=60, what="the pods are bound", interval=0.3)


def refused(cluster: Cluster, name: str) -> None:
    """Wait until kube-scheduler has found no node for a pod."""

    def found_none() -> None:
        for event in cluster.find_all("Event"):
            if event["involvedObject"].get("name") == name and event["reason"] == "FailedScheduling":
                return
        raise NotYet("no such event")

    eventually(found_none, timeout=60, what=f"{name} is refused", interval=0.3)


def test_preemption_never_kills_in_vain(directed: Cluster) -> None:
    # Of every GPU 60 and 30 are held. By totals, 50 come free where one pod of 30 ends; no GPU has them then.
    for node in range(NODES):
        for gpu in range(GPUS):
            where = f"made-up-{node}", gpu
            made_up.holder(directed, f"large-{node}-{gpu}", 60, *where, priorityClassName="test-middle")
            made_up.holder(directed, f"small-{node}-{gpu}", 30, *where, priorityClassName="test-low")
    before = places(directed)
    made_up.pod(directed, "wants-50", 50, priorityClassName="test-high")
    refused(directed, "wants-50")
    time.sleep(IN_VAIN_SECONDS)
    assert places(directed) == before, "nobody was evicted"


def test_preemption_takes_the_one_whose_gpu_has_room_then(directed: Cluster) -> None:
    for node in range(NODES):
        for gpu in range(GPUS):
            least = (node, gpu) == (1, 2)
            priority = "test-low" if least else "test-middle"
            name = "least" if least else f"held-{node}-{gpu}"
            made_up.holder(directed, name, 90, f"made-up-{node}", gpu, priorityClassName=priority)
    before = places(directed)
    made_up.pod(directed, "wants-50", 50, priorityClassName="test-high")
    wait_bound(directed, "wants-50")
    after = places(directed)
    assert after["wants-50"] == ("made-up-1", "2")
    assert before.keys() - after.keys() == {"least"}


def gang(cluster: Cluster, name: str, count: int, size: int) -> list[str]:
    """Pods that are to be bound together or not at all."""
    metadata = {"name": name, "namespace": "default"}
    spec = {"schedulingPolicy": {"gang": {"minCount": count}}}
    cluster.apply({"apiVersion": GROUPS, "kind": "PodGroup", "metadata": metadata, "spec": spec})
    names = [f"{name}-{number}" for number in range(count)]
    for each in names:
        made_up.pod(cluster, each, size, schedulingGroup={"podGroupName": name})
    return names


def test_gang_is_not_half_bound(directed: Cluster) -> None:
    # By totals there is room for three times 40: 60 on each of two GPUs.
    for node in range(NODES):
        for gpu in range(GPUS):
            size = 40 if node == 0 and gpu in (2, 3) else 100
            made_up.holder(directed, f"held-{node}-{gpu}", size, f"made-up-{node}", gpu)
    before = places(directed)
    names = gang(directed, "gang", 3, 40)
    refused(directed, names[0])
    time.sleep(IN_VAIN_SECONDS)
    assert places(directed) == before, "not one of three is bound"

    directed.delete("Pod", "held-0-2", grace_seconds=0)
    wait_bound(directed, *names)
    found = places(directed)
    assert sorted(found[name] for name in names) == [
        ("made-up-0", "2"),
        ("made-up-0", "2"),
        ("made-up-0", "3"),
    ]


@pytest.mark.parametrize("kept", [1, NODES * GPUS // 2, NODES * GPUS])
def test_gang_survives_a_takeover(directed: Cluster, replica: Replica, kept: int) -> None:
    """The leader is killed once so many members have GPUs, and others want them."""
    size, count = 60, NODES * GPUS
    names = gang(directed, f"gang-{kept}", count, size)
    uids = {directed.get("Pod", name)["metadata"]["uid"] for name in names}

    def have_gpus() -> None:
        recorded = directed.api.get(RECORD).get("data", {}).keys() & uids
        if len(recorded) < kept and not made_up.bound(directed):
            raise NotYet(f"{len(recorded)} of {kept}")

    eventually(have_gpus, timeout=60, what="GPUs are kept for members", interval=0.005)
    replica.end(signal.SIGKILL)
    for number in range(count):
        made_up.pod(directed, f"other-{number}", size)
    replica.start()
    found = {pod["metadata"]["name"] for pod in made_up.settled(directed)} & set(names)
    # Where it was not complete, others may have taken the rest: then none of it is bound.
    assert len(found) == count or (kept < count and not found)


@contextmanager
def dra_gpu(cluster: Cluster, node: str) -> Iterator[None]:
    """A GPU that a DRA driver offers on a node, to be had as `nvidia.com/gpu`, too."""
    driver = "gpu.example.com"
    selectors = [{"cel": {"expression": f"device.driver == '{driver}'"}}]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    devices = [{"name": "gpu-0"}]
    for kind, spec in (
        ("DeviceClass", {"selectors": selectors, "extendedResourceName": "nvidia.com/gpu"}),
        ("ResourceSlice", {"driver": driver, "nodeName": node, "pool": pool, "devices": devices}),
    ):
        cluster.apply({"apiVersion": DRA, "kind": kind, "metadata": {"name": "dra-gpu"}, "spec": spec})
    try:
        yield
    finally:
        for kind in ("DeviceClass", "ResourceSlice"):
            cluster.delete(kind, "dra-gpu", api_version=DRA)


def test_dra_nodes_pass(directed: Cluster) -> None:
    """No agent of ours is there, nor such an allocatable: kube-scheduler judges, and chooses the device."""
    made_up.bare_node(directed, "by-dra")
    container = {"name": "main", "image": "none", "resources": {"limits": {"nvidia.com/gpu": "1"}}}

    def node_of(name: str) -> str:
        found = directed.get("Pod", name)["spec"].get("nodeName")
        if not found:
            raise NotYet("it has no node")
        return str(found)

    def bound_to(name: str) -> str:
        return eventually(lambda: node_of(name), timeout=60, what=f"{name} is bound", interval=0.3)

    with dra_gpu(directed, "by-dra"):
        made_up.pod(directed, "whole", 100, containers=[container])
        made_up.pod(directed, "share", 50)
        assert bound_to("whole") == "by-dra"
        assert bound_to("share").startswith("made-up-")
        made_up.pod(directed, "second", 100, containers=[container])
        refused(directed, "second")
    directed.delete("Node", "by-dra")


def test_one_step_of_the_extender_outweighs_the_default_scores(directed: Cluster) -> None:
    made_up.holder(directed, "half", 50, "made-up-0", 1)
    elsewhere: dict[str, Any] = {
        "weight": 100,
        "preference": {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["made-up-2"]}]},
    }
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [elsewhere]}}
    made_up.pod(directed, "other-half", 50, affinity=affinity)
    wait_bound(directed, "other-half")
    assert places(directed)["other-half"] == ("made-up-0", "1")
