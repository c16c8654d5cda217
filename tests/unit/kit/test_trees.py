"""Emptying folders: links, depth, and somebody who fills them meanwhile."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from agent.kit import files
from tests.component.mps.pods import again_and_again


def deep(path: Path, levels: int) -> None:
    """A folder in a folder in a folder ...; no path that long could be named."""
    path.mkdir()
    folder = os.open(path, files.FOLDER)
    for _ in range(levels):
        os.mkdir("d", dir_fd=folder)
        inner = os.open("d", files.FOLDER, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def emptied(folder: Path, seconds: float = 60.0) -> None:
    with files.opened(folder) as descriptor:
        files.empty(descriptor, seconds)


def test_what_links_lead_to_stays(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    (outside / "file").write_text("precious")
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    for place in (folder, folder / "inner"):
        (place / "to-folder").symlink_to(outside)
        (place / "to-file").symlink_to(outside / "file")
        (place / "to-nothing").symlink_to("nowhere")
        os.mkfifo(place / "fifo")
        (place / ".hidden").touch()
    emptied(folder)
    assert list(folder.iterdir()) == []
    assert (outside / "file").read_text() == "precious"
    assert (outside / "kept").is_dir()


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError), files.opened(tmp_path / "link"):
        pass


def test_depth_takes_neither_stack_nor_descriptors(tmp_path: Path) -> None:
    deep(tmp_path / "deep", 2500)
    before = descriptors()
    most = [0]
    rename = os.rename

    def counting(*args: object, **more: object) -> None:
        most[0] = max(most[0], descriptors())
        rename(*args, **more)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", counting)
        emptied(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert 0 < most[0] - before <= 3


def test_more_files_than_are_held_in_memory_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_AT_ONCE", 7)
    (tmp_path / "wide").mkdir()
    for number in range(50):
        (tmp_path / f"{number}").touch()
        (tmp_path / "wide" / f"{number}").mkdir()
    emptied(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_entry_goes_and_the_others_stay(tmp_path: Path) -> None:
    deep(tmp_path / "deep", 30)
    (tmp_path / "link").symlink_to("kept")
    (tmp_path / "kept").write_text("precious")
    with files.opened(tmp_path) as folder:
        for name in ("deep", "link", "missing"):
            files.remove(folder, name)
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_text() == "precious"


def test_who_changes_a_folder_into_a_link_meanwhile_gains_nothing(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    folder.mkdir()
    (outside / "file").write_text("precious")
    place = folder / "place"

    def change() -> None:
        with suppress(OSError):
            place.mkdir()
            place.rename(folder / "other")
        with suppress(OSError):
            place.symlink_to(outside)
            place.rename(folder / "other")

    with again_and_again(change):
        for _ in range(50):
            try:
                emptied(folder, 0.05)
            except TimeoutError:
                continue
    emptied(folder)
    assert (outside / "file").read_text() == "precious"


def test_who_fills_it_meanwhile_is_told_of_in_time(tmp_path: Path) -> None:
    number = [0]

    def fill() -> None:
        number[0] += 1
        (tmp_path / f"{number[0]}").touch()

    for _ in range(1000):
        fill()
    with again_and_again(fill), files.opened(tmp_path) as folder:
        with pytest.raises(TimeoutError, match="somebody fills it"):
            files.empty(folder, 0.0)
        (tmp_path / "inner").mkdir()
        files.remove(folder, "inner")
