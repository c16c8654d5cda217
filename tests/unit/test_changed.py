"""`make check` runs the tests of what changed, and of what imports it."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests import changed

IMPORTERS = {
    "agent.pairing.pairing": ("agent.pairing.reducer", "agent.lists.context", "tests.unit.status.parts"),
    "clib.headers": ("clib.rules", "tests.unit.vgpu.test_headers"),
    "tests.virtual_time": ("tests.unit.kit.test_cell", "tests.component.test_app"),
    "agent.settings": ("agent.app.build", "agent.__main__"),
}


def importers_of(module: str) -> Iterable[str]:
    return IMPORTERS.get(module, ())


def rooms(*files: str) -> list[str]:
    """Selected folders, without the tests that always run."""
    return [each for each in changed.selected(files, importers_of) if not each.endswith(".py")]


def test_nothing_changed_runs_style_and_documents() -> None:
    always = changed.selected((), importers_of)
    assert {"tests/unit/test_style.py", "tests/unit/test_docs.py", "tests/unit/test_architecture.py"} <= {
        *always
    }
    assert all((changed.ROOT / each).is_file() for each in always)


def test_a_room_runs_with_those_that_import_it() -> None:
    assert rooms("agent/pairing/pairing.py") == [
        f"tests/unit/{each}" for each in ("lists", "pairing", "status")
    ]


@pytest.mark.parametrize(
    ("file", "room"),
    [
        ("tests/unit/mps/test_probing.py", "mps"),
        ("agent/vgpu/clib/hook.c", "vgpu"),
        (".ci/clib/headers.py", "vgpu"),
        ("agent/kit/__init__.py", "kit"),
        ("tests/virtual_time.py", "kit"),
        ("agent/settings/schema.py", None),  # its tests are among those that always run
        ("docs/mps.md", None),
        ("tests/component/test_app.py", None),
    ],
)
def test_a_file_belongs_to_a_room(file: str, room: str | None) -> None:
    assert rooms(file) == ([f"tests/unit/{room}"] if room else [])


def test_a_package_is_its_init() -> None:
    assert rooms("agent/settings/__init__.py") == ["tests/unit/app"]


def test_a_chart_is_tested_by_the_chart_s_tests() -> None:
    assert rooms("charts/gpu-node-agent/values.yaml") == ["tests/chart"]


@pytest.mark.parametrize("file", changed.FOR_ALL)
def test_some_files_change_everything(file: str) -> None:
    assert changed.selected([file, "docs/mps.md"], importers_of) == ["tests/unit", "tests/chart"]
    assert (changed.ROOT / file).is_file()


def test_without_main_everything_runs() -> None:
    assert changed.selected(None, importers_of) == ["tests/unit", "tests/chart"]


def test_the_real_imports_are_read() -> None:
    assert "agent.lists" in {each.rpartition(".")[0] for each in changed.importers()("agent.pairing.pairing")}
    assert list(changed.importers()("agent.nothing")) == []


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    git(tmp_path, "init", "-q", "-b", "main")
    for name in ("kept", "edited", "renamed", "committed"):
        (tmp_path / name).write_text(f"{name}\n" * 9)
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, timeout=30, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "a change")


def test_committed_and_uncommitted_changes_of_a_branch_count(repository: Path) -> None:
    assert changed.changed_files() == frozenset()
    git(repository, "checkout", "-q", "-b", "branch")
    (repository / "committed").write_text("otherwise\n")
    commit(repository)
    (repository / "edited").write_text("otherwise\n")
    git(repository, "mv", "renamed", "moved")
    (repository / "new").write_text("new\n")
    (repository / ".gitignore").write_text("ignored\n")
    (repository / "ignored").write_text("built\n")
    expected = frozenset({"committed", "edited", "renamed", "moved", "new", ".gitignore"})
    assert changed.changed_files() == expected
    # What main does meanwhile is none of the branch's.
    git(repository, "stash", "-q", "-u")
    git(repository, "checkout", "-q", "main")
    (repository / "kept").write_text("otherwise\n")
    commit(repository)
    git(repository, "checkout", "-q", "branch")
    git(repository, "stash", "pop", "-q")
    assert changed.changed_files() == expected


def test_a_checkout_without_main_is_known(repository: Path) -> None:
    git(repository, "branch", "-q", "-m", "main", "detached")
    assert changed.changed_files() is None
