"""Looks at the kubelet's side: the Node object, version, folders, other agents, Topology Manager, kernel."""

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agent.check.host import HostFiles
from agent.cluster.api import ApiError, connect
from agent.cluster.lean import NoClusterAccess
from agent.cluster.node import ApiNode, NodeInfo, read_node
from agent.model.look import Look
from agent.model.modes import FOREIGN_VALUES, OFFERED_MODES
from agent.modes.desired import LABEL
from agent.node.conditions import MODE_LABEL
from agent.settings import ClusterSettings, Settings

# A node by its Node object: versions, and the resources on offer there.

OFF = (None, "none")  # the label of the mode in force while the agent offers nothing


@dataclass(frozen=True, slots=True)
class CheckedNode:
    software: NodeInfo
    labels: Mapping[str, str] = field(default_factory=dict)
    offered: tuple[str, ...] = ()  # resources by which GPUs can be asked for there

    @property
    def offered_by_others(self) -> tuple[str, ...]:
        """Resources that are on offer while no agent of ours offers any."""
        return self.offered if self.labels.get(MODE_LABEL) in OFF else ()


class NodeNotRead(Exception):
    """The Node object cannot be read; the text says why."""


async def node_facts(cluster: ClusterSettings) -> CheckedNode:
    """Ask the API server. Raises NodeNotRead."""
    if cluster.access == "off":
        raise NodeNotRead("cluster.access is off")
    name = cluster.own_node
    try:
        async with await connect(Path(cluster.kubeconfig) if cluster.kubeconfig else None) as api:
            node = await read_node(api, name)
    except (NoClusterAccess, ApiError) as error:
        raise NodeNotRead(str(error)) from error
    if node is None:
        raise NodeNotRead(f"there is no node {name}; cluster.nodeName names another one")
    return facts_of(node)


def facts_of(node: ApiNode) -> CheckedNode:
    """The facts of a Node object that was read."""
    ours = {resource for mode in OFFERED_MODES for resource in mode.resources}
    # Not capacity: the kubelet keeps that for minutes when an agent has gone.
    amounts = node.status.allocatable
    offered = sorted(name for name in ours & set(amounts) if amounts[name] != "0")
    return CheckedNode(node.status.node_info, node.metadata.labels, tuple(offered))


# Looks at the kubelet's side: version, folders, other agents, Topology Manager; at kernel and cgroups.

OLDEST_KUBELET = (1, 25)
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
FOLDERS = ("/var/lib/rancher/k3s/agent/etc/kubelet.conf.d", "/var/lib/rancher/rke2/agent/etc/kubelet.conf.d")
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


def look_at_kubelet(
    settings: Settings, host: HostFiles, facts: CheckedNode | None, unread: str
) -> Iterator[Look]:
    """`unread` says why there are no facts. Blocks."""
    yield _version(facts, unread)
    kubelet = host.folder(settings.kubelet.root)
    for path, use in (
        (kubelet / "plugins_registry", "registration"),
        (kubelet / "pod-resources" / "kubelet.sock", "who holds what"),
    ):
        if path.exists():
            yield Look.ok("kubelet's folders", f"{path} ({use})")
        else:
            text = f"{path} ({use}) is not there; set kubelet.root to the kubelet's --root-dir"
            yield Look.failed("kubelet's folders", text)
    yield from _other_agents(settings, host, facts, unread)
    yield _topology(host)


def _version(facts: CheckedNode | None, unread: str) -> Look:
    if facts is None:
        return Look.unknown("kubelet", f"its version is in the Node object: {unread}")
    digits = facts.software.kubelet_version.removeprefix("v").split(".")
    version = tuple(int(part) for part in digits[:2] if part.isdigit())
    text = f"{facts.software.kubelet_version}, {facts.software.container_runtime_version}"
    if version < OLDEST_KUBELET:
        return Look.failed("kubelet", f"{text}: Kubernetes 1.25 or later is needed")
    return Look.ok("kubelet", text)


def _other_agents(
    settings: Settings, host: HostFiles, facts: CheckedNode | None, unread: str
) -> Iterator[Look]:
    subject = "other agents"
    remedy = "the same GPUs would be given twice: take it off this node first (docs/migration.md)"
    seen = False
    folder = host.folder(settings.device_plugins_folder)
    for each in foreign_agents(folder, host.folder(settings.kubelet.root) / "plugins_registry"):
        seen = True
        if each.listening:
            yield Look.failed(subject, f"{each.owner} listens at {each.socket}: {remedy}")
        else:
            text = f"{each.socket} of {each.owner} is there and nobody listens: the agent has ended"
            yield Look.warning(subject, f"{text}; a restart of the kubelet removes it")
    if facts and (label := FOREIGN_VALUES.get(facts.labels.get(LABEL, ""))):
        seen = True
        yield Look.failed(subject, f"the label {LABEL} gives this node to {label}: {remedy}")
    if facts and (offered := facts.offered_by_others):
        seen = True
        text = f"{', '.join(offered)} on offer, and not by an agent of this product"
        yield Look.failed(subject, f"{text}; {remedy}")
    if not seen and facts is None:
        yield Look.unknown(subject, f"the resources on offer here are in the Node object: {unread}")
    elif not seen:
        yield Look.ok(subject, "none offers GPUs here")


def _topology(host: HostFiles) -> Look:
    subject = "Topology Manager"
    found = topology_manager(host)
    if found is None:
        text = "the kubelet's configuration was not found or cannot be read"
        if host.root is None:
            text = "the kubelet's configuration cannot be seen from here (--host-root)"
        return Look.unknown(subject, f"{text}; with its policy none, NUMA is not kept")
    where, policy = found
    if policy == "none":
        return Look.warning(
            subject,
            f"policy none, by {where}: hints about NUMA do nothing; topologyManagerPolicy: "
            "best-effort keeps CPUs and GPUs together",
        )
    return Look.ok(subject, f"policy {policy}, by {where}")


def look_at_kernel(settings: Settings, host: HostFiles) -> Iterator[Look]:
    """Kernel and cgroups. Blocks."""
    yield Look.ok("kernel", f"{os.uname().release}, {os.uname().machine}")
    folder = host.folder("/sys/fs/cgroup") if host.named else Path(settings.host.cgroups)
    version = cgroup_version(folder)
    if version == 1:
        text = "the driver's own memory limits (r615) need version 2, and kubelets from 1.35 on want it, too"
        yield Look.warning("cgroups", f"version 1: {text}")
    elif version is None:
        yield Look.unknown("cgroups", f"none at {folder}")
    else:
        yield Look.ok("cgroups", f"version {version}")


def cgroup_version(folder: Path) -> int | None:
    """1 or 2; None: no cgroups are mounted there."""
    if (folder / "cgroup.controllers").exists():
        return 2
    return 1 if (folder / "memory").is_dir() or (folder / "cpu").is_dir() else None


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
                yield Foreign(name, owner, listens(folder / name))


def listens(path: Path) -> bool:
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
