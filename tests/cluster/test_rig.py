"""The rig itself: what the other tests of this folder stand on."""

from collections.abc import Iterator

import pytest

from tests.cluster.api import ApiError
from tests.cluster.manifests import container, pod
from tests.cluster.rig import Cluster
from tests.cluster.waiting import NotYet, RigError, RigTimeout, eventually


@pytest.fixture
def running_pod(cluster: Cluster) -> Iterator[str]:
    """A running pod with the container `main`, gone again after the test."""
    cluster.apply(pod("rig-pod", container("main", env={"COLOUR": "blue"})))
    cluster.wait_pod("rig-pod")
    yield "rig-pod"
    cluster.delete("Pod", "rig-pod")


def test_node_is_ready_and_runs_the_pinned_version(cluster: Cluster) -> None:
    info = cluster.get("Node", cluster.node)["status"]["nodeInfo"]
    assert info["kubeletVersion"] == f"v{cluster.parts.kubernetes_version}"
    assert info["containerRuntimeVersion"].startswith("containerd://2.")


def test_pod_runs_and_exec_reaches_its_container(cluster: Cluster, running_pod: str) -> None:
    assert cluster.exec(running_pod, "main", ["sh", "-c", "echo $COLOUR"]) == "blue\n"
    with pytest.raises(RigError, match="exit code"):
        cluster.exec(running_pod, "main", ["false"])


def test_logs_are_readable_after_the_end(cluster: Cluster) -> None:
    cluster.apply(pod("rig-short", container("main", ["sh", "-c", "echo done; exit 0"])))
    try:
        cluster.wait_pod("rig-short", "Succeeded")
        assert cluster.logs("rig-short", "main") == "done\n"
    finally:
        cluster.delete("Pod", "rig-short")


def test_waiting_for_the_wrong_end_fails_at_once(cluster: Cluster) -> None:
    cluster.apply(pod("rig-fails", container("main", ["false"])))
    try:
        with pytest.raises(RigError, match="Failed") as caught:
            cluster.wait_pod("rig-fails", "Succeeded")
        assert not isinstance(caught.value, RigTimeout)
    finally:
        cluster.delete("Pod", "rig-fails")


def test_kubelet_restart_keeps_the_pod(cluster: Cluster, running_pod: str) -> None:
    before = cluster.get("Pod", running_pod)["status"]["containerStatuses"][0]
    first = cluster.pid("kubelet")
    cluster.restart_kubelet(down_seconds=0.5)
    assert cluster.pid("kubelet") != first
    eventually(lambda: _exec_answers(cluster, running_pod), timeout=20, what="exec after the restart")
    after = cluster.get("Pod", running_pod)["status"]["containerStatuses"][0]
    assert after["containerID"] == before["containerID"]
    assert after["restartCount"] == 0
    assert cluster.podresources_socket.is_socket()


def _exec_answers(cluster: Cluster, name: str) -> None:
    try:
        cluster.exec(name, "main", ["true"], timeout=10)
    except RigError as error:
        raise NotYet(str(error)) from error


def test_api_server_can_be_away_for_a_while(cluster: Cluster, running_pod: str) -> None:
    cluster.stop("api")
    with pytest.raises(OSError, match="refused"):
        cluster.get("Node", cluster.node)
    cluster.start("api")

    def answers() -> None:
        try:
            cluster.api.request("GET", "/readyz")
        except (OSError, ApiError) as error:
            raise NotYet(str(error)) from error

    eventually(answers, timeout=30, what="API server back")
    assert cluster.phase(running_pod) == "Running"


def test_pods_see_nothing_of_the_hosts_runtime_folders(cluster: Cluster) -> None:
    """Host paths of pods are those of the namespace: /run is the cluster's own."""
    volume = {"name": "run", "hostPath": {"path": "/run/rig-test", "type": "DirectoryOrCreate"}}
    mount = {
        "volumeMounts": [{"name": "run", "mountPath": "/mnt"}]
    }  # a volume that nobody mounts is not made
    cluster.apply(pod("rig-host", container("main") | mount, volumes=[volume]))
    try:
        cluster.wait_pod("rig-host")
        assert (cluster.layout.run / "rig-test").is_dir()
    finally:
        cluster.delete("Pod", "rig-host")
