"""`.ci/release` on a copy of the files that it reads: nothing unfinished is released."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import build_version

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    *("CHANGELOG.md", "README.md", "agent/__init__.py", "docs/install.md"),
    *("charts/gpu-node-agent/Chart.yaml", "charts/gpu-node-agent/values.yaml"),
)
NAMES = (
    *("--registry", "localhost:5000/team", "--source", "https://git.test/gpu"),
    *("--maintainer", "A Team", "--contact", "team@git.test"),
)
PLACEHOLDERS = (
    "registry.example.com/gpu/",
    "https://example.com/gpu-node-agent",
    "Nobody Yet",
    "nobody@example.com",
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree of version 7.8.9 that is ready but for its placeholders."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    now = build_version.written(tmp_path)
    for name in ("agent/__init__.py", "charts/gpu-node-agent/Chart.yaml"):
        path = tmp_path / name
        text = path.read_text().replace(build_version.semantic(now), "7.8.9")
        path.write_text(text.replace(now, "7.8.9"))
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [7.8.9] - 2026-11-22\n\n- All of it.\n\n## [1.0.0]\n"
    )
    return tmp_path


def release(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / ".ci/release"), *arguments],
        env={**os.environ, "RELEASE_ROOT": str(root)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_placeholders_are_refused_until_they_have_names(tree: Path) -> None:
    refused = release(tree, "check")
    assert refused.returncode == 1
    for placeholder in PLACEHOLDERS:
        assert repr(placeholder) in refused.stderr
    assert release(tree, "name", *NAMES).returncode == 0
    assert release(tree, "check").returncode == 0
    assert release(tree, "registry").stdout == "localhost:5000/team\n"
    assert (
        "repository: localhost:5000/team/gpu-node-agent\n"
        in (tree / "charts/gpu-node-agent/values.yaml").read_text()
    )
    # Each is named alone, too; what was not given stays refused.
    assert release(tree, "check", "v7.8.9").returncode == 0


def test_a_name_that_is_missing_stays_refused(tree: Path) -> None:
    assert release(tree, "name", *NAMES[:6]).returncode == 0
    refused = release(tree, "check")
    assert refused.returncode == 1
    assert "nobody@example.com" in refused.stderr
    assert "registry.example.com" not in refused.stderr


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("agent/__init__.py", "agent/__init__.py is 7.8.10: make them one"),
        ("charts/gpu-node-agent/Chart.yaml", "Chart.yaml's version is 7.8.10"),
        ("charts/gpu-node-agent/Chart.yaml", "Chart.yaml's image is 7.8.10"),
    ],
)
def test_versions_that_differ_are_refused(tree: Path, name: str, named: str) -> None:
    release(tree, "name", *NAMES)
    (tree / name).write_text((tree / name).read_text().replace("7.8.9", "7.8.10"))
    refused = release(tree, "check")
    assert refused.returncode == 1
    assert named in refused.stderr


def test_another_tag_and_a_missing_section_are_refused(tree: Path) -> None:
    release(tree, "name", *NAMES)
    refused = release(tree, "check", "v7.9.0")
    assert refused.returncode == 1
    assert "the tag is 7.9.0" in refused.stderr
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n- All of it.\n")
    refused = release(tree, "check")
    assert refused.returncode == 1
    assert "## [7.8.9] - YYYY-MM-DD" in refused.stderr


def test_notes_are_the_section_of_the_version(tree: Path) -> None:
    assert release(tree, "notes").stdout == "- All of it.\n"


def test_nothing_is_published_that_is_not_ready(tree: Path) -> None:
    refused = release(tree, "publish", str(tree / "image.tar"))
    assert refused.returncode == 1
    assert "placeholder" in refused.stderr


def test_placeholders_stand_only_where_the_release_looks() -> None:
    """In tests, too, they may stand; and where the script itself says them."""
    tracked = subprocess.run(
        ["git", "grep", "-lF", *(word for each in PLACEHOLDERS for word in ("-e", each)), "--", ":!tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    ).stdout.split()
    assert ".ci/release" in tracked  # git has looked
    assert set(tracked) <= {*FILES, ".ci/release"}


def test_versions_of_this_tree_are_one() -> None:
    checked = release(ROOT, "check")
    pending = ("holds the placeholder", "between two releases")
    lacks = [line for line in checked.stderr.splitlines() if not any(word in line for word in pending)]
    assert not lacks, lacks
    assert checked.returncode in (0, 1)


def commit(root: Path, message: str) -> None:
    who = ("-c", "user.name=A", "-c", "user.email=a@b.test")
    for words in (("init", "--quiet"), ("add", "--all"), (*who, "commit", "--quiet", f"--message={message}")):
        subprocess.run(["git", "-C", str(root), *words], check=True, timeout=30)


def built(root: Path) -> tuple[str, str]:
    """The version of what is built now: as tags have it, as Python has it."""
    as_tag = release(root, "version").stdout.strip()
    return as_tag, release(root, "version", "--package").stdout.strip()


def test_builds_are_told_apart(tree: Path) -> None:
    """Two commits, a change that is in none, and a tree without git, as an archive is."""
    package = tree / "agent/__init__.py"
    package.write_text(package.read_text().replace("7.8.9", "7.9.0.dev0"))
    assert built(tree) == ("7.9.0-dev.0", "7.9.0.dev0")
    commit(tree, "first")
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n")
    changed = built(tree)
    commit(tree, "second")
    second = built(tree)
    (tree / "README.md").write_text("Other words.\n")
    again = built(tree)
    assert len({changed, second, again}) == 3
    assert re.fullmatch(r"7\.9\.0-dev\.0\.g[0-9a-f]{10}\.d[0-9a-f]{8}", changed[0])
    assert re.fullmatch(r"7\.9\.0-dev\.1\.g[0-9a-f]{10}", second[0])
    assert re.fullmatch(r"7\.9\.0\.dev1\+g[0-9a-f]{10}", second[1])
    assert again[0].startswith(f"{second[0]}.d")
    # A label of Kubernetes, and with the chart's name before it.
    assert re.fullmatch(r"[\w.-]{1,63}", f"gpu-node-agent-{again[0]}")
    # A release is itself, whatever the commit.
    package.write_text(package.read_text().replace("7.9.0.dev0", "7.9.0"))
    assert built(tree) == ("7.9.0", "7.9.0")


def test_a_file_that_git_does_not_know_and_a_clone_that_is_cut_off_show(tree: Path, tmp_path: Path) -> None:
    package = tree / "agent/__init__.py"
    package.write_text(package.read_text().replace("7.8.9", "7.9.0.dev0"))
    commit(tree, "first")
    (tree / "README.md").write_text("Other words.\n")
    commit(tree, "second")
    whole = built(tree)[0]
    (tree / "agent" / "more.py").write_text("x = 1\n")
    one = built(tree)[0]
    (tree / "agent" / "more.py").write_text("x = 2\n")
    (tree / "notes.txt").write_text("in no build")
    assert one.startswith(f"{whole}.d")
    assert built(tree)[0].startswith(f"{whole}.d")
    assert built(tree)[0] != one
    cut = tmp_path / "cut"
    subprocess.run(
        ["git", "clone", "--quiet", "--depth=1", f"file://{tree}", str(cut)], check=True, timeout=30
    )
    assert re.fullmatch(r"7\.9\.0-dev\.0\.g[0-9a-f]{10}\.shallow", built(cut)[0])
    deep = tmp_path / "deep"
    subprocess.run(
        ["git", "clone", "--quiet", "--depth=9", f"file://{tree}", str(deep)], check=True, timeout=30
    )
    assert built(deep)[0] == whole


def test_a_tree_between_two_releases_is_not_released(tree: Path) -> None:
    release(tree, "name", *NAMES)
    for name, said in (
        ("agent/__init__.py", "7.9.0.dev0"),
        ("charts/gpu-node-agent/Chart.yaml", "7.9.0-dev.0"),
    ):
        (tree / name).write_text((tree / name).read_text().replace("7.8.9", said))
    refused = release(tree, "check")
    assert refused.returncode == 1
    assert refused.stderr.splitlines() == [
        "agent/__init__.py is 7.9.0.dev0, between two releases: write the version of the release there"
    ]


def test_a_wheel_says_which_commit_it_is_of(tmp_path: Path) -> None:
    """Built without network; the tree's own file stays as it is."""
    names = (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        ".gitignore",
        "charts/gpu-node-agent/files/kubectl-gpu",
    )
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "agent").mkdir()
    shutil.copy2(ROOT / "agent/__init__.py", tmp_path / "agent")
    (tmp_path / "agent/__init__.py").write_text('__version__ = "7.9.0.dev0"\n')
    commit(tmp_path, "first")
    argv = [sys.executable, "-m", "hatchling", "build", "--target=wheel", "--directory=out"]
    subprocess.run(argv, cwd=tmp_path, check=True, timeout=60, capture_output=True)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        said = files.read("agent/__init__.py").decode()
        assert [name for name in files.namelist() if name.startswith("agent/")] == ["agent/__init__.py"]
    version = wheel.name.split("-")[1]
    assert re.fullmatch(r"7\.9\.0\.dev0\+g[0-9a-f]{10}", version)
    assert said == f'__version__ = "{version}"\n'
    assert build_version.written(tmp_path) == "7.9.0.dev0"


def test_the_version_of_the_image_is_an_argument_of_its_build() -> None:
    """git is not in its context; `make image` and the documented `docker build` hand it over."""
    assert "ARG VERSION" in (ROOT / "Dockerfile").read_text()
    assert "--build-arg=VERSION=" in (ROOT / "tests/cluster/build/agent_image.py").read_text()
    documented = '--build-arg VERSION="$(.ci/release version --package)"'
    assert documented in (ROOT / "docs/install.md").read_text()


def test_what_publish_prints_installs_by_digest() -> None:
    code = "import runpy; print(runpy.run_path('.ci/release')['installation']('reg.test/team', 'sha256:1'))"
    argv = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".ci")}
    printed = subprocess.run(
        argv, cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=30
    )
    version = release(ROOT, "version").stdout.strip()
    assert f"--set image.tag={version}@sha256:1" in printed.stdout
    assert f"oci://reg.test/team/charts/gpu-node-agent --version {version} " in printed.stdout


def jobs() -> list[tuple[dict[str, Any], str]]:
    """Each job of the workflows, and its steps as one text."""
    found = []
    for file in sorted((ROOT / ".github/workflows").glob("*.yaml")):
        each = yaml.safe_load(file.read_text())["jobs"].values()
        found += [(job, yaml.safe_dump(job.get("steps", []), width=1000)) for job in each]
    return found


def test_jobs_in_containers_install_what_their_steps_call() -> None:
    """A runner has these, a container of Debian has not. The scan's action fetches its program by curl."""
    needs = {
        "actions/checkout": "git",
        "make ": "make",
        "anchore/scan-action": "curl",
    }
    inside = [steps for job, steps in jobs() if "container" in job]
    assert inside
    for steps in inside:
        installed = steps.partition("apt-get install")[2].partition("\n")[0].split()
        assert {package for call, package in needs.items() if call in steps} <= set(installed)


def test_caches_of_jobs_in_containers_are_where_programs_keep_them() -> None:
    """HOME is /github/home there (actions/runner, issue 1146), and the cache lies below it."""
    caches = [
        step["with"]["path"]
        for job, _ in jobs()
        for step in job.get("steps", [])
        if step.get("uses", "").startswith("actions/cache@")
    ]
    assert caches == ["~/.cache/gpu-node-agent"]
