"""From nothing to a node that offers in three modes, through an update, and back to nothing."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agent.nvml.port import ComputeMode
from tests.chart import helm
from tests.chart.helm import HelmRefused
from tests.cluster import manifests, moving
from tests.cluster.audit import AuditLog
from tests.cluster.install_fixtures import audit, delete_pods, installation, open_cluster
from tests.cluster.installation import NAMESPACE, RELEASE, Installation
from tests.cluster.interrupting import hook_process, second_node, wait_cleaned
from tests.cluster.rig import Cluster
from tests.cluster.scenario_pods import REPORT as WRITE
from tests.cluster.scenario_pods import UNTIL_DELETED, Report, read_report
from tests.cluster.waiting import NotYet, eventually
from tests.pace import scaled

__all__ = ["audit", "installation", "open_cluster"]

KINDS = (
    ("v1", ("Pod", "ConfigMap", "ServiceAccount", "Service")),
    ("apps/v1", ("DaemonSet", "Deployment")),
    ("batch/v1", ("Job",)),
    ("coordination.k8s.io/v1", ("Lease",)),
    ("rbac.authorization.k8s.io/v1", ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")),
    ("admissionregistration.k8s.io/v1", ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")),
)
SHARES = {
    "whole": {"nvidia.com/gpu": 1},
    "fraction": {"tencent.com/vcuda-core": 30, "tencent.com/vcuda-memory": 16},
    "share": {"nvidia.com/mps-core": 25, "nvidia.com/mps-memory": 4},
}
UPGRADE = ("upgrade", RELEASE, str(helm.CHART), "--reset-then-reuse-values")
RBAC = "rbac.authorization.k8s.io/v1"


def allocatable(cluster: Cluster) -> dict[str, int]:
    status = cluster.get("Node", cluster.node)["status"]["allocatable"]
    return {name: int(value) for name, value in status.items() if "/" in name}


def wait_sold(cluster: Cluster, *resources: str) -> dict[str, int]:
    def offered() -> dict[str, int]:
        found = allocatable(cluster)
        if not all(found.get(resource) for resource in resources):
            raise NotYet(json.dumps(found))
        return found

    return eventually(offered, timeout=40, what=f"allocatable {', '.join(resources)}", interval=0.2)


def start_pods(cluster: Cluster, *names: str) -> None:
    for name in names:
        container = manifests.container("main", ["sh", "-c", WRITE + UNTIL_DELETED], limits=SHARES[name])
        cluster.apply(manifests.pod(name, container))
    for name in names:
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
    """The identity of a container, which changes when it is restarted."""
    found = {}
    for pod in cluster.find_all("Pod"):
        (status,) = pod["status"]["containerStatuses"]
        found[pod["metadata"]["name"]] = (
            pod["status"]["phase"],
            status["containerID"],
            status["restartCount"],
        )
    return found


def test_install_label_run_upgrade_uninstall(installation: Installation) -> None:
    cluster, node = installation.cluster, installation.node
    told = installation.install()
    assert "kubectl label node" in told
    assert installation.pods("agent") == []  # no node is a GPU node yet
    installation.label("mixed")
    first = installation.ready_agent()
    offered = wait_sold(cluster, *(resource for limits in SHARES.values() for resource in limits))
    assert offered["nvidia.com/gpu"] == 2
    assert offered["tencent.com/vcuda-core"] == 200
    looked = command(installation, "check", "node")
    assert "this node can offer its GPUs" in looked
    assert cluster.parts.kubernetes_version in looked

    installation.helm("test", RELEASE, "--timeout=120s")
    report = f"{RELEASE}-preflight"
    assert "1 of 1 nodes can offer their GPUs" in cluster.logs(report, "report", namespace=NAMESPACE)
    cluster.delete("Pod", report, namespace=NAMESPACE)  # it stays for people to read

    start_pods(cluster, *SHARES)
    share = report_of(cluster, "share")
    assert share.environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert len(report_of(cluster, "whole").device_nodes) == len(report_of(cluster, "fraction").device_nodes)
    before, daemons = containers(cluster), node.daemons()
    assert len(daemons) == 2

    installation.helm(*UPGRADE, "--set", "config.sampling.intervalSeconds=2", "--wait")
    installation.ready_agent(other_than=first["metadata"]["uid"])
    wait_sold(cluster, "nvidia.com/gpu", "nvidia.com/mps-core")
    assert containers(cluster) == before
    assert node.daemons() == daemons, "the daemons must outlive the agent that started them"

    cluster.delete("Pod", "share", grace_seconds=1)
    installation.helm("uninstall", RELEASE, "--wait", "--timeout=120s")
    assert_nothing_is_left(installation)
    for name in ("whole", "fraction"):
        assert cluster.phase(name) == "Running"


def assert_nothing_is_left(installation: Installation) -> None:
    cluster = installation.cluster

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
    assert_node_has_nothing_of_the_agent(installation)
    assert not (cluster.cdi_dir / "gpu-node-agent.json").exists()
    # The two folders stay, as mounts do that were theirs; a lock file in them has nobody who holds it.
    # While pods hold GPUs there is also what vGPU containers have mounted: they may be started again.
    stays = {"agent.lock", "bin", "lib", "limits"} if cluster.find_all("Pod") else {"agent.lock"}
    for folder in (cluster.layout.run / "gpu-node-agent", Path("/var/lib/gpu-node-agent")):
        assert {path.name for path in folder.iterdir()} <= stays


def assert_node_has_nothing_of_the_agent(installation: Installation) -> None:
    """But for files that a next agent takes up."""
    cluster, node = installation.cluster, installation.node
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


def test_label_removed_leaves_nothing(installation: Installation) -> None:
    """No other label selects the node: the agent stays until a pod's share is given back, then leaves."""
    cluster = installation.cluster
    installation.install()
    installation.label("mixed")
    agent = installation.ready_agent()["metadata"]["uid"]
    wait_sold(cluster, *SHARES["share"])
    start_pods(cluster, "share")
    switch(installation, None, "switching")
    assert installation.ready_agent()["metadata"]["uid"] == agent
    assert cluster.phase("share") == "Running"
    assert len(installation.node.daemons()) == 1

    cluster.delete("Pod", "share", grace_seconds=1)

    def gone() -> None:
        if left := installation.pods("agent"):
            status = json.dumps(left[0]["status"])[:1500]
            raise NotYet(lambda: status + installation.agent_log())

    eventually(gone, timeout=40, what="the agent is gone", interval=0.2)
    assert_node_has_nothing_of_the_agent(installation)


def test_refused_uninstall_heals(installation: Installation) -> None:
    """A pod holds an MPS share: nothing changes, and upgrade and uninstall work as ever."""
    cluster = installation.cluster
    installation.install()
    installation.label("mixed")
    first = installation.ready_agent()["metadata"]["uid"]
    wait_sold(cluster, *SHARES["share"])
    start_pods(cluster, "share")
    before, daemons = containers(cluster), installation.node.daemons()

    with pytest.raises(HelmRefused):
        installation.helm("uninstall", RELEASE, "--timeout=60s")
    (job,) = installation.pods("cleanup")
    words = cluster.logs(job["metadata"]["name"], "cleanup", namespace=NAMESPACE)
    assert f"default/share (node {cluster.node})" in words
    assert "uninstall again" in words
    assert installation.ready_agent()["metadata"]["uid"] == first

    installation.helm(*UPGRADE, "--set", "config.sampling.intervalSeconds=2", "--wait")
    installation.ready_agent(other_than=first)
    assert containers(cluster) == before
    assert installation.node.daemons() == daemons

    cluster.delete("Pod", "share", grace_seconds=1)
    installation.helm("uninstall", RELEASE, "--wait", "--timeout=60s")
    assert_nothing_is_left(installation)


def test_interrupted_cleanup_heals(installation: Installation) -> None:
    """The hook is killed while a node is out of service, and another has not answered."""
    cluster = installation.cluster
    installation.install()
    installation.label("mixed")
    agent = installation.ready_agent()["metadata"]
    wait_sold(cluster, *SHARES["whole"])
    start_pods(cluster, "whole")
    before = containers(cluster)
    with second_node(installation), ThreadPoolExecutor() as pool:
        # Short: killed, the hook takes nothing back, and the agents wait until its request ends.
        installation.helm(*UPGRADE, "--set", f"cleanup.timeoutSeconds={scaled(10):.0f}")
        uninstall = pool.submit(installation.helm, "uninstall", RELEASE, "--timeout=100s")
        wait_cleaned(installation)
        hook_process(cluster).send(signal.SIGKILL)
        with pytest.raises(HelmRefused):
            uninstall.result()
        # Long: asked to end, it takes its request back, or else the agents would stay away for ten minutes.
        installation.helm(*UPGRADE, "--set", "cleanup.timeoutSeconds=600")
        wait_sold(cluster, *SHARES["whole"])
        uninstall = pool.submit(installation.helm, "uninstall", RELEASE, "--timeout=100s")
        wait_cleaned(installation)
        (job,) = [each for each in installation.pods("cleanup") if each["status"]["phase"] == "Running"]
        cluster.delete("Pod", job["metadata"]["name"], namespace=NAMESPACE)
        with pytest.raises(HelmRefused):
            uninstall.result()
        wait_sold(cluster, *SHARES["whole"])
    healed = installation.ready_agent()
    assert healed["metadata"]["uid"] == agent["uid"]
    assert healed["status"]["containerStatuses"][0]["restartCount"] == 0
    assert containers(cluster) == before

    installation.helm("uninstall", RELEASE, "--wait", "--timeout=60s")
    assert_nothing_is_left(installation)


def switch(installation: Installation, mode: str | None, shown: str = "") -> None:
    """Label the node with a mode, and wait until it is in force, or `shown` is."""
    installation.label(mode)
    awaited = shown or mode

    def in_force() -> None:
        found = installation.cluster.get("Node", installation.cluster.node)["metadata"]["labels"]
        if found.get("gpu-node-agent.io/mode") != awaited:
            raise NotYet(json.dumps(found))

    eventually(in_force, timeout=40, what=f"mode {awaited}", interval=0.2)


def test_the_account_uses_exactly_its_rights(installation: Installation, audit: Path) -> None:
    """Each right has its moment; the rare ones are brought about here."""
    cluster, log = installation.cluster, AuditLog(audit)
    installation.install()
    installation.label("mixed")
    agent = installation.ready_agent()
    wait_sold(cluster, *SHARES["fraction"], *SHARES["share"])
    start_pods(cluster, *SHARES)
    log.wait(("nodes", "watch"), ("nodes", "patch"), ("nodes/status", "patch"))
    log.wait(("pods", "watch"), ("pods", "patch"), ("events", "create"))
    # The server has no streaming lists.
    log.wait(("nodes", "list"), ("pods", "list"))
    # What they say of limits.
    log.wait(("namespaces", "list"), ("namespaces", "watch"))

    # An event that happens twice is counted.
    delete_pods(cluster)
    for mode in ("pgpu", "mixed", "pgpu", "mixed"):
        switch(installation, mode)
    log.wait(("events", "patch"))

    assert not log.refused()

    # A pod that the watch has not shown: it shows none here.
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


def test_move_from_nvidia_plugin_and_back(installation: Installation) -> None:
    """The documented commands in order; pods with whole GPUs run through, and no GPU has two holders."""
    cluster = installation.cluster
    with moving.with_nvidia_plugin(installation):
        moving.hold(cluster, "before", 2)
        installation.install("--set-string=nodeSelector.gpu-agent=moved")
        moving.follow(installation, moving.MIGRATION, "Keep NVIDIA's plugin off single nodes")
        assert installation.pods("agent") == []

        moving.follow(installation, moving.MIGRATION, "One node to this agent")
        assert moving.plugin_pods(cluster) == 0
        moving.hold(cluster, "here", 3)
        assert "default/before" in command(installation, "status")
        running, taken = containers(cluster), moving.held(cluster)

        moving.follow(installation, moving.MIGRATION, "One node back")
        assert moving.plugin_pods(cluster) == 1
        assert installation.pods("agent") == []
        moving.hold(cluster, "after", 3)
        assert {**containers(cluster), **running} == containers(cluster)
        assert {**moving.held(cluster), **taken} == moving.held(cluster)
        assert len(frozenset().union(*moving.held(cluster).values())) == len(installation.node.machine.uuids)
        delete_pods(cluster)

        moving.in_the_wrong_order(installation)
        moving.hold(cluster, "again", len(installation.node.machine.uuids))
        delete_pods(cluster)
