"""Kueue before kube-scheduler and the extender: two teams share one node by quotas of cores and memory.

The objects are those of config/peers. The node exists as an object only, and nothing runs on it.
"""

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.model.pod import CORES, VGPU
from tests.bench import arrivals
from tests.cluster import extender_process, made_up
from tests.cluster.build import Parts
from tests.cluster.build.peers import KUEUE, BuiltPeer, Peer
from tests.cluster.extender_process import Replica
from tests.cluster.pki import Authority
from tests.cluster.rig import REPOSITORY, Cluster, free_ports
from tests.cluster.waiting import NotYet, eventually
from tests.peers.program import documents, install_kinds, running

FILES = REPOSITORY / "config" / "peers"
QUEUE = "kueue.x-k8s.io/queue-name"
API = "kueue.x-k8s.io/v1beta2"
WEBHOOKS = ("job", "pod", "clusterqueue", "resourceflavor", "workload")
CORE_QUOTA, MEMORY_QUOTA = "gpu-node-agent.io/cores", "gpu-node-agent.io/memory-mib"
HALF = 50  # hundredths of a GPU


@pytest.fixture(scope="module")
def directed(parts: Parts, port: int) -> Iterator[Cluster]:
    """A cluster with one made-up node."""
    with extender_process.directed(parts, port) as cluster:
        made_up.node(cluster, "shared")
        yield cluster


@pytest.fixture
def replica(directed: Cluster, port: int, tmp_path: Path) -> Iterator[Replica]:
    """The extender, serving."""
    with extender_process.serving(directed, port, tmp_path / "extender.log") as made:
        yield made


@pytest.fixture
def kueue(
    directed: Cluster, replica: Replica, peer: Callable[[Peer], BuiltPeer], tmp_path: Path
) -> Iterator[list[dict[str, Any]]]:
    """Kueue with the documented configuration; the documented objects, which are there."""
    made = peer(KUEUE)
    configuration, text = [(FILES / f"kueue-{name}.yaml").read_text() for name in ("configuration", "queues")]
    # The other team's, as the file says.
    both = [text, text.replace("team-a", "team-b")]
    objects = [each for one in both for each in yaml.safe_load_all(one)]
    install_kinds(directed, made.manifests / "config/components/crd/bases")
    with started(directed, made.program, yaml.safe_load(configuration), tmp_path) as webhook:
        for each in webhooks(directed, documents(made.manifests / "config/components/webhook"), webhook):
            directed.apply(each)
        eventually(
            lambda: applied(directed, objects), timeout=90, what="Kueue takes its objects", interval=0.5
        )
        yield objects


@contextmanager
def started(cluster: Cluster, program: Path, configuration: dict[str, Any], folder: Path) -> Iterator[int]:
    """The port of its webhooks."""
    webhook, health = free_ports(2)
    pki = cluster.layout.certificates
    Authority(pki).sign("kueue", "/CN=kueue", usage="serverAuth", alternatives="IP:127.0.0.1")
    certificates = folder / "certificates"
    certificates.mkdir()
    for suffix in ("crt", "key"):
        (certificates / f"tls.{suffix}").write_bytes((pki / f"kueue.{suffix}").read_bytes())
    configuration = configuration | {
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"port": webhook, "host": "127.0.0.1", "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "integrations": {"frameworks": ["batch/job", "pod"]},
        "featureGates": {"VisibilityOnDemand": False, "MultiKueue": False},
    }
    file = folder / "kueue.yaml"
    file.write_text(json.dumps(configuration))
    # With certificates of others it wants those of its metrics at a fixed place, which is made for it alone.
    place = "/etc/kueue/metrics/certs"
    prepare = f'mount -t tmpfs tmpfs /etc && mkdir -p {place} && cp "$1"/* {place} && shift && exec "$@"'
    argv = ["unshare", "--mount", "sh", "-ec", prepare, "sh", str(certificates)]
    with running(cluster, [*argv, str(program), f"--config={file}"], folder / "kueue.log"):
        yield webhook


def webhooks(
    cluster: Cluster, configurations: Iterator[dict[str, Any]], port: int
) -> Iterator[dict[str, Any]]:
    """Those that are needed here, at this port."""
    authority = base64.b64encode(Authority(cluster.layout.certificates).certificate.read_bytes()).decode()
    for each in configurations:
        if not str(each.get("kind")).endswith("WebhookConfiguration"):  # kustomize's own files
            continue
        kept = [hook for hook in each["webhooks"] if hook["name"][1:].removesuffix(".kb.io") in WEBHOOKS]
        for hook in kept:
            path = hook["clientConfig"]["service"]["path"]
            hook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": authority}
            if hook["name"].endswith("pod.kb.io"):  # as its chart does by namespaces
                hook["objectSelector"] = {"matchExpressions": [{"key": QUEUE, "operator": "Exists"}]}
        yield {**each, "webhooks": kept}


def applied(cluster: Cluster, objects: list[dict[str, Any]]) -> None:
    try:
        for each in objects:
            cluster.apply(each)
    except Exception as error:  # the API server does not know the kinds yet, or Kueue does not answer
        raise NotYet(str(error)) from error


def job(cluster: Cluster, team: str, name: str, pods: int, size: int = HALF, priority: str = "") -> None:
    """A Job whose pods are to start together, each with hundredths of a GPU."""
    labels = {QUEUE: "gpus"} | ({"kueue.x-k8s.io/priority-class": priority} if priority else {})
    template = {"spec": made_up.pod_spec(size) | {"restartPolicy": "Never"}}
    spec = {"parallelism": pods, "completions": pods, "template": template}
    metadata = {"name": name, "namespace": team, "labels": labels}
    cluster.api.request(
        "POST", f"/apis/batch/v1/namespaces/{team}/jobs", {"metadata": metadata, "spec": spec}
    )


def bound(cluster: Cluster, team: str) -> dict[str, int]:
    """How many pods of each Job have a node."""
    found: dict[str, int] = {}
    for pod in cluster.api.get(f"/api/v1/namespaces/{team}/pods")["items"]:
        if pod["spec"].get("nodeName") and not pod["metadata"].get("deletionTimestamp"):
            owner = pod["metadata"].get("labels", {}).get("batch.kubernetes.io/job-name", "")
            found[owner] = found.get(owner, 0) + 1
    return found


def wait_bound(cluster: Cluster, expected: dict[str, dict[str, int]]) -> None:
    """Wait until these Jobs, by team, have these numbers of bound pods, and no others have any."""

    def as_expected() -> None:
        found = {team: bound(cluster, team) for team in expected}
        if found != expected:
            raise NotYet(str(found))

    eventually(as_expected, timeout=90, what=str(expected), interval=0.5)


def wait_used(cluster: Cluster, queue: str, cores: int) -> None:
    """Wait until a ClusterQueue counts so much of its quota as used, with as much memory."""
    mebibytes = cores * arrivals.BLOCKS // CORES * (VGPU.block_bytes >> 20)

    def as_expected() -> None:
        (flavor,) = cluster.get("ClusterQueue", queue, api_version=API)["status"]["flavorsUsage"]
        found = {each["name"]: int(each.get("total", 0)) for each in flavor["resources"]}
        if found != {CORE_QUOTA: cores, MEMORY_QUOTA: mebibytes}:
            raise NotYet(str(found))

    eventually(as_expected, timeout=30, what=f"{cores} cores of {queue} are used", interval=0.3)


@pytest.mark.timeout(400, func_only=True)
def test_kueue_shares_a_node_between_teams(directed: Cluster, kueue: list[dict[str, Any]]) -> None:
    """The node has four GPUs; each team owns two of them, and lends what it does not use."""
    a, b = "team-a", "team-b"
    # A gang of six halves is more than the team's own two GPUs: it borrows the third.
    job(directed, a, "wide", 6)
    wait_bound(directed, {a: {"wide": 6}, b: {}})
    wait_used(directed, a, 6 * HALF)
    # The other team's gang of four needs all that is its own: the borrower is preempted, whole.
    job(directed, b, "own", 4)
    wait_bound(directed, {a: {}, b: {"own": 4}})
    # Shares add up: a gang of three does not fit beside two pairs, and not one of it starts.
    job(directed, a, "pair", 2)
    wait_bound(directed, {a: {"pair": 2}, b: {"own": 4}})
    job(directed, a, "three", 3)
    gated_pod(directed, a)
    wait_bound(directed, {a: {"pair": 2}, b: {"own": 4}})
    wait_used(directed, a, 2 * HALF)
    wait_used(directed, b, 4 * HALF)
    # What ends makes room for the gang that waited longest.
    path = f"/apis/batch/v1/namespaces/{b}/jobs/own"
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
    directed.api.request("DELETE", path, options)  # else its pods stay
    wait_bound(directed, {a: {"pair": 2, "wide": 6}, b: {}})
    said = directed.find_all("Event", namespace=a, fieldSelector="involvedObject.name=gated")
    assert not {each["reason"] for each in said} & {"WaitingForGPU", "FailedScheduling"}


def gated_pod(cluster: Cluster, team: str) -> None:
    """A pod that Kueue holds back by a scheduling gate."""
    metadata = {"name": "gated", "namespace": team, "labels": {QUEUE: "gpus"}}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": made_up.pod_spec(300)})

    def gated() -> None:
        found = cluster.api.get(f"/api/v1/namespaces/{team}/pods/gated")
        if not found["spec"].get("schedulingGates"):
            raise NotYet("no gate")

    eventually(gated, timeout=30, what="the pod is gated", interval=0.3)
