"""Which specifications let a pod around its limits, and which do not."""

from typing import Any

import msgspec
import pytest

from agent.model.pod import Pod
from agent.vgpu.avoidance import FILES, FOLDERS, ways_around

MEMORY = "tencent.com/vcuda-memory"
OURS = (*FOLDERS, "/var/lib/gpu-node-agent", "/run/gpu-node-agent", "/var/run/cdi", "/var/lib/kubelet")


def ways(spec: dict[str, Any], main: dict[str, Any], other: dict[str, Any] | None = None) -> tuple[str, ...]:
    """Of a pod as the API server writes it; `main` asks for memory of a GPU, `other` does not."""
    containers = [{"name": "main", "resources": {"limits": {MEMORY: "4"}}, **main}]
    containers += [{"name": "other", **other}] if other else []
    text = msgspec.json.encode({"metadata": {"name": "p"}, "spec": {**spec, "containers": containers}})
    return ways_around(msgspec.json.decode(text, type=Pod), MEMORY, FILES, OURS)


def security(**context: Any) -> dict[str, Any]:
    return {"securityContext": context}


def volume(path: str, **kind: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A volume of a pod, and its mount in a container at `path`."""
    return {"volumes": [{"name": "v", **kind}]}, {"volumeMounts": [{"name": "v", "mountPath": path}]}


@pytest.mark.parametrize("other", [False, True], ids=["its own", "another's"])
@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (security(privileged=True), "is privileged"),
        (security(capabilities={"add": ["SYS_ADMIN"]}), "has the capability SYS_ADMIN"),
        (security(capabilities={"add": ["CAP_SYS_ADMIN", "NET_ADMIN"]}), "has the capability SYS_ADMIN"),
        (security(capabilities={"add": ["all"]}), "has the capability ALL"),
    ],
)
def test_rights_of_any_container_count(context: dict[str, Any], expected: str, other: bool) -> None:
    found = ways({}, {} if other else context, context if other else None)
    assert found == (f"container {'other' if other else 'main'} {expected}",)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/etc",
        "/var",
        "/run/gpu-node-agent/limits",
        "/var/run/gpu-node-agent",
        "/var/lib/gpu-node-agent/../gpu-node-agent/lib",
        "//var/lib/kubelet/device-plugins",
        "/run",
        "/var/run/containerd/containerd.sock",
        "/proc/1/root",
        "/sys",
    ],
)
def test_folders_of_the_host_that_limits_lie_in_or_are_made_from_count(path: str) -> None:
    spec, mounts = volume("/host", hostPath={"path": path})
    assert ways(spec, {}, mounts) == (f"the pod mounts {path} of the host",)
    assert ways(spec, {}) == ()  # nobody mounts it


@pytest.mark.parametrize("path", ["/etc/localtime", "/data", "/var/lib/gpu-node-agents", "/runs", "/mnt/etc"])
def test_other_folders_of_the_host_do_not(path: str) -> None:
    spec, mounts = volume("/host", hostPath={"path": path})
    assert ways(spec, mounts) == ()


@pytest.mark.parametrize(
    "path", ["/etc", "/etc/ld.so.preload", "/usr", "/usr/lib/", "/usr/lib/gpu-node-agent/limits"]
)
def test_volumes_over_the_files_of_limits_count_in_their_container_alone(path: str) -> None:
    spec, mounts = volume(path, emptyDir={})
    assert ways(spec, mounts) == (f"container main mounts a volume at {path}",)
    assert ways(spec, {}, mounts) == ()


@pytest.mark.parametrize("path", ["/etc/hosts", "/usr/lib/python3", "/dev/shm", "/var/run/secrets"])
def test_other_volumes_do_not(path: str) -> None:
    spec, mounts = volume(path, configMap={"name": "c"})
    assert ways(spec, mounts) == ()


def test_process_namespaces() -> None:
    assert ways({"hostPID": True}, {}) == ("the pod has hostPID",)
    # Processes of one's own pod can be reached without it, too, and none of them lifts a cap by that.
    assert ways({"shareProcessNamespace": True, "hostIPC": True}, {}) == ()


def test_a_plain_pod_has_none_and_a_long_list_is_cut() -> None:
    assert ways({}, security(runAsUser=0, capabilities={"drop": ["ALL"]})) == ()
    names = ["ALL", "SYS_ADMIN", "SYS_MODULE", "SYS_RAWIO"]
    found = ways({"hostPID": True}, security(privileged=True, capabilities={"add": names}))
    assert len(found) == 5
    assert found[-1] == "and 2 more"
