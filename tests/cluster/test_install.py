"""From nothing to a node that sells in three modes, through an update, and back to nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from agent.nvml.port import ComputeMode
from tests.chart import helm
from tests.chart.helm import HelmRefused
from tests.cluster import manifests
from tests.cluster.install_fixtures import audit, installation, open_cluster
from tests.cluster.installation import NAMESPACE, RELEASE, Installation
from tests.cluster.rig import Cluster
from tests.cluster.scenario_pods import REPORT, UNTIL_DELETED, Report, read_report
from tests.cluster.waiting import NotYet, eventually

__all__ = ["audit", "installation", "open_cluster"]

KINDS = (
    ("v1", ("Pod", "ConfigMap", "ServiceAccount", "Service")),
    ("apps/v1", ("DaemonSet",)),
    ("batch/v1", ("Job",)),
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
# What a run of these tests need not come across: servers without streaming lists (before 1.34, and the
# clean-up), a pod that the watch has not told of, an event told twice.
RARE = {("nodes", "list"), ("pods", "list"), ("pods", "get"), ("events", "patch")}


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
        "--reuse-values",
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
    assert not [each for each in found["status"]["conditions"] if each["type"] == "GPUModeReady"]
    assert not any(allocatable(cluster).values())
    assert not node.daemons()
    modes = {node.machine.gpu(uuid).compute_mode for uuid in node.machine.uuids}
    assert modes == {int(ComputeMode.DEFAULT)}
    assert not list((cluster.kubelet_root / "plugins_registry").glob("gna-*"))
    assert not (cluster.cdi_dir / "gpu-node-agent.json").exists()
    assert not (cluster.layout.run / "gpu-node-agent").exists()
    assert not Path("/var/lib/gpu-node-agent").exists()


def test_the_account_uses_exactly_its_rights(installation: Installation, audit: Path) -> None:
    installation.install()
    installation.label("mixed")
    installation.ready_agent()
    wait_sold(installation.cluster, *SHARES["fraction"], *SHARES["share"])
    start_pods(installation.cluster)

    role = installation.cluster.get(
        "ClusterRole", f"{NAMESPACE}-{RELEASE}", api_version="rbac.authorization.k8s.io/v1"
    )
    granted = {
        (resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]
    }

    def used() -> set[tuple[str, str]]:
        found = set()
        for line in (audit / "audit.log").read_text().splitlines():
            entry = json.loads(line)
            reference = entry["objectRef"]
            part = reference.get("subresource")
            found.add((f"{reference['resource']}/{part}" if part else reference["resource"], entry["verb"]))
            allowed = entry["annotations"].get("authorization.k8s.io/decision")
            assert allowed == "allow", entry
        if missing := granted - found - RARE:
            raise NotYet(f"not used: {missing}")
        return found

    assert eventually(used, timeout=20, what="the audit log shows every right in use") <= granted
