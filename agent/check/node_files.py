"""What the files of a node say of its software, below the host's root as it is seen here. Blocks."""

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TOOLKIT = ("nvidia-ctk", "nvidia-container-cli", "nvidia-container-runtime")
FOLDERS = ("usr/bin", "usr/local/bin", "usr/local/nvidia/toolkit", "run/current-system/sw/bin")
VERSION_SECONDS = 5.0
CONTAINERD = (
    "etc/containerd/config.toml",
    "var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "var/lib/rancher/rke2/agent/etc/containerd/config.toml",
)
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


@dataclass(frozen=True, slots=True)
class Runtimes:
    """What a node's container runtime starts containers with, by its configuration files."""

    file: str  # the one that had the last word
    default: str
    names: frozenset[str] = frozenset()  # what a RuntimeClass may lead to, as far as it is told


def runtimes(root: Path) -> Runtimes | None:
    """Of containerd, Docker or CRI-O, whichever is found first; None: not known."""
    for name in CONTAINERD:
        if (found := _toml(root / name)) is not None:
            # nvidia-ctk writes a file of its own since 1.18, which comes in by `imports`.
            return _merged(root, [root / name, *_imported(root, root / name, found)], "default_runtime_name")
    if (root / DOCKER).is_file():
        try:
            docker = json.loads((root / DOCKER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        names = docker.get("runtimes")
        known = frozenset(names) if isinstance(names, dict) else frozenset()
        return Runtimes(f"/{DOCKER}", str(docker.get("default-runtime", "runc")), known)
    files = [root / CRIO / "crio.conf", *sorted((root / CRIO / "crio.conf.d").glob("*.conf"))]
    found_files = [file for file in files if any(_values(_toml(file) or {}, "default_runtime"))]
    return _merged(root, files, "default_runtime") if found_files else None


def _merged(root: Path, files: list[Path], key: str) -> Runtimes:
    """Files that go over each other: the last that names a default wins."""
    where, default, names = files[0], "runc", set[str]()
    for file in files:
        document = _toml(file) or {}
        for value in _values(document, key):
            where, default = file, str(value)
        for block in _values(document, "runtimes"):
            names |= set(block) if isinstance(block, dict) else set()
    return Runtimes(f"/{where.relative_to(root)}", default, frozenset(names))


def _imported(root: Path, file: Path, document: dict[str, Any]) -> Iterator[Path]:
    patterns = document.get("imports")
    for pattern in patterns if isinstance(patterns, list) else []:
        # Relative ones start at the file that names them.
        start = root if str(pattern).startswith("/") else file.parent
        if wanted := str(pattern).strip("/"):
            yield from sorted(start.glob(wanted))


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
