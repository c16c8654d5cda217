"""The node's own files, as far as they are seen: its file system, the container runtime, the toolkit."""

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.kit.files import inside, read_text
from agent.settings import Settings

# The node's own file system, as far as it is seen from where the check runs.

LONGEST_FILE = 1 << 20  # configuration files of runtimes and kubelets


@dataclass(frozen=True, slots=True)
class HostFiles:
    """Paths are the node's own. `root` is None where the check sees a container's files only."""

    root: Path | None
    # Whether the folders of the configuration, too, are the node's own paths and not mounted here as such.
    named: bool = False

    def folder(self, path: str | Path) -> Path:
        """A folder of the configuration, as seen from here. Raises OSError for a loop of links."""
        return inside(self.root, path) if self.named and self.root else Path(path)

    def file(self, path: str | Path) -> Path | None:
        """A file of the node as seen from here; None: there is none, or the root is not seen."""
        if self.root is None:
            return None
        try:
            found = inside(self.root, path)
            return found if found.is_file() else None
        except OSError:
            return None

    def text(self, path: str | Path) -> str | None:
        """Its content; None: it cannot be read."""
        found = self.file(path)
        try:
            return read_text(found, LONGEST_FILE) if found else None
        except (OSError, UnicodeDecodeError):
            return None

    def files(self, folder: str, pattern: str) -> Iterator[str]:
        """Paths of the files in a folder that fit a pattern, in the order of their names."""
        if self.root is None:
            return
        try:
            names = sorted(each.name for each in inside(self.root, folder).glob(pattern))
        except (OSError, ValueError, NotImplementedError):
            return
        yield from (f"{folder.rstrip('/')}/{name}" for name in names)

    def flags(self, program: str) -> Mapping[str, str] | None:
        """The options that a program of the node's own runs with; None: it is not seen to run.

        Only children of process 1 count, and those from outside (0) where the node is itself a container:
        processes of containers may have any name and any options.
        """
        for process in self._processes():
            try:
                words = (process / "cmdline").read_bytes().decode().split("\0")
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            except (OSError, UnicodeDecodeError, IndexError):
                continue
            if Path(words[0]).name == program and parent in ("0", "1"):
                return _options(words[1:])
        return None

    def _processes(self) -> Iterator[Path]:
        if self.root is None:
            return
        try:
            yield from (each for each in (self.root / "proc").iterdir() if each.name.isdigit())
        except OSError:
            return


def host_of(settings: Settings, root: Path | None) -> HostFiles:
    """The node's root: as named on the command line, else as far as the configuration shows it. Blocks."""
    if root is not None:
        return HostFiles(root, named=True)
    driver_root = Path(settings.driver.root)
    if driver_root == Path("/"):
        # In a pod that is the container's own root.
        return HostFiles(None if "KUBERNETES_SERVICE_HOST" in os.environ else driver_root)
    # A driver container's root holds the driver alone.
    return HostFiles(driver_root if (driver_root / settings.kubelet.root.strip("/")).is_dir() else None)


def _options(words: list[str]) -> dict[str, str]:
    """As Go's flags are written: `--name=value`, `--name value`, `-name value`."""
    found = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("-"):
            name, given, value = word.lstrip("-").partition("=")
            found[name] = value if given else following
    return found


# The container runtime and NVIDIA's container toolkit, by a node's files. Blocks.

TOOLKIT = ("nvidia-ctk", "nvidia-container-cli", "nvidia-container-runtime")
FOLDERS = ("/usr/bin", "/usr/local/bin", "/usr/local/nvidia/toolkit", "/run/current-system/sw/bin")
VERSION_SECONDS = 5.0
RANCHER = (
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
)
CONTAINERD = ("/etc/containerd/config.toml", *RANCHER)
CRIO, CRIO_FOLDER = "/etc/crio/crio.conf", "/etc/crio/crio.conf.d"
DOCKER = "/etc/docker/daemon.json"


def toolkit_version(host: HostFiles) -> tuple[str, tuple[int, ...] | None] | None:
    """NVIDIA's container toolkit: the program found, its version where it has one; None: none is there."""
    for name in TOOLKIT:
        for folder in FOLDERS:
            program = host.file(f"{folder}/{name}")
            if program and host.root and os.access(program, os.X_OK):
                return name, _version_of(program, host.root)
    return None


def _version_of(program: Path, root: Path) -> tuple[int, ...] | None:
    inner = f"/{program.relative_to(root)}"
    # In its own root, where its libraries are; without the right to that, with the libraries found here.
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
    names: frozenset[str] = frozenset()  # that a RuntimeClass may lead to, as far as they are known
    cdi: bool | None = None  # containerd's switch; None: as its version has it
    cdi_folders: tuple[str, ...] | None = None  # where it looks for specifications; None: where all do
    unread: tuple[str, ...] = ()  # files that are there and cannot be read: they may say otherwise


def runtimes(host: HostFiles, version: str = "") -> Runtimes | None:
    """Of the container runtime in the kubelet's own words (`version`: `containerd://2.4.2`), since a node may
    have several; else of the first that is found. None: no configuration is seen.
    """
    engine = version.partition("://")[0]
    places = RANCHER if "-k3s" in version else None  # the containerd that k3s and RKE2 bring
    readers: dict[str, Callable[[], Runtimes | None]] = {
        "containerd": lambda: _containerd(host, places),
        "docker": lambda: _docker(host),
        "cri-o": lambda: _crio(host),
    }
    chosen = [readers[engine]] if engine in readers else readers.values()
    return next((found for read in chosen if (found := read())), None)


def _containerd(host: HostFiles, places: tuple[str, ...] | None) -> Runtimes | None:
    if places is None:
        flags = host.flags("containerd") or {}
        places = (*(flags[flag] for flag in ("config", "c") if flags.get(flag)), *CONTAINERD)
    for name in places:
        if host.file(name):
            # nvidia-ctk writes a file of its own since 1.18, which comes in by `imports`.
            imported = _imported(host, name, _toml(host, name) or {})
            return _merged(host, [name, *imported], "default_runtime_name")
    return None


def _crio(host: HostFiles) -> Runtimes | None:
    # It takes whatever lies in the folder: OpenShift's own files have no suffix.
    files = [file for file in (CRIO, *host.files(CRIO_FOLDER, "*")) if host.file(file)]
    return _merged(host, files, "default_runtime") if files else None


def _docker(host: HostFiles) -> Runtimes | None:
    if not host.file(DOCKER):
        return None
    try:
        found = json.loads(host.text(DOCKER) or "")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        return Runtimes(DOCKER, "runc", unread=(DOCKER,))
    names = found.get("runtimes")
    known = frozenset(names) if isinstance(names, dict) else frozenset()
    return Runtimes(DOCKER, str(found.get("default-runtime", "runc")), known)


def _merged(host: HostFiles, files: list[str], key: str) -> Runtimes:
    """Files that go over each other: the last that names a default wins."""
    where, default, names = files[0], "runc", set[str]()
    cdi: bool | None = None
    folders: tuple[str, ...] | None = None
    documents = {file: _toml(host, file) for file in files}
    for file, document in documents.items():
        for value in _values(document, key):
            where, default = file, str(value)
        for block in _values(document, "runtimes"):
            names |= set(block) if isinstance(block, dict) else set()
        for value in _values(document, "enable_cdi"):
            cdi = bool(value)
        for value in _values(document, "cdi_spec_dirs"):
            folders = tuple(str(each) for each in value) if isinstance(value, list) else folders
    unread = tuple(file for file, document in documents.items() if document is None)
    return Runtimes(where, default, frozenset(names), cdi, folders, unread)


def _imported(host: HostFiles, file: str, document: dict[str, Any]) -> Iterator[str]:
    patterns = document.get("imports")
    for pattern in patterns if isinstance(patterns, list) else []:
        # Relative ones start at the file that names them.
        folder, _, name = os.path.join(os.path.dirname(file), str(pattern)).rpartition("/")  # noqa: PTH118, PTH120
        if name:
            yield from host.files(folder, name)


def _toml(host: HostFiles, file: str) -> dict[str, Any] | None:
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
