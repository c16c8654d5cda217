"""The extender with the real kube-scheduler and API server, and nodes that exist as objects only.

No kubelet runs their pods: what is shown is where pods are bound, not that they start. Whether the room is
there is counted here anew from the annotations.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.model.demand import CORES, VGPU
from agent.model.fragmentation import USUAL
from agent.model.node_inventory import INVENTORY, encode
from agent.model.placement import HINT
from tests.bench import arrivals
from tests.cluster.build import Parts
from tests.cluster.options import Options
from tests.cluster.rig import REPOSITORY, Cluster
from tests.cluster.waiting import NotYet, eventually

NODES, GPUS = 3, 4
CONFIG = REPOSITORY / "config" / "scheduler"
QUIET_SECONDS = 6.0  # nothing was bound for so long: nothing more will be
SMALL = {size: weight for size, weight in USUAL.items() if size <= CORES}


class Replica:
    """The extender's process; `start` may be called again after its end."""

    def __init__(self, cluster: Cluster, port: int, log: Path) -> None:
        self._cluster = cluster
        self.port = port
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; returns when it leads and its ledger is complete."""
        flags = {
            "http.address": "127.0.0.1",
            "http.port": self.port,
            "cluster.kubeconfig": self._cluster.kubeconfig,
            "lease.namespace": "default",
            "lease.durationSeconds": 3,
            "lease.renewSeconds": 2,
            "lease.retrySeconds": 0.3,
        }
        argv = [sys.executable, "-m", "agent", "extender"]
        argv += [part for key, value in flags.items() for part in ("--set", f"{key}={value}")]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(argv, cwd=REPOSITORY, stdout=log, stderr=log, env=os.environ)
        self._cluster.adopt(self._process.pid)
        eventually(self._ready, timeout=60, what="the extender serves")

    def _ready(self) -> None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=2).close()
        except (urllib.error.URLError, OSError) as error:
            raise NotYet(f"{error}; {self._log.read_text()[-500:]}") from error

    def end(self, how: signal.Signals) -> None:
        """Send a signal and wait."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(10)
            self._process = None


@pytest.fixture(scope="module")
def port() -> int:
    """Where kube-scheduler is told that the extender is."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found: int = listener.getsockname()[1]
    return found


@pytest.fixture(scope="module")
def directed(parts: Parts, port: int) -> Iterator[Cluster]:
    """A cluster whose kube-scheduler was started with the shipped configuration, but for the address."""
    (entry,) = yaml.safe_load((CONFIG / "extender.yaml").read_text())["extenders"]
    plain = {key: value for key, value in entry.items() if key not in ("tlsConfig", "enableHTTPS")}
    plain["urlPrefix"] = f"http://127.0.0.1:{port}/scheduler"
    running = Cluster(parts, Options(scheduler_config={"extenders": [plain], "podMaxBackoffSeconds": 2}))
    running.up()
    try:
        for number in range(NODES):
            _node(running, f"made-up-{number}")
        yield running
    finally:
        running.down()


def _node(cluster: Cluster, name: str) -> None:
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": name,
                "labels": {"made-up": "true"},
                "annotations": {INVENTORY: encode(arrivals.inventory(GPUS))},
            },
        }
    )
    amounts = {
        "cpu": "64",
        "memory": "512Gi",
        "pods": "200",
        VGPU.core: str(CORES * GPUS),
        VGPU.memory: str(arrivals.BLOCKS * GPUS),
    }
    ready = {"type": "Ready", "status": "True", "reason": "Made", "message": "up"}
    cluster.api.request(
        "PATCH",
        f"/api/v1/nodes/{name}/status",
        {"status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}},
        content_type="application/strategic-merge-patch+json",
    )


@pytest.fixture
def replica(directed: Cluster, port: int, tmp_path: Path) -> Iterator[Replica]:
    """The extender, serving; pods of the test are removed afterwards."""
    made = Replica(directed, port, tmp_path / "extender.log")
    made.start()
    try:
        yield made
    finally:
        made.end(signal.SIGKILL)
        for pod in directed.find_all("Pod"):
            directed.delete("Pod", pod["metadata"]["name"], grace_seconds=0)


def _pod(cluster: Cluster, name: str, size: int, annotations: dict[str, str] | None = None) -> None:
    limits = {VGPU.core: str(size)}
    if size < CORES:
        limits[VGPU.memory] = str(size * arrivals.BLOCKS // CORES)
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default", "annotations": annotations or {}},
            "spec": {
                "containers": [{"name": "main", "image": "none", "resources": {"limits": limits}}],
                "nodeSelector": {"made-up": "true"},
                "tolerations": [{"operator": "Exists"}],  # no kubelet keeps these nodes ready
            },
        }
    )


def _bound(cluster: Cluster) -> list[dict[str, Any]]:
    return [pod for pod in cluster.find_all("Pod") if pod["spec"].get("nodeName")]


def _settled(cluster: Cluster) -> list[dict[str, Any]]:
    """The bound pods, once nothing more is bound."""
    known, since = -1, time.monotonic()
    deadline = since + 120
    while time.monotonic() < deadline:
        bound = _bound(cluster)
        if len(bound) != known:
            known, since = len(bound), time.monotonic()
        elif time.monotonic() - since > QUIET_SECONDS:
            return bound
        time.sleep(0.5)
    raise AssertionError("pods are bound for two minutes without an end")


def _sold(bound: list[dict[str, Any]]) -> dict[tuple[str, int], int]:
    """Cores by node and GPU, from what the pods carry; fails where a GPU is sold twice."""
    sold: dict[tuple[str, int], int] = defaultdict(int)
    for pod in bound:
        size = int(pod["spec"]["containers"][0]["resources"]["limits"][VGPU.core])
        (index,) = map(int, pod["metadata"]["annotations"][f"{HINT}0"].split(","))
        assert index < GPUS
        sold[pod["spec"]["nodeName"], index] += size
    assert all(cores <= CORES for cores in sold.values()), sold
    return sold


def _burst(cluster: Cluster, seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    sizes = draw.choices(list(SMALL), list(SMALL.values()), k=count)
    for number, size in enumerate(sizes):
        _pod(cluster, f"burst-{seed}-{number}", size)
    return sizes


def test_a_random_mix_is_bound_only_where_one_gpu_has_room(directed: Cluster, replica: Replica) -> None:
    _burst(directed, 1, 40)
    bound = _settled(directed)
    sold = _sold(bound)
    assert sum(sold.values()) >= 0.85 * NODES * GPUS * CORES
    assert len(bound) < 40
    events = [one["message"] for one in directed.find_all("Event") if one["reason"] == "FailedScheduling"]
    assert any("largest free share" in text or "GPUs wholly free" in text for text in events), events[-3:]


def test_an_extender_killed_in_mid_burst_leaves_nothing_sold_twice(
    directed: Cluster, replica: Replica
) -> None:
    _burst(directed, 2, 10)
    replica.end(signal.SIGKILL)
    _burst(directed, 3, 30)
    assert len(_bound(directed)) < 30, "nothing is bound by others while it is away"
    replica.start()
    assert sum(_sold(_settled(directed)).values()) >= 0.85 * NODES * GPUS * CORES


def test_a_choice_that_a_tenant_annotated_is_overwritten_with_the_binding(
    directed: Cluster, replica: Replica
) -> None:
    forged = {f"{HINT}0": "1", "tencent.com/gpu-assigned": "true"}
    for number in range(NODES * GPUS):
        _pod(directed, f"forged-{number}", 81, forged)
    bound = _settled(directed)
    assert len(bound) == NODES * GPUS
    assert set(_sold(bound).values()) == {81}
    assert {pod["metadata"]["annotations"]["tencent.com/gpu-assigned"] for pod in bound} == {"false"}
