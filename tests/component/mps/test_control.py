"""The typed client against the real control daemon: settings read back, bad values kept away, in turn."""

import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from agent.mps.binary import Program
from agent.mps.control_commands import Control, ServerState, environment
from agent.mps.daemon import Daemon
from agent.mps.daemon_parts import DaemonState
from agent.mps.mps_errors import DaemonRefused, Unanswered
from tests.component.mps.keeping import OPTIONS, Bench, reached
from tests.pace import scaled


@contextlib.asynccontextmanager
async def serving(program: Program, run: Path) -> AsyncIterator[Daemon]:
    bench = Bench(run, program)
    # The supervisor sets a changed percentage back with its next probe.
    daemon = bench.daemon(options=replace(OPTIONS, probe_seconds=600))
    daemon.control._deadline = scaled(2.0)
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
        yield daemon
    await daemon.stop()


async def test_a_setting_is_checked_and_read_back(program: Program, run_folder: Path) -> None:
    async with serving(program, run_folder) as daemon:
        assert await daemon.control.alive() == 100
        await daemon.control.set_default_percentage(35)
        assert await daemon.control.alive() == 35
        for bad in (0, 101):
            with pytest.raises(ValueError, match="percentage"):
                await daemon.control.set_default_percentage(bad)
        assert await daemon.control.alive() == 35


async def test_forty_questions_at_once_are_all_answered(program: Program, run_folder: Path) -> None:
    """Without one lock per daemon only one in eight is (measured)."""
    answered: list[float] = []
    async with serving(program, run_folder) as daemon:

        async def ask() -> None:
            answered.append(await daemon.control.alive())

        daemon.control._deadline = 30.0
        async with anyio.create_task_group() as group:
            for _ in range(40):
                group.start_soon(ask)
    assert answered == [100.0] * 40


async def test_server_state_where_the_version_has_it(
    program: Program, run_folder: Path, stand_in_server: Path
) -> None:
    """The stand-in never becomes ACTIVE: it lives, and says nothing to its daemon."""
    async with serving(program, run_folder) as daemon:
        assert await daemon.control.servers() == ()
        await daemon.control.start_server()
        (server,) = await daemon.control.servers()
        state = ServerState.INITIALIZING if "550" in str(program.path) else None
        for _ in range(2):
            found = await daemon.control.survey(server)
            assert (found.servers, found.state) == ((server,), state)


async def test_unknown_server_is_a_refusal_in_the_daemons_words(program: Program, run_folder: Path) -> None:
    async with serving(program, run_folder) as daemon:
        with pytest.raises(DaemonRefused, match="Server 1 not found"):
            await daemon.control.client_pids(1)
        with pytest.raises(DaemonRefused, match="not found"):
            await daemon.control.terminate_client(1, 2)


async def test_no_daemon_is_said_within_the_deadline(newest: Program, run_folder: Path) -> None:
    bench = Bench(run_folder, newest)
    control = Control(newest, bench.daemon().folders, deadline=0.3)
    with pytest.raises(Unanswered, match="did not answer within"):
        await control.alive()


async def test_idle_session_of_somebody_else_blocks_only_until_the_deadline(
    newest: Program, run_folder: Path
) -> None:
    async with serving(newest, run_folder) as daemon:
        control = Control(newest, daemon.folders, deadline=0.5)
        blocker = subprocess.Popen(  # noqa: ASYNC220  it lives for half a second
            [str(newest.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment(newest, daemon.folders),
        )
        assert blocker.stdin
        try:
            # Its first command makes sure that it has the daemon's ear.
            blocker.stdin.write(b"get_server_list\n")
            blocker.stdin.flush()
            await anyio.sleep(min(scaled(0.3), 3.0))
            with pytest.raises(Unanswered):
                await control.alive()
        finally:
            os.kill(blocker.pid, signal.SIGKILL)
            await anyio.to_thread.run_sync(blocker.wait)
            blocker.stdin.close()
        assert await daemon.control.alive() == 100


async def test_cancelled_question_leaves_the_daemon_free(newest: Program, run_folder: Path) -> None:
    async with serving(newest, run_folder) as daemon:
        for _ in range(5):
            with anyio.move_on_after(0.003):
                await daemon.control.alive()
        assert await daemon.control.alive() == 100
