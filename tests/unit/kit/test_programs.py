"""Programs of others are bounded in time and output, and nothing of theirs stays behind."""

import gc
import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from agent.kit import programs
from agent.kit.programs import Finished, OutputTooLong, run
from tests.pace import scaled

ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


def _open_files() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


def _shell(script: str) -> list[str]:
    return ["sh", "-c", script]


async def test_output_errors_and_code_are_told_apart() -> None:
    done = await run(
        _shell("cat; echo no >&2; exit 3"), environment=ENVIRONMENT, seconds=30, most_bytes=100, stdin=b"word"
    )
    assert done == Finished(3, b"word", "no")


async def test_a_program_that_reads_nothing_is_no_error() -> None:
    text = b"x" * (1 << 20)
    done = await run(_shell("exit 0"), environment=ENVIRONMENT, seconds=30, most_bytes=1, stdin=text)
    assert done.code == 0


async def test_output_is_bounded() -> None:
    with pytest.raises(OutputTooLong):
        await run(_shell("yes"), environment=ENVIRONMENT, seconds=30, most_bytes=1000)


async def test_errors_beyond_the_bound_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "LONGEST_ERRORS", 10)
    done = await run(_shell("printf %01000d 0 >&2"), environment=ENVIRONMENT, seconds=30, most_bytes=10)
    assert done == Finished(0, b"", "0" * 10)


async def test_what_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 600 & echo $! >{pids}; echo $$ >>{pids}; mv {pids} {pids}.whole; wait"
    with pytest.raises(TimeoutError):
        await run(_shell(script), environment=ENVIRONMENT, seconds=scaled(1.5), most_bytes=10)
    await _all_gone(Path(f"{pids}.whole"))


async def test_the_pipes_of_what_was_killed_are_closed_on_return() -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_files()
    for _ in range(10):
        with pytest.raises(TimeoutError):
            await run(_shell("sleep 600 & wait"), environment=ENVIRONMENT, seconds=0.05, most_bytes=10)
        assert open_files() == before


async def test_what_does_not_end_when_killed_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck: list[int] = []  # as in a system call of a driver that hangs

    async def again(script: str, **more: float) -> Finished:
        bounds = {"seconds": 30.0} | more
        return await run(_shell(script), environment=ENVIRONMENT, most_bytes=10, **bounds)  # type: ignore[arg-type]

    monkeypatch.setattr(programs, "_left", {})
    with monkeypatch.context() as patch:
        patch.setattr(programs, "KILLED_SECONDS", 0.05)
        patch.setattr(os, "killpg", lambda pid, _: stuck.append(pid))
        with pytest.raises(TimeoutError):
            await again("exec sleep 600", seconds=0.05)
    with pytest.raises(OSError, match="does not end when killed"):
        await again("exec sleep 600")
    assert (await again("exit 3")).code == 3  # others are started
    monkeypatch.setattr(programs, "MOST_LEFT", 1)
    with pytest.raises(OSError, match="does not end when killed"):
        await again("exit 3")
    (pid,) = stuck
    os.kill(pid, signal.SIGKILL)
    with anyio.fail_after(30):
        while programs._left:
            await anyio.sleep(0.01)
            with suppress(OSError):
                assert (await again("exit 3")).code == 3


async def test_cancelling_kills_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def start() -> None:
        script = f"echo $$ >{pids}; mv {pids} {pids}.whole; sleep 600"
        await run(_shell(script), environment=ENVIRONMENT, seconds=60, most_bytes=10)

    whole = anyio.Path(f"{pids}.whole")
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(start)
            while not await whole.exists():
                await anyio.sleep(0.01)
            group.cancel_scope.cancel()
    await _all_gone(Path(whole))


async def test_a_program_that_is_not_there_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        await run(["/nowhere/program"], environment={}, seconds=5, most_bytes=1)


async def _all_gone(file: Path) -> None:
    with anyio.fail_after(30):
        for pid in file.read_text().split():  # noqa: ASYNC240  a test's folder
            while _runs(int(pid)):
                await anyio.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        # Init of a test machine may leave zombies for a while.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("turns", range(6))
async def test_a_start_that_is_cancelled_leaves_no_pipe_open(turns: int) -> None:
    """asyncio connects the pipes of a program one after the other, in a task of its own."""
    before = _open_files()
    async with anyio.create_task_group() as group:
        group.start_soon(partial(run, _shell("sleep 60"), environment=ENVIRONMENT, seconds=30, most_bytes=1))
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    await anyio.lowlevel.checkpoint()
    gc.collect()
    assert _open_files() <= before
