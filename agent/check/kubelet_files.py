"""The kubelet by the node's files: its configuration, and who offers devices to it. Blocks."""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agent.check.host import HostFiles

# Where distributions put the kubelet's configuration, if its command line is not seen.
FILES = (
    "/var/lib/kubelet/config.yaml",  # kubeadm
    "/etc/kubernetes/kubelet/config.json",  # EKS, Amazon Linux 2023
    "/etc/kubernetes/kubelet/config.yaml",
    "/etc/kubernetes/kubelet/kubelet-config.json",  # EKS, Amazon Linux 2
    "/etc/kubernetes/kubelet-config.yaml",
    "/etc/kubernetes/kubelet.conf",  # OpenShift
    "/home/kubernetes/kubelet-config.yaml",  # GKE
    "/etc/default/kubeletconfig.json",  # AKS
)
# Drop-ins alone: in k3s and RKE2 the kubelet is a part of another program.
FOLDERS = (
    "/var/lib/rancher/k3s/agent/etc/kubelet.conf.d",
    "/var/lib/rancher/rke2/agent/etc/kubelet.conf.d",
)
POLICY = "topologyManagerPolicy"
CONNECT_SECONDS = 1.0
# Sockets by which other agents offer GPUs in the same folder.
FOREIGN_SOCKETS = {
    "nvidia-gpu.sock": "NVIDIA's device plugin",
    "nvidia.sock": "an NVIDIA device plugin",
    "vcore.sock": "gpu-manager",
    "vmemory.sock": "gpu-manager",
    "aliyungpushare.sock": "gpushare",
    "nvidia-vgpu.sock": "HAMi or Volcano vGPU",
}
# NVIDIA's DRA driver registers beside them, as every plugin of the kubelet's does.
FOREIGN_PLUGINS = {"gpu.nvidia.com-reg.sock": "NVIDIA's DRA driver"}


def topology_manager(host: HostFiles) -> tuple[str, str] | None:
    """(where it was found, Topology Manager policy); None: not known. The kubelet's default is none."""
    flags = host.flags("kubelet")
    if flags is not None:
        if policy := flags.get("topology-manager-policy"):
            return "the kubelet's command line", policy
        files = [file for file in (flags.get("config"),) if file]
        folders = [folder for folder in (flags.get("config-dir"),) if folder]
    else:
        files = [file for file in FILES if host.file(file)][:1]
        folders = [folder for folder in FOLDERS if any(host.files(folder, "*.conf"))]
        if not files and not folders:
            return None
    found: tuple[str, str] | None = None
    read = 0
    for file in (*files, *(each for folder in folders for each in host.files(folder, "*.conf"))):
        document = _configuration(host, file)
        read += document is not None
        if document and POLICY in document:
            found = file, str(document[POLICY])
    if found:
        return found
    if files and not read:
        return None  # it is there and cannot be read
    return (files or folders or ["the kubelet's command line"])[0], "none"


def _configuration(host: HostFiles, file: str) -> dict[str, Any] | None:
    text = host.text(file)
    try:
        found = yaml.safe_load(text) if text is not None else None
    except (ValueError, yaml.YAMLError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("kind") == "KubeletConfiguration" else None


@dataclass(frozen=True, slots=True)
class Foreign:
    socket: str
    owner: str
    listening: bool


def foreign_agents(device_plugins: Path, registry: Path) -> Iterator[Foreign]:
    """Those that have sockets in the kubelet's two folders for plugins."""
    for folder, known in ((device_plugins, FOREIGN_SOCKETS), (registry, FOREIGN_PLUGINS)):
        for name, owner in known.items():
            if (folder / name).exists():
                yield Foreign(name, owner, _listens(folder / name))


def _listens(path: Path) -> bool:
    """Whether somebody answers: a process that was killed leaves its socket behind."""
    try:
        folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return True  # not known: better named than passed over
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(CONNECT_SECONDS)
            # The path of a socket may be 107 bytes long, and the root is mounted anywhere.
            probe.connect(f"/proc/self/fd/{folder}/{path.name}")
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    finally:
        os.close(folder)
    return True
