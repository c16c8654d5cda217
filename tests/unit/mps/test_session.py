"""One run of a program: its words, its end, and nothing of it left."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from agent.mps import control_commands
from agent.mps.control_commands import MOST_BYTES, session
from agent.mps.mps_errors import Unanswered


def script(folder: Path, text: str) -> Path:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def open_now() -> set[str]:
    """Pipes by name, processes that descriptors stand for, and children of this process.

    A session opens nothing else; other threads and the garbage of earlier tests do, all the time.
    """
    found: set[str] = set()
    for number in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            name = str(number.readlink())
            if name.startswith("pipe:"):
                found.add(name)
            elif name == "anon_inode:[pidfd]":
                found.add(
                    Path(f"/proc/self/fdinfo/{number.name}").read_text().partition("Pid:")[2].split()[0]
                )
    return found | set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


async def test_both_outputs_and_the_environment(tmp_path: Path) -> None:
    program = script(tmp_path, 'cat; echo "$WORD" >&2')
    before = open_now()
    assert await session(program, "one\ntwo\n", {"WORD": "hello", "PATH": os.defpath}) == (
        "one\ntwo",
        "hello",
    )
    assert open_now() <= before


async def test_more_than_a_pipe_holds_comes_back(tmp_path: Path) -> None:
    program = script(tmp_path, "head -c 300000 /dev/zero | tr '\\0' x")
    out, errors = await session(program, "", {"PATH": os.defpath})
    assert (len(out), errors) == (300_000, "")


async def test_of_words_without_end_the_beginning_is_kept(tmp_path: Path) -> None:
    program = script(tmp_path, "head -c 3000000 /dev/zero | tr '\\0' x")
    out, _ = await session(program, "", {"PATH": os.defpath})
    assert len(out) == MOST_BYTES


async def test_a_program_that_hangs_is_killed_and_reaped(tmp_path: Path) -> None:
    program = script(tmp_path, "exec sleep 60")
    before = open_now()
    with anyio.move_on_after(0.2) as scope:
        await session(program, "", {"PATH": os.defpath})
    assert scope.cancelled_caught
    assert open_now() <= before


async def test_what_outlives_its_kill_is_bounded_and_reaped_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, environment = script(tmp_path, "exec sleep 60"), {"PATH": os.defpath}
    before = open_now()
    with monkeypatch.context() as patch:  # as in a system call of a driver that hangs
        patch.setattr(control_commands, "KILLED_SECONDS", 0.01)
        patch.setattr(signal, "pidfd_send_signal", lambda *_: None)
        for _ in range(control_commands.MOST_LEFT):
            with anyio.move_on_after(0.05):
                await session(program, "", environment)
        with pytest.raises(Unanswered, match=r"4 sessions .* do not end"):
            await session(program, "", environment)
    left = open_now() - before
    assert len(left) == control_commands.MOST_LEFT
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    script(tmp_path, "exit 0")
    with anyio.fail_after(30):
        while open_now() - before:
            with suppress(Unanswered):
                await session(program, "", environment)


async def test_signals_are_as_programs_expect_them(tmp_path: Path) -> None:
    # Python ignores SIGPIPE (13, bit 0x1000); a program that inherited that would not notice a closed pipe.
    program = script(tmp_path, "grep SigIgn /proc/self/status")
    out, _ = await session(program, "", {"PATH": os.defpath})
    assert int(out.split()[1], 16) & 0x1000 == 0


async def test_no_program(tmp_path: Path) -> None:
    before = open_now()
    with pytest.raises(FileNotFoundError):
        await session(tmp_path / "none", "", {})
    assert open_now() <= before
