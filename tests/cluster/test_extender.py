"""The extender with the real kube-scheduler and API server, and nodes that exist as objects only.

No kubelet runs their pods: what is shown is where pods are bound, not that they start. Whether the room is
there is counted here again from the annotations.
"""

import random
import signal
import ssl
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.model.placement import HINT, USUAL
from agent.model.pod import CORES, VGPU
from tests.cluster import extender_process, made_up
from tests.cluster.build import Parts
from tests.cluster.extender_process import Replica
from tests.cluster.made_up import GPUS
from tests.cluster.pki import Authority
from tests.cluster.rig import Cluster
from tests.cluster.waiting import NotYet, eventually

NODES = 3
SMALL = {size: weight for size, weight in USUAL.items() if size <= CORES}


@pytest.fixture(scope="module")
def directed(parts: Parts, port: int) -> Iterator[Cluster]:
    """A cluster with made-up nodes beside its own."""
    with extender_process.directed(parts, port) as running:
        for number in range(NODES):
            made_up.node(running, f"made-up-{number}")
        yield running


@pytest.fixture
def replica(directed: Cluster, port: int, tmp_path: Path) -> Iterator[Replica]:
    """The extender, serving; pods of the test are removed afterwards."""
    with extender_process.serving(directed, port, tmp_path / "extender.log") as made:
        yield made
    for pod in directed.find_all("Pod"):
        directed.delete("Pod", pod["metadata"]["name"], grace_seconds=0)


def _sold(bound: list[dict[str, Any]]) -> dict[tuple[str, int], int]:
    """Cores by node and GPU, from what the pods carry; fails where a GPU is offered twice."""
    offered: dict[tuple[str, int], int] = defaultdict(int)
    for pod in bound:
        size = int(pod["spec"]["containers"][0]["resources"]["limits"][VGPU.core])
        (index,) = map(int, pod["metadata"]["annotations"][f"{HINT}0"].split(","))
        assert index < GPUS
        offered[pod["spec"]["nodeName"], index] += size
    assert all(cores <= CORES for cores in offered.values()), offered
    return offered


def _burst(cluster: Cluster, seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    sizes = draw.choices(list(SMALL), list(SMALL.values()), k=count)
    for number, size in enumerate(sizes):
        made_up.pod(cluster, f"burst-{seed}-{number}", size)
    return sizes


def test_a_random_mix_is_bound_only_where_one_gpu_has_room(directed: Cluster, replica: Replica) -> None:
    _burst(directed, 1, 40)
    bound = made_up.settled(directed)
    offered = _sold(bound)
    assert sum(offered.values()) >= 0.85 * NODES * GPUS * CORES
    assert len(bound) < 40
    events = [one["message"] for one in directed.find_all("Event") if one["reason"] == "FailedScheduling"]
    assert any("largest free share" in text or "GPUs wholly free" in text for text in events), events[-3:]


def test_an_extender_killed_in_mid_burst_leaves_nothing_sold_twice(
    directed: Cluster, replica: Replica
) -> None:
    _burst(directed, 2, 10)
    replica.end(signal.SIGKILL)
    _burst(directed, 3, 30)
    assert len(made_up.bound(directed)) < 30, "nothing is bound by others while it is away"
    replica.start()
    assert sum(_sold(made_up.settled(directed)).values()) >= 0.85 * NODES * GPUS * CORES


def test_a_choice_that_a_tenant_annotated_is_overwritten_with_the_binding(
    directed: Cluster, replica: Replica
) -> None:
    forged = {f"{HINT}0": "1", "tencent.com/gpu-assigned": "true"}
    for number in range(NODES * GPUS):
        made_up.pod(directed, f"forged-{number}", 81, forged)
    bound = made_up.settled(directed)
    assert len(bound) == NODES * GPUS
    assert set(_sold(bound).values()) == {81}
    assert {pod["metadata"]["annotations"]["tencent.com/gpu-assigned"] for pod in bound} == {"false"}


def test_nobody_without_a_certificate_is_heard(directed: Cluster, replica: Replica) -> None:
    trusting = ssl.create_default_context(cafile=str(directed.layout.certificates / "ca.crt"))
    url = f"https://127.0.0.1:{replica.port}/scheduler/predicates"
    with pytest.raises((urllib.error.URLError, OSError)) as refused:
        urllib.request.urlopen(url, data=b"{}", timeout=5, context=trusting)
    assert not isinstance(refused.value, urllib.error.HTTPError)
    pki = directed.layout.certificates
    trusting.load_cert_chain(pki / "scheduler.crt", pki / "scheduler.key")
    with pytest.raises(urllib.error.HTTPError) as answered:
        urllib.request.urlopen(url, data=b"{}", timeout=5, context=trusting)
    with answered.value as reply:
        assert reply.code == 400


def test_a_renewed_certificate_is_taken_up(directed: Cluster, replica: Replica) -> None:
    pki = directed.layout.certificates

    def shown() -> str:
        return ssl.get_server_certificate(("127.0.0.1", replica.port), timeout=5)

    former = shown()
    Authority(pki).sign("extender", "/CN=extender", usage="serverAuth", alternatives="IP:127.0.0.1")

    def renewed() -> None:
        if shown() == former:
            raise NotYet("it shows the former one")

    eventually(renewed, timeout=30, what="the renewed certificate", interval=0.5)
    made_up.pod(directed, "after", 60)
    assert len(made_up.settled(directed)) == 1
