"""Cgroup paths as kubelets and runtimes write them."""

import pytest

from agent.model.cgroup import ContainerRef, container_of, kubelet_of

UID = "3fa85f64-5717-4562-b3fc-2c963f66afa6"
UNDER = UID.replace("-", "_")
ID = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "text",
    [
        f"0::/kubepods/burstable/pod{UID}/{ID}",
        f"0::/kubepods/pod{UID}/{ID}",
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDER}.slice/cri-containerd-{ID}.scope",
        f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UNDER}.slice/crio-{ID}.scope",
        f"12:pids:/kubepods/besteffort/pod{UID}/{ID}\n11:cpu,cpuacct:/kubepods/besteffort/pod{UID}/{ID}",
        f"9:name=systemd:/user.slice\n8:memory:/gna/kubepods/besteffort/pod{UID}/{ID}\n0::/",
        # containerd with the systemd driver on cgroup v1
        f"5:devices:/kubepods-besteffort-pod{UNDER}.slice:cri-containerd:{ID}",
        # a process that made a cgroup of its own inside the container
        f"0::/kubepods/burstable/pod{UID}/{ID}/init.scope",
    ],
)
def test_container_is_found(text: str) -> None:
    assert container_of(text) == ContainerRef(UID, ID)


def test_static_pods_have_a_uid_of_their_own_kind() -> None:
    uid = "a1b2c3d4" * 4
    assert container_of(f"0::/kubepods/burstable/pod{uid}/{ID}") == ContainerRef(uid, ID)


@pytest.mark.parametrize(
    "text", ["", "0::/", "0::/system.slice/containerd.service", f"0::/docker/{ID}", "0::/kubepods/burstable"]
)
def test_processes_of_the_host_are_in_no_container(text: str) -> None:
    assert container_of(text) is None


def test_the_pods_sandbox_level_has_no_container() -> None:
    assert container_of(f"0::/kubepods/burstable/pod{UID}") == ContainerRef(UID, "")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (f"0::/kubepods/burstable/pod{UID}/{ID}", ""),
        (f"0::/kubepods.slice/kubepods-pod{UNDER}.slice/cri-containerd-{ID}.scope", ""),
        (f"0::/gna/kubepods/pod{UID}/{ID}", "/gna"),
        # From a cgroup namespace: of the same kind, of another, with the driver cgroupfs.
        (f"0::/../../kubepods-burstable-pod{UNDER}.slice/cri-containerd-{ID}.scope", ""),
        (f"0::/../../../kubepods-besteffort.slice/kubepods-besteffort-pod{UNDER}.slice/{ID}.scope", ""),
        (f"0::/../../pod{UID}/{ID}", ""),
        # A node of kind, and a cluster inside a pod, which is that pod's.
        (
            f"0::/docker/{ID}/kubelet.slice/kubelet-kubepods.slice/x-pod{UNDER}.slice",
            f"/docker/{ID}/kubelet.slice/kubelet-",
        ),
        (f"0::/../../../docker/{ID}/kubelet/kubepods/pod{UID}/{ID}", f"/docker/{ID}/kubelet"),
        (f"0::/kubepods/pod{UID}/{ID}/docker/{ID}/kubelet/kubepods/pod{UID}/{ID}", ""),
        ("0::/system.slice/containerd.service", None),
        ("0::/", None),
    ],
)
def test_each_kubelet_has_a_place_of_its_own(text: str, place: str | None) -> None:
    assert kubelet_of(text) == place
