"""A small file: one that turns out to be something else, and what is left of one that was begun."""

import os
from pathlib import Path

import anyio.to_thread
import pytest

from agent.kit.files import DRAFT, LONGEST_BYTES, read_text, write


async def read(file: Path) -> str:
    return await anyio.to_thread.run_sync(read_text, file)


async def test_the_beginning_of_a_file_is_read_whatever_its_size(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("pgpu\n")
    assert await read(file) == "pgpu\n"
    file.write_bytes(b"x" * 10_000_000)
    assert await read(file) == "x" * LONGEST_BYTES
    with pytest.raises(FileNotFoundError):
        await read(tmp_path / "none")


async def test_pipes_folders_and_devices_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with anyio.fail_after(5), pytest.raises(OSError, match="is no regular file"):
            await read(other)


def test_drafts_of_an_agent_that_was_killed_go_with_the_next_file(tmp_path: Path) -> None:
    older, newer, other = tmp_path / f"{DRAFT}a", tmp_path / f"{DRAFT}b", tmp_path / "c"
    for each in (older, newer, other):
        each.touch()
    for each in (older, other):
        os.utime(each, (1, 1))
    write(tmp_path, "file", b"")
    assert sorted(tmp_path.iterdir()) == [newer, other, tmp_path / "file"]
