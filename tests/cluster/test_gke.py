"""The preset of GKE on a node with the layout of Container-Optimized OS: /var/lib is mounted noexec.

Of Google's there is nothing here: the layout is that of its documents and of its driver installer's manifest.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.injection.toolkit import FILE
from tests.cluster import manifests, toolkit
from tests.cluster.build import agent_image
from tests.cluster.build.libc_images import GLIBC_IMAGE, build
from tests.cluster.install_fixtures import an_installation, audit, open_cluster
from tests.cluster.installation import Installation
from tests.cluster.rig import Cluster
from tests.cluster.test_install import SHARES, switch, wait_sold
from tests.nvml_double.build import STATE_VARIABLE

__all__ = ["audit", "open_cluster"]

BIN = "/home/kubernetes/bin"
# In the namespace of the cluster, with which it ends. $1: a folder with the node's devices and its driver.
AS_ON_COS = f"""
set -e
mount --rbind /var/lib /var/lib
mount -o remount,bind,noexec /var/lib
mount -t tmpfs gna /home
mkdir -p {BIN}
cp -a "$1/nvidia" {BIN}/
devices=$(mktemp -d)
mount -t tmpfs -o mode=755 gna "$devices"
for each in null zero full random urandom tty kmsg; do
    [ ! -e /dev/$each ] || cp -a /dev/$each "$devices"
done
for each in pts shm mqueue; do
    [ ! -d /dev/$each ] || {{ mkdir "$devices/$each"; mount --rbind /dev/$each "$devices/$each"; }}
done
ln -s pts/ptmx "$devices/ptmx"
ln -s /proc/self/fd "$devices/fd"
cp -a "$1"/dev/nvidia* "$devices"
mount --rbind "$devices" /dev
"""


class Gke(Installation):
    """By the preset; besides only where the machine's simulated GPUs are."""

    def values(self) -> dict[str, Any]:
        repository, _, tag = agent_image.IMAGE.rpartition(":")
        machine = str(self.node.folder / "machine")
        return {
            "preset": "gke",
            "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
            "hostNetwork": True,
            "cleanup": {"timeoutSeconds": 60},
            "extraEnv": [{"name": STATE_VARIABLE, "value": machine}],
            "extraVolumes": [{"name": "machine", "hostPath": {"path": machine, "type": "File"}}],
            "extraVolumeMounts": [{"name": "machine", "mountPath": machine}],
        }


@pytest.fixture
def gke(open_cluster: Cluster) -> Iterator[Installation]:
    for archive in build(open_cluster.parts.program("busybox")):
        open_cluster.import_image(archive)
    with an_installation(open_cluster, Gke) as made:
        node = made.node
        (open_cluster.cdi_dir / "nvidia.json").unlink()
        root = node.folder / "driver"
        toolkit.make_driver_root(root, node.machine.profile.driver_version, node.library)
        (node.folder / "nvidia" / "bin").mkdir(parents=True)
        (root / toolkit.LIBRARIES).rename(node.folder / "nvidia" / "lib64")
        open_cluster.namespace.run(["sh", "-c", AS_ON_COS, "sh", str(node.folder)])
        yield made


def started(cluster: Cluster, name: str) -> None:
    container = {**manifests.container("main", limits=SHARES[name]), "image": GLIBC_IMAGE}
    cluster.apply(manifests.pod(name, container))
    cluster.wait_pod(name)


def test_gke_preset_gives_gpus(gke: Installation) -> None:
    """A whole GPU and a fraction: device nodes, driver, hook and library of limits, none of it from /var."""
    cluster = gke.cluster
    gke.install()
    gke.label("pgpu")
    gke.ready_agent()
    wait_sold(cluster, "nvidia.com/gpu")
    started(cluster, "whole")

    def shell(pod: str, script: str) -> str:
        return cluster.exec(pod, "main", ["sh", "-c", script])

    nodes = set(shell("whole", "find /dev -name 'nvidia*' -type c").split())
    assert {"/dev/nvidiactl", "/dev/nvidia-uvm"} < nodes
    assert len(nodes) == 3
    shell("whole", "/bin/probe")  # which is linked with libcuda: the loader knows it by the hook
    specification = (cluster.cdi_dir / FILE).read_text()
    assert f"{BIN}/gpu-node-agent/bin/nvidia-cdi-hook" in specification
    assert f"{BIN}/nvidia/lib64/" in specification
    assert "/var/" not in specification

    switch(gke, "vgpu", "switching")
    wait_sold(cluster, "tencent.com/vcuda-core")
    started(cluster, "fraction")
    mounts = shell("fraction", "cat /proc/self/mountinfo")
    assert "/kubernetes/bin/gpu-node-agent/lib/" in mounts
    state = Path(f"/proc/{cluster.namespace.init.pid}/root{BIN}/gpu-node-agent")
    assert {path.name for path in state.iterdir()} >= {"bin", "lib", "mode"}
