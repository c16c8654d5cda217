"""The hook program on the host."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent.injection.toolkit import HookNotInstalled, install


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "image" / "nvidia-cdi-hook"
    file.parent.mkdir()
    file.write_bytes(b"one")
    file.chmod(0o755)
    return file


def test_it_is_put_there_executable_and_only_once(tmp_path: Path, source: Path) -> None:
    target = install(source, tmp_path / "state" / "bin")
    assert target.read_bytes() == b"one"
    assert os.access(target, os.X_OK)
    before = target.stat()
    assert install(source, target.parent) == target
    assert (target.stat().st_ino, target.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [each.name for each in target.parent.iterdir()] == ["nvidia-cdi-hook"]


@pytest.mark.parametrize("spoiled", ["other", "mode", "link"])
def test_another_file_in_its_place_is_replaced(tmp_path: Path, source: Path, spoiled: str) -> None:
    folder = tmp_path / "bin"
    target = install(source, folder)
    if spoiled == "other":
        target.write_bytes(b"two")
    elif spoiled == "mode":
        target.chmod(0o644)
    else:
        target.unlink()
        target.symlink_to(source)
    install(source, folder)
    assert not target.is_symlink()
    assert target.read_bytes() == b"one"
    assert os.access(target, os.X_OK)


def test_a_file_system_without_execution_is_told(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.raises(HookNotInstalled, match=r"noexec.*host\.state"):
        install(source, tmp_path / "bin")


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, source: Path) -> None:
    (tmp_path / "bin").write_text("in the way")
    with pytest.raises(HookNotInstalled, match=r"host\.state"):
        install(source, tmp_path / "bin")
