"""The image that `make image` builds: small, without tools, quick to start from a read-only root."""

import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from agent import __version__
from tests.cluster.build import BuildError, agent_image

LARGEST_MB = 120.0
TOOLS = ("bash", "sh", "dash", "apt-get", "dpkg", "pip", "pip3", "gcc", "perl", "tar", "mount", "su")


@pytest.fixture(scope="module")
def archive() -> Path:
    """The image, built if the sources have changed."""
    try:
        return agent_image.build(lambda _line: None)
    except BuildError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="module")
def configuration(archive: Path) -> dict[str, Any]:
    """What the image says of itself (OCI image configuration)."""
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
    done = subprocess.run(
        [shutil.which("chroot") or "chroot", str(root), *command],
        env={"PYTHONPATH": "/opt/gpu-node-agent", "PATH": "/usr/local/bin:/usr/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_runs_the_agent(root: Path) -> None:
    assert in_image(root, "/usr/local/bin/gpu-node-agent", "version").strip() == __version__
    assert "good" in in_image(root, "/usr/local/bin/gpu-node-agent", "check")


def test_starts_the_way_the_chart_expects(configuration: dict[str, Any]) -> None:
    config = configuration["config"]
    assert config["Entrypoint"] == ["/usr/local/bin/gpu-node-agent"]
    assert config["Cmd"] == ["run"]
    environment = dict(each.split("=", 1) for each in config["Env"])
    assert environment["MALLOC_ARENA_MAX"] == "2"
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"


def test_holds_no_tools(root: Path) -> None:
    folders = ("bin", "sbin", "usr/bin", "usr/sbin", "usr/local/bin")
    there = {path.name for folder in folders for path in (root / folder).iterdir()}
    assert not there & set(TOOLS)
    assert not list(root.glob("usr/lib/python3*/*-packages/pip"))


def test_everything_the_agent_imports_is_compiled(root: Path) -> None:
    source = (
        "import sys, agent.app.run, agent.cluster.api, agent.cluster.lean; "
        "found = [getattr(module, '__cached__', None) for module in list(sys.modules.values())]; "
        "print(*(path for path in found if path), sep='\\n')"
    )
    cached = in_image(root, "/usr/bin/python3", "-OO", "-c", source).split()
    assert len(cached) > 200
    missing = [path for path in cached if not (root / path.lstrip("/")).exists()]
    assert not missing
    assert all(path.endswith(".opt-2.pyc") for path in cached)


def test_is_small(root: Path) -> None:
    size = sum(path.lstat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    assert size / 1e6 < LARGEST_MB, f"the image has {size / 1e6:.0f} MB"
