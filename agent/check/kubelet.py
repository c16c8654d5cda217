"""Looks at the kubelet's side: version, folders, other agents, Topology Manager; at kernel and cgroups."""

import os
from collections.abc import Iterator
from pathlib import Path

from agent.check.host import HostFiles
from agent.check.kubelet_files import foreign_agents, topology_manager
from agent.check.software import CheckedNode
from agent.model.look import Look
from agent.model.modes import FOREIGN_VALUES
from agent.modes.desired import LABEL
from agent.settings import Settings

OLDEST_KUBELET = (1, 25)


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
    digits = facts.software.kubelet.removeprefix("v").split(".")
    version = tuple(int(part) for part in digits[:2] if part.isdigit())
    text = f"{facts.software.kubelet}, {facts.software.runtime}"
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
