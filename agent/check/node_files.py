"""What the files of a node say of its software, below the host's root as it is seen here. Blocks."""

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

TOOLKIT = ("nvidia-ctk", "nvidia-container-cli", "nvidia-container-runtime")
FOLDERS = ("usr/bin", "usr/local/bin", "usr/local/nvidia/toolkit", "run/current-system/sw/bin")
VERSION_SECONDS = 5.0
CONTAINERD = ("etc/containerd/config.toml", "var/lib/rancher/k3s/agent/etc/containerd/config.toml")
CRIO = "etc/crio"
DOCKER = "etc/docker/daemon.json"
KUBELET = (
    "var/lib/kubelet/config.yaml",
    "etc/kubernetes/kubelet/config.yaml",
    "etc/kubernetes/kubelet-config.yaml",
)
# Sockets by which other agents offer GPUs in the same folder.
FOREIGN_SOCKETS = {
    "nvidia-gpu.sock": "NVIDIA's device plugin",
    "nvidia.sock": "an NVIDIA device plugin",
    "vcore.sock": "gpu-manager",
    "vmemory.sock": "gpu-manager",
    "aliyungpushare.sock": "gpushare",
    "nvidia-vgpu.sock": "HAMi or Volcano vGPU",
}


def toolkit_version(root: Path) -> tuple[str, tuple[int, ...] | None] | None:
    """NVIDIA's container toolkit: the program found, its version where it tells one; None: none is there."""
    for name in TOOLKIT:
        for folder in FOLDERS:
            program = root / folder / name
            if os.access(program, os.X_OK):
                return name, _version_of(program, root)
    return None


def _version_of(program: Path, root: Path) -> tuple[int, ...] | None:
    inside = f"/{program.relative_to(root)}"
    chroot = None if root == Path("/") else lambda: os.chroot(root)
    try:
        done = subprocess.run(
            [inside, "--version"],
            preexec_fn=chroot,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=VERSION_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\b(\d+)\.(\d+)(?:\.(\d+))?", done.stdout)
    return tuple(int(part) for part in found.groups() if part) if found else None


def default_runtime(root: Path) -> tuple[str, str] | None:
    """(configuration file, name of the default runtime) of containerd, Docker or CRI-O; None: not known."""
    for name in CONTAINERD:
        if (found := _toml(root / name)) is not None:
            runtime = next(_values(found, "default_runtime_name"), "runc")
            return f"/{name}", str(runtime)
    if (root / DOCKER).is_file():
        try:
            docker = json.loads((root / DOCKER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return f"/{DOCKER}", str(docker.get("default-runtime", "runc"))
    for file in (root / CRIO / "crio.conf", *sorted((root / CRIO / "crio.conf.d").glob("*.conf"))):
        for runtime in _values(_toml(file) or {}, "default_runtime"):
            return f"/{file.relative_to(root)}", str(runtime)
    return None


def topology_manager(root: Path) -> tuple[str, str] | None:
    """(kubelet's configuration file, Topology Manager policy); None: not known."""
    for name in KUBELET:
        try:
            found = yaml.safe_load((root / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        if isinstance(found, dict) and found.get("kind") == "KubeletConfiguration":
            return f"/{name}", str(found.get("topologyManagerPolicy", "none"))
    return None


def foreign_plugins(device_plugins: Path) -> dict[str, str]:
    """Sockets of other agents that offer GPUs, with whose they are."""
    if not device_plugins.is_dir():
        return {}
    there = {entry.name for entry in device_plugins.iterdir()}
    return {name: owner for name, owner in FOREIGN_SOCKETS.items() if name in there}


def cgroup_version(folder: Path) -> int | None:
    """1 or 2; None: no cgroups are mounted there."""
    if (folder / "cgroup.controllers").exists():
        return 2
    return 1 if (folder / "memory").is_dir() or (folder / "cpu").is_dir() else None


def _toml(file: Path) -> dict[str, Any] | None:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return None


def _values(block: object, key: str) -> Iterator[object]:
    """All values of a key, wherever it stands: its place differs between versions of the file."""
    if isinstance(block, dict):
        if key in block:
            yield block[key]
        for inner in block.values():
            yield from _values(inner, key)
