"""From nothing to a node that sells in three modes, through an update, and back to nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from agent.nvml.port import ComputeMode
from tests.chart import helm
from tests.chart.helm import HelmRefused
from tests.cluster import manifests
from tests.cluster.install_fixtures import audit, delete_pods, installation, open_cluster
from tests.cluster.installation import NAMESPACE, RELEASE, Installation
from tests.cluster.rig import Cluster
from tests.cluster.scenario_pods import REPORT, UNTIL_DELETED, Report, read_report
from tests.cluster.waiting import NotYet, eventually

__all__ = ["audit", "installation", "open_cluster"]

KINDS = (
    ("v1", ("Pod", "ConfigMap", "ServiceAccount", "Service")),
    ("apps/v1", ("DaemonSet", "Deployment")),
    ("batch/v1", ("Job",)),
    ("coordination.k8s.io/v1", ("Lease",)),
    ("rbac.authorization.k8s.io/v1", ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")),
    (
        "admissionregistration.k8s.io/v1",
        ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
    ),
)
SHARES = {
    "whole": {"nvidia.com/gpu": 1},
    "fraction": {"tencent.com/vcuda-core": 30, "tencent.com/vcuda-memory": 16},
    "share": {"nvidia.com/mps-core": 25, "nvidia.com/mps-memory": 4},
}
RBAC = "rbac.authorization.k8s.io/v1"
Right = tuple[str, str]  # resource, verb


def allocatable(cluster: Cluster) -> dict[str, int]:
    status = cluster.get("Node", cluster.node)["status"]["allocatable"]
    return {name: int(value) for name, value in status.items() if "/" in name}


def wait_sold(cluster: Cluster, *resources: str) -> dict[str, int]:
    def sold() -> dict[str, int]:
        found = allocatable(cluster)
        if not all(found.get(resource) for resource in resources):
            raise NotYet(json.dumps(found))
        return found

    return eventually(sold, timeout=40, what=f"allocatable {', '.join(resources)}", interval=0.2)


def start_pods(cluster: Cluster) -> None:
    for name, limits in SHARES.items():
        container = manifests.container("main", ["sh", "-c", REPORT + UNTIL_DELETED], limits=limits)
        cluster.apply(manifests.pod(name, container))
    for name in SHARES:
        cluster.wait_pod(name, "Running")


def report_of(cluster: Cluster, pod: str) -> Report:
    def read() -> Report:
        found = read_report(cluster.logs(pod, "main"))
        if found is None:
            raise NotYet("no report")
        return found

    return eventually(read, timeout=15, what=f"report of {pod}")


def command(installation: Installation, *words: str) -> str:
    """Run the agent's program in its container, as a person does."""
    pod = installation.ready_agent()["metadata"]["name"]
    argv = ["gpu-node-agent", *words]
    return installation.cluster.exec(pod, "agent", argv, namespace=NAMESPACE)


def containers(cluster: Cluster) -> dict[str, Any]:
    """What changes when a container is started anew."""
    found = {}
    for name in SHARES:
        pod = cluster.get("Pod", name)
        (status,) = pod["status"]["containerStatuses"]
        found[name] = (pod["status"]["phase"], status["containerID"], status["restartCount"])
    return found


def test_install_label_run_upgrade_uninstall(installation: Installation) -> None:
    cluster, node = installation.cluster, installation.node
    told = installation.install()
    assert "kubectl label node" in told
    assert installation.pods("agent") == []  # no node is a GPU node yet
    installation.label("mixed")
    first = installation.ready_agent()
    sold = wait_sold(cluster, *(resource for limits in SHARES.values() for resource in limits))
    assert sold["nvidia.com/gpu"] == 2
    assert sold["tencent.com/vcuda-core"] == 200
    looked = command(installation, "check", "node")
    assert "this node can sell its GPUs" in looked
    assert cluster.parts.kubernetes_version in looked

    start_pods(cluster)
    share = report_of(cluster, "share")
    assert share.environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert len(report_of(cluster, "whole").device_nodes) == len(report_of(cluster, "fraction").device_nodes)
    before, daemons = containers(cluster), node.daemons()
    assert len(daemons) == 2

    installation.helm(
        "upgrade",
        RELEASE,
        str(helm.CHART),
        "--reset-then-reuse-values",
        "--set",
        "config.sampling.intervalSeconds=2",
        "--wait",
    )
    installation.ready_agent(other_than=first["metadata"]["uid"])
    wait_sold(cluster, "nvidia.com/gpu", "nvidia.com/mps-core")
    assert containers(cluster) == before
    assert node.daemons() == daemons, "the daemons must outlive the agent that started them"

    with pytest.raises(HelmRefused):
        installation.helm("uninstall", RELEASE, "--timeout=60s")
    (job,) = installation.pods("cleanup")
    words = cluster.logs(job["metadata"]["name"], "cleanup", namespace=NAMESPACE)
    assert f"default/share (node {cluster.node})" in words
    assert "uninstall again" in words
    installation.ready_agent()
    assert containers(cluster) == before

    cluster.delete("Pod", "share", grace_seconds=1)
    installation.helm("uninstall", RELEASE, "--wait", "--timeout=120s")
    assert_nothing_is_left(installation)
    for name in ("whole", "fraction"):
        assert cluster.phase(name) == "Running"


def assert_nothing_is_left(installation: Installation) -> None:
    cluster, node = installation.cluster, installation.node

    def gone() -> None:
        left = [
            f"{kind} {found['metadata']['name']}"
            for version, kinds in KINDS
            for kind in kinds
            for found in cluster.find_all(
                kind,
                namespace=None,
                api_version=version,
                labelSelector=f"app.kubernetes.io/instance={RELEASE}",
            )
        ]
        if left:
            raise NotYet(", ".join(left))

    eventually(gone, timeout=40, what="objects of the release are gone", interval=0.5)
    found = cluster.get("Node", cluster.node)
    keys = [*found["metadata"]["labels"], *found["metadata"].get("annotations", {})]
    ours = ("gpu-node-agent.io/", "cuda-", "nvidia.com/")
    assert not [key for key in keys if key.startswith(ours)]
    assert not [each for each in found["spec"].get("taints", []) if each["key"].startswith(ours)]
    assert not [each for each in found["status"]["conditions"] if each["type"] == "GPUModeReady"]
    assert not any(allocatable(cluster).values())
    assert not node.daemons()
    modes = {node.machine.gpu(uuid).compute_mode for uuid in node.machine.uuids}
    assert modes == {int(ComputeMode.DEFAULT)}
    assert not list((cluster.kubelet_root / "plugins_registry").glob("gna-*"))
    assert not (cluster.cdi_dir / "gpu-node-agent.json").exists()
    assert not (cluster.layout.run / "gpu-node-agent").exists()
    assert not Path("/var/lib/gpu-node-agent").exists()


class AuditLog:
    """What the agent's account did since this was made."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "audit.log"
        self._before = len(self._file.read_text().splitlines()) if self._file.exists() else 0

    def _entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._file.read_text().splitlines()[self._before :]]

    def refused(self) -> list[dict[str, Any]]:
        """What RBAC or a policy turned down."""
        return [
            entry
            for entry in self._entries()
            if entry["responseStatus"]["code"] == 403
            # The server says so, too, where it has no streaming lists.
            or (entry["responseStatus"]["code"] == 422 and entry["verb"] != "watch")
        ]

    def used(self) -> set[Right]:
        """Rights that were made use of."""
        found = set()
        for entry in self._entries():
            reference, part = entry["objectRef"], entry["objectRef"].get("subresource")
            if entry["annotations"].get("authorization.k8s.io/decision") == "allow":
                resource = f"{reference['resource']}/{part}" if part else reference["resource"]
                found.add((resource, entry["verb"]))
        return found

    def wait(self, *rights: Right) -> None:
        """Wait until they have been used."""

        def seen() -> None:
            if missing := {*rights} - self.used():
                raise NotYet(f"not used: {missing}")

        eventually(seen, timeout=30, what="the audit log shows the right in use", interval=0.2)


def switch(installation: Installation, mode: str) -> None:
    """Label the node with a mode, and wait until it is in force."""
    installation.label(mode)

    def in_force() -> None:
        found = installation.cluster.get("Node", installation.cluster.node)["metadata"]["labels"]
        if found.get("gpu-node-agent.io/mode") != mode:
            raise NotYet(json.dumps(found))

    eventually(in_force, timeout=40, what=f"mode {mode}", interval=0.2)


def test_the_account_uses_exactly_its_rights(installation: Installation, audit: Path) -> None:
    """Each right has its moment; the rare ones are brought about here."""
    cluster, log = installation.cluster, AuditLog(audit)
    installation.install()
    installation.label("mixed")
    agent = installation.ready_agent()
    wait_sold(cluster, *SHARES["fraction"], *SHARES["share"])
    start_pods(cluster)
    log.wait(("nodes", "watch"), ("nodes", "patch"), ("nodes/status", "patch"))
    log.wait(("pods", "watch"), ("pods", "patch"), ("events", "create"))
    # The server has no streaming lists.
    log.wait(("nodes", "list"), ("pods", "list"))

    # What is told twice is counted.
    delete_pods(cluster)
    for mode in ("pgpu", "mixed", "pgpu", "mixed"):
        switch(installation, mode)
    log.wait(("events", "patch"))

    assert not log.refused()

    # A pod that the watch has not told of: it does not tell of any here.
    name = f"{NAMESPACE}-{RELEASE}"
    role = cluster.get("ClusterRole", name, api_version=RBAC)
    granted = {
        (resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]
    }
    blind = [
        {**rule, "verbs": ["get", "patch"]} if rule["resources"] == ["pods"] else rule
        for rule in role["rules"]
    ]
    cluster.api.merge_patch(cluster.api.path(RBAC, "ClusterRole", None, name), {"rules": blind})
    cluster.delete("Pod", agent["metadata"]["name"], namespace=NAMESPACE)
    installation.ready_agent(other_than=agent["metadata"]["uid"])
    wait_sold(cluster, *SHARES["fraction"])
    container = manifests.container("main", ["sh", "-c", UNTIL_DELETED], limits=SHARES["fraction"])
    cluster.apply(manifests.pod("unseen", container))
    cluster.wait_pod("unseen", "Running")
    log.wait(("pods", "get"))

    assert log.used() == granted
