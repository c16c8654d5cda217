"""The container runtime and NVIDIA's container toolkit, by a node's files. Blocks."""

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.check.host import Host

TOOLKIT = ("nvidia-ctk", "nvidia-container-cli", "nvidia-container-runtime")
FOLDERS = ("/usr/bin", "/usr/local/bin", "/usr/local/nvidia/toolkit", "/run/current-system/sw/bin")
VERSION_SECONDS = 5.0
CONTAINERD = (
    "/etc/containerd/config.toml",
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
)
CRIO, CRIO_FOLDER = "/etc/crio/crio.conf", "/etc/crio/crio.conf.d"
DOCKER = "/etc/docker/daemon.json"


def toolkit_version(host: Host) -> tuple[str, tuple[int, ...] | None] | None:
    """NVIDIA's container toolkit: the program found, its version where it has one; None: none is there."""
    for name in TOOLKIT:
        for folder in FOLDERS:
            program = host.file(f"{folder}/{name}")
            if program and host.root and os.access(program, os.X_OK):
                return name, _version_of(program, host.root)
    return None


def _version_of(program: Path, root: Path) -> tuple[int, ...] | None:
    inner = f"/{program.relative_to(root)}"
    # In its own root, where its libraries are; without the right to that, with what is found here.
    return (root != Path("/") and _asked(inner, root)) or _asked(str(program), None)


def _asked(program: str, root: Path | None) -> tuple[int, ...] | None:
    try:
        done = subprocess.run(
            [program, "--version"],
            preexec_fn=(lambda: os.chroot(root)) if root else None,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=VERSION_SECONDS,
            check=False,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    found = re.search(r"\b(\d+)\.(\d+)(?:\.(\d+))?", done.stdout)
    return tuple(int(part) for part in found.groups() if part) if found else None


@dataclass(frozen=True, slots=True)
class Runtimes:
    """The low-level runtimes of a node's container runtime, by its configuration files."""

    file: str  # the one that had the last word
    default: str
    names: frozenset[str] = frozenset()  # what a RuntimeClass may lead to, as far as it is known
    cdi: bool | None = None  # containerd's switch; None: as its version has it
    cdi_folders: tuple[str, ...] | None = None  # where it looks for specifications; None: where all do


def runtimes(host: Host) -> Runtimes | None:
    """Of containerd, Docker or CRI-O, whichever is found first; None: no configuration is seen."""
    flags = host.flags("containerd") or {}
    named = [flags[flag] for flag in ("config", "c") if flags.get(flag)]
    for name in (*named, *CONTAINERD):
        if (found := _toml(host, name)) is not None:
            # nvidia-ctk writes a file of its own since 1.18, which comes in by `imports`.
            return _merged(host, [name, *_imported(host, name, found)], "default_runtime_name")
    if (text := host.text(DOCKER)) is not None:
        return _docker(text)
    files = [CRIO, *host.files(CRIO_FOLDER, "*.conf")]
    known = [file for file in files if any(_values(_toml(host, file) or {}, "default_runtime"))]
    return _merged(host, files, "default_runtime") if known else None


def _docker(text: str) -> Runtimes | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    names = found.get("runtimes")
    known = frozenset(names) if isinstance(names, dict) else frozenset()
    return Runtimes(DOCKER, str(found.get("default-runtime", "runc")), known)


def _merged(host: Host, files: list[str], key: str) -> Runtimes:
    """Files that go over each other: the last that names a default wins."""
    where, default, names = files[0], "runc", set[str]()
    cdi: bool | None = None
    folders: tuple[str, ...] | None = None
    for file in files:
        document = _toml(host, file) or {}
        for value in _values(document, key):
            where, default = file, str(value)
        for block in _values(document, "runtimes"):
            names |= set(block) if isinstance(block, dict) else set()
        for value in _values(document, "enable_cdi"):
            cdi = bool(value)
        for value in _values(document, "cdi_spec_dirs"):
            folders = tuple(str(each) for each in value) if isinstance(value, list) else folders
    return Runtimes(where, default, frozenset(names), cdi, folders)


def _imported(host: Host, file: str, document: dict[str, Any]) -> Iterator[str]:
    patterns = document.get("imports")
    for pattern in patterns if isinstance(patterns, list) else []:
        # Relative ones start at the file that names them.
        folder, _, name = os.path.join(os.path.dirname(file), str(pattern)).rpartition("/")  # noqa: PTH118, PTH120
        if name:
            yield from host.files(folder, name)


def _toml(host: Host, file: str) -> dict[str, Any] | None:
    text = host.text(file)
    try:
        return None if text is None else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return None


def _values(block: object, key: str) -> Iterator[object]:
    """All values of a key, wherever it stands: its place differs between versions of the file."""
    if isinstance(block, dict):
        if key in block:
            yield block[key]
        for inner in block.values():
            yield from _values(inner, key)
