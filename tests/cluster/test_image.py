"""The image that `make image` builds: small, without tools, quick to start from a read-only root."""

import json
import os
import re
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent import __version__
from agent.settings import load
from tests.cluster.rig import REPOSITORY

LARGEST_MB = 120.0
COMMAND = "/usr/local/bin/gpu-node-agent"
TOOLKIT = load(environment={}).injection.toolkit


@pytest.fixture(scope="module")
def configuration(archive: Path) -> dict[str, Any]:
    """The OCI configuration of the image."""
    with tarfile.open(archive) as tar:
        return _configuration(tar)


@pytest.fixture(scope="module")
def root(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image's file system."""
    folder = tmp_path_factory.mktemp("image")
    with tarfile.open(archive) as tar:
        for layer in _manifest(tar)["layers"]:
            data = tar.extractfile(_blob(layer["digest"]))
            assert data is not None
            with tarfile.open(fileobj=data) as files:
                files.extractall(folder, filter="fully_trusted")
    return folder


def _blob(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _read(tar: tarfile.TarFile, name: str) -> Any:
    data = tar.extractfile(name)
    assert data is not None
    return json.load(data)


def _manifest(tar: tarfile.TarFile) -> dict[str, Any]:
    (entry,) = _read(tar, "index.json")["manifests"]
    found: dict[str, Any] = _read(tar, _blob(entry["digest"]))
    return found


def _configuration(tar: tarfile.TarFile) -> dict[str, Any]:
    found: dict[str, Any] = _read(tar, _blob(_manifest(tar)["config"]["digest"]))
    return found


def in_image(root: Path, *command: str) -> str:
    """Run a program of the image as a container with a read-only root does."""
    mounted = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec chroot "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted, "sh", str(root), str(root), *command],
        env={"PYTHONPATH": "/opt/gpu-node-agent", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def interpreter(root: Path) -> str:
    """The one that runs the agent."""
    first = (root / COMMAND.lstrip("/")).read_text().splitlines()[0]
    return first.removeprefix("#!").split()[0]


def files(root: Path) -> Iterator[Path]:
    """Regular files of the image."""
    yield from (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


def inside(root: Path, path: Path) -> str:
    return f"/{path.relative_to(root)}"


def test_runs_the_agent(root: Path) -> None:
    assert in_image(root, COMMAND, "version").strip() == __version__
    assert "good" in in_image(root, COMMAND, "check")


def test_starts_the_way_the_chart_expects(configuration: dict[str, Any]) -> None:
    config = configuration["config"]
    assert config["Entrypoint"] == [COMMAND]
    assert config["Cmd"] == ["run"]
    assert config["User"] == "0:0"
    environment = dict(each.split("=", 1) for each in config["Env"])
    assert environment["MALLOC_ARENA_MAX"] == "2"
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"


def test_holds_no_shell_and_no_other_program(root: Path) -> None:
    """Whatever its name: nothing is executable but the interpreter, the agent's command, and NVIDIA's two."""
    executable = [path for path in files(root) if path.stat().st_mode & 0o111]
    heads = {path: path.read_bytes()[:4] for path in executable}
    programs = {
        inside(root, path)
        for path, head in heads.items()
        if head[:2] == b"#!" or (head == b"\x7fELF" and ".so" not in path.name)
    }
    python = Path(interpreter(root))
    own = {COMMAND, str(python.parent / (root / str(python).lstrip("/")).resolve().name)}
    assert programs == own | {f"{TOOLKIT}/{name}" for name in ("nvidia-ctk", "nvidia-cdi-hook")}
    names = {path.name for path in root.rglob("*")}
    assert not names & {"sh", "bash", "dash", "busybox", "perl", "gcc", "cc", "ld", "make"}


def test_programs_of_the_toolkit_start_in_it(root: Path) -> None:
    for name in ("nvidia-ctk", "nvidia-cdi-hook"):
        said = subprocess.run(
            ["chroot", str(root), f"{TOOLKIT}/{name}", "--help"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        assert "USAGE" in said


def test_holds_no_package_manager(root: Path) -> None:
    found = (
        "import importlib.util as u; print([n for n in ('pip', 'ensurepip', 'setuptools') if u.find_spec(n)])"
    )
    assert in_image(root, interpreter(root), "-c", found).strip() == "[]"
    assert not [name for name in ("var/lib/dpkg", "var/lib/apt", "etc/apt") if (root / name).exists()]


def test_nothing_in_it_gains_privilege(root: Path) -> None:
    for path in files(root):
        mode = path.stat().st_mode
        assert not mode & (stat.S_ISUID | stat.S_ISGID), path
        assert not mode & stat.S_IWOTH, path
        assert "security.capability" not in os.listxattr(path), path
    writable = [path for path in root.rglob("*") if path.is_dir() and path.stat().st_mode & stat.S_IWOTH]
    assert [inside(root, path) for path in writable] == ["/tmp"]
    shadow = [name for name in ("etc/shadow", "etc/sudoers", "root/.ssh") if (root / name).exists()]
    assert not shadow


def test_has_what_libraries_of_drivers_are_linked_with(root: Path) -> None:
    """NVML comes from the node and finds these in the image or not at all."""
    load = "import ctypes, sys; [ctypes.CDLL(name) for name in sys.argv[1:]]; print('loaded')"
    names = ("libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1")
    assert in_image(root, interpreter(root), "-c", load, *names).strip() == "loaded"


def test_everything_the_agent_imports_is_compiled(root: Path) -> None:
    source = (
        "import sys, agent.app.run, agent.app.wings, agent.cleanup.on_request; "
        "import agent.cluster.api, agent.cluster.lean; "
        "found = [getattr(module, '__cached__', None) for module in list(sys.modules.values())]; "
        "print(*(path for path in found if path), sep='\\n')"
    )
    cached = in_image(root, interpreter(root), "-OO", "-c", source).split()
    assert len(cached) > 200
    missing = [path for path in cached if not (root / path.lstrip("/")).exists()]
    assert not missing
    assert all(path.endswith(".opt-2.pyc") for path in cached)


def test_is_small(root: Path) -> None:
    size = sum(path.lstat().st_size for path in files(root))
    assert size / 1e6 < LARGEST_MB, f"the image has {size / 1e6:.0f} MB"


def test_what_comes_from_a_registry_is_pinned() -> None:
    """The Dockerfile's own base, and nothing else: what is run is made from scratch."""
    text = (REPOSITORY / "Dockerfile").read_text()
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    stages = re.findall(r"^FROM (\S+)(?: AS \w+)?$", text, re.MULTILINE)
    assert stages == ["${BUILD_BASE}", "${BUILD_BASE}", "scratch"]
    assert re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", defaults["BUILD_BASE"])


def test_each_claim_of_the_security_page_is_looked_at() -> None:
    page = (REPOSITORY / "docs" / "security.md").read_text()
    table = page.split("## The image\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`(test_\w+)`", table))
    assert named == {name for name in globals() if name.startswith("test_")} - {
        "test_each_claim_of_the_security_page_is_looked_at",
        "test_runs_the_agent",
    }
