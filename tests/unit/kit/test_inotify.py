"""The folder watch over a real folder."""

import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from agent.kit.files import Change, FolderGone, FolderWatch, watching


async def first(watch: FolderWatch, count: int) -> list[Change]:
    """The next `count` changes."""
    seen: list[Change] = []
    changes: AsyncIterator[Change] = watch.changes()
    with anyio.fail_after(5):
        async for change in changes:
            seen.append(change)
            if len(seen) == count:
                break
    return seen


async def test_sockets_that_come_and_go_are_seen(tmp_path: Path) -> None:
    async with watching(tmp_path) as watch:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "a.sock"))
            assert await first(watch, 1) == [Change("a.sock", appeared=True)]
        (tmp_path / "a.sock").unlink()
        assert await first(watch, 1) == [Change("a.sock", appeared=False)]


async def test_renames_and_finished_writes_are_seen(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    async with watching(tmp_path) as watch:
        (tmp_path / "old").rename(tmp_path / "new")
        assert await first(watch, 2) == [Change("old", appeared=False), Change("new", appeared=True)]
        (tmp_path / "new").write_text("x")
        assert Change("new", appeared=True) in await first(watch, 1)


async def test_odd_names_survive(tmp_path: Path) -> None:
    name = b"caf\xe9 \xff.sock".decode(errors="surrogateescape")
    async with watching(tmp_path) as watch:
        (tmp_path / name).touch()
        assert (await first(watch, 1))[0] == Change(name, appeared=True)


async def test_many_changes_at_once_are_all_read(tmp_path: Path) -> None:
    async with watching(tmp_path) as watch:
        for number in range(500):
            (tmp_path / f"file-{number}").mkdir()
        seen = await first(watch, 500)
    assert {change.name for change in seen} == {f"file-{number}" for number in range(500)}


@pytest.mark.parametrize("moved", [False, True])
async def test_a_folder_that_goes_away_is_told(tmp_path: Path, moved: bool) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    async with watching(folder) as watch:
        if moved:
            folder.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(folder)
        with pytest.raises(FolderGone, match="folder"):
            await first(watch, 1)


@pytest.mark.parametrize("kind", ["missing", "file"])
async def test_what_is_no_folder_cannot_be_watched(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "file":
        path.touch()
    with pytest.raises(OSError, match=str(path)):
        async with watching(path):
            raise AssertionError


async def test_a_cancelled_watch_closes_its_descriptor(tmp_path: Path) -> None:
    def descriptors() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = descriptors()
    for _ in range(20):
        with anyio.move_on_after(0.005) as scope:
            async with watching(tmp_path) as watch:
                async for _ in watch.changes():
                    raise AssertionError
        assert scope.cancelled_caught
    assert descriptors() == before
