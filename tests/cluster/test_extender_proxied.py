"""kube-scheduler with the shipped configurations that reach the extender through the API server's proxy.

The nodes are made up: what is shown is where pods are bound.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.model.placement import ASSIGNED, HINT
from agent.model.pod import CORES, MPS
from tests.chart import helm
from tests.cluster import made_up
from tests.cluster.api import ApiError
from tests.cluster.build import Parts
from tests.cluster.extender_process import shipped
from tests.cluster.network import NODE_ADDRESS
from tests.cluster.options import Options
from tests.cluster.rig import REPOSITORY, Cluster
from tests.cluster.waiting import NotYet, eventually

NAMESPACE, PORT = "gpu-node-agent", 3456
SHIPPED_SERVER, HERE = "https://127.0.0.1:6443/", "https://127.0.0.1:443/"
# What the suite's guide has kube-scheduler read: an old version, one entry without a port, whole nodes.
SUITE = """\
apiVersion: kubescheduler.config.k8s.io/v1beta2
kind: KubeSchedulerConfiguration
clientConnection: {kubeconfig: /etc/kubernetes/scheduler.conf}
extenders:
  - enableHTTPS: true
    filterVerb: predicates
    managedResources: [{name: tencent.com/vcuda-core, ignoredByScheduler: false}]
    nodeCacheCapable: false
    urlPrefix: https://127.0.0.1:6443/api/v1/namespaces/kube-system/services/gpu-quota-admission/proxy/scheduler
    tlsConfig:
      insecure: false
      certFile: /etc/kubernetes/pki/apiserver-kubelet-client.crt
      keyFile: /etc/kubernetes/pki/apiserver-kubelet-client.key
      caFile: /etc/kubernetes/pki/ca.crt
"""


@contextmanager
def told_to_use(parts: Parts, name: str, log: Path) -> Iterator[Cluster]:
    """A cluster whose kube-scheduler has a shipped configuration, with the Services that it names."""
    # A client without rights of its own: only the role below gives it rights.
    with with_entries(parts, shipped(name), "scheduler", log) as cluster:
        yield cluster


@contextmanager
def with_entries(parts: Parts, entries: list[dict[str, Any]], client: str, log: Path) -> Iterator[Cluster]:
    """The same with any entries, for a kube-scheduler with that client's certificate."""
    running = Cluster(parts, Options(private_network=True))
    pki = running.layout.certificates
    services = []
    for entry in entries:
        assert entry["urlPrefix"].startswith(SHIPPED_SERVER)
        services.append(re.split("[:/]", entry["urlPrefix"].partition("/services/")[2])[0])
        entry["urlPrefix"] = entry["urlPrefix"].replace(SHIPPED_SERVER, HERE)
        files = {"certFile": f"{client}.crt", "keyFile": f"{client}.key", "caFile": "ca.crt"}
        entry["tlsConfig"] |= {key: str(pki / file) for key, file in files.items()}
    config = {"extenders": entries, "podMaxBackoffSeconds": 2}
    running.options = replace(running.options, scheduler_config=config)
    process: subprocess.Popen[bytes] | None = None
    with running:
        try:
            running.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
            made_up.node(running, "made-up-0")
            _pod_of_the_extender(running)
            for service in services:
                _service(running, service)
            process = _extender(running, log)
            eventually(lambda: _ready(running, services[0], log), timeout=60, what="the extender serves")
            yield running
        finally:
            if process is not None:
                process.send_signal(signal.SIGKILL)
                process.wait(10)


def _extender(cluster: Cluster, log: Path) -> subprocess.Popen[bytes]:
    flags = {
        "http.address": NODE_ADDRESS,
        "http.port": PORT,
        "http.verbs": "true",
        "cluster.kubeconfig": cluster.kubeconfig,
        "lease.namespace": NAMESPACE,
    }
    argv = [sys.executable, "-m", "agent", "extender"]
    argv += [part for key, value in flags.items() for part in ("--set", f"{key}={value}")]
    with log.open("ab") as out:
        process = subprocess.Popen(cluster.reaching_api(argv), cwd=REPOSITORY, stdout=out, stderr=out)
    cluster.adopt(process.pid)
    return process


def _service(cluster: Cluster, name: str) -> None:
    """As the chart has it; there is no pod that its selector could find."""
    settings = tuple(f"extender.{key}=true" for key in ("enabled", "productServices", "config.http.verbs"))
    (made,) = [
        each
        for each in helm.template(settings=settings)
        if each["kind"] == "Service" and each["metadata"]["name"].endswith(name)
    ]
    metadata = {"name": name, "namespace": NAMESPACE}
    ports = [
        {key: value for key, value in each.items() if key != "targetPort"} for each in made["spec"]["ports"]
    ]
    cluster.apply({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": ports}})
    target = {"kind": "Pod", "name": "extender", "namespace": NAMESPACE}
    subsets = [{"addresses": [{"ip": NODE_ADDRESS, "targetRef": target}], "ports": ports}]
    cluster.apply({"apiVersion": "v1", "kind": "Endpoints", "metadata": metadata, "subsets": subsets})


def _pod_of_the_extender(cluster: Cluster) -> None:
    """The API server's proxy goes to addresses of pods alone; the process itself runs beside the cluster."""
    metadata = {"name": "extender", "namespace": NAMESPACE}
    spec = {"nodeName": "made-up-0", "containers": [{"name": "main", "image": "none"}]}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    addresses = {"phase": "Running", "podIP": NODE_ADDRESS, "podIPs": [{"ip": NODE_ADDRESS}]}
    path = cluster.api.path("v1", "Pod", NAMESPACE, "extender")
    cluster.api.merge_patch(f"{path}/status", {"status": addresses})


def _ready(cluster: Cluster, service: str, log: Path) -> None:
    path = f"/api/v1/namespaces/{NAMESPACE}/services/{service}:{PORT}/proxy/serving"
    try:
        cluster.api.request("GET", path)
    except (OSError, ApiError) as error:
        raise NotYet(f"{error}; {log.read_text()[-500:]}") from error


def _allow(cluster: Cluster, *services: str) -> None:
    """Give kube-scheduler what `docs/extender.md` says that it needs."""
    api_version, name = "rbac.authorization.k8s.io/v1", {"name": "extender-proxy", "namespace": NAMESPACE}
    rule = {
        "apiGroups": [""],
        "resources": ["services/proxy"],
        "resourceNames": [f"{each}:{PORT}" for each in services],
        "verbs": ["create"],
    }
    cluster.apply({"apiVersion": api_version, "kind": "Role", "metadata": name, "rules": [rule]})
    group = "rbac.authorization.k8s.io"
    binding = {
        "apiVersion": api_version,
        "kind": "RoleBinding",
        "metadata": name,
        "roleRef": {"apiGroup": group, "kind": "Role", "name": "extender-proxy"},
        "subjects": [{"apiGroup": group, "kind": "User", "name": "system:kube-scheduler"}],
    }
    cluster.apply(binding)


def _told(cluster: Cluster, pod: str, *words: str) -> None:
    """Wait until an event of a pod holds all of these."""

    def heard() -> None:
        events = cluster.events(pod)
        if not any(all(word in event for word in words) for event in events):
            raise NotYet("; ".join(events) or "no events")

    eventually(heard, timeout=60, what=f"an event of {pod} with {words}")


def _on_node(cluster: Cluster, pod: str) -> dict[str, str]:
    def bound() -> dict[str, str]:
        found = cluster.get("Pod", pod)
        if not found["spec"].get("nodeName"):
            raise NotYet("; ".join(cluster.events(pod)))
        annotations: dict[str, str] = found["metadata"].get("annotations", {})
        return annotations

    return eventually(bound, timeout=60, what=f"{pod} is bound")


def test_through_the_proxy_it_filters_scores_and_binds_for_whom_rbac_lets_in(
    parts: Parts, tmp_path: Path
) -> None:
    with told_to_use(parts, "proxied.yaml", tmp_path / "extender.log") as cluster:
        made_up.pod(cluster, "first", 60)
        _told(cluster, "first", "code 403")
        assert made_up.bound(cluster) == []
        _allow(cluster, "gpu-node-agent-extender")
        chosen = {_on_node(cluster, "first")[f"{HINT}0"]}
        for number in range(1, made_up.GPUS):
            made_up.pod(cluster, f"more-{number}", 60)
            chosen.add(_on_node(cluster, f"more-{number}")[f"{HINT}0"])
        assert len(chosen) == made_up.GPUS
        # 160 cores are free in total.
        made_up.pod(cluster, "late", 60)
        _told(cluster, "late", "largest free share 40 of 60 cores")


def test_under_the_former_names_it_filters_and_kube_scheduler_binds(parts: Parts, tmp_path: Path) -> None:
    with told_to_use(parts, "legacy-names.yaml", tmp_path / "extender.log") as cluster:
        _allow(cluster, "gpu-quota-admission", "nvidia-mps-scheduler-plugin")
        made_up.pod(cluster, "first", 60)
        assert f"{HINT}0" not in _on_node(cluster, "first")
        made_up.pod(cluster, "second", 60)
        _told(cluster, "second", "GPUs of 1 bound pod not known yet")
        told = {f"{HINT}0": "0", ASSIGNED: "true"}  # as the node's agent writes it
        path = cluster.api.path("v1", "Pod", "default", "first")
        cluster.api.merge_patch(path, {"metadata": {"annotations": told}})
        _on_node(cluster, "second")
        amounts = {MPS.core: str(CORES), MPS.memory: "10"}
        cluster.api.request(
            "PATCH",
            "/api/v1/nodes/made-up-0/status",
            {"status": {"capacity": amounts, "allocatable": amounts}},
            content_type="application/strategic-merge-patch+json",
        )
        made_up.pod(cluster, "mps", 60, pair=MPS)
        _told(cluster, "mps", "no GPU offered as MPS")
        assert {pod["metadata"]["name"] for pod in made_up.bound(cluster)} == {"first", "second"}


def test_suite_scheduler_file_works(parts: Parts, tmp_path: Path) -> None:
    """After the two changes of docs/extender.md; as it is, kube-scheduler does not start with it."""
    page = " ".join((REPOSITORY / "docs" / "extender.md").read_text().split())
    (version,) = re.findall(r"`apiVersion: (kubescheduler\.config\.k8s\.io/\w+)`", page)
    assert f"`.../namespaces/{NAMESPACE}/services/gpu-quota-admission/proxy/scheduler`" in page
    changed = SUITE.replace("kubescheduler.config.k8s.io/v1beta2", version)
    changed = changed.replace("/namespaces/kube-system/", f"/namespaces/{NAMESPACE}/")
    lines = zip(SUITE.splitlines(), changed.splitlines(), strict=True)
    assert sum(before != after for before, after in lines) == 2

    file = tmp_path / "suite.yaml"
    file.write_text(SUITE)
    refused = subprocess.run(
        [parts.program("kube-scheduler"), f"--config={file}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode != 0
    assert "kubescheduler.config.k8s.io/v1beta2" in refused.stderr

    entries = yaml.safe_load(changed)["extenders"]
    with with_entries(parts, entries, "kubelet-client", tmp_path / "extender.log") as cluster:
        made_up.pod(cluster, "first", 60)
        _on_node(cluster, "first")
        made_up.pod(cluster, "second", 60)
        _told(cluster, "second", "GPUs of 1 bound pod not known yet")  # so it was asked


@pytest.mark.parametrize("name", ["extender.yaml", "proxied.yaml", "legacy-names.yaml"])
def test_every_entry_waits_for_the_extender_and_is_sent_names(name: str) -> None:
    for entry in shipped(name):
        assert not entry["ignorable"]
        assert entry["nodeCacheCapable"]
