"""The demo's stand-in for the control program says what the real one says, as far as the demo needs it."""

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from agent.model.cuda import PIPE_DIRECTORY
from agent.mps.binary import Program
from agent.mps.control_commands import environment
from agent.mps.daemon import Daemon
from agent.mps.daemon_parts import DaemonState
from agent.mps.directories import Directories
from agent.simulator import mps_control
from tests.component.mps.keeping import OPTIONS, Bench, reached

COMMANDS = (
    "get_server_list",
    "get_default_active_thread_percentage",
    "set_default_active_thread_percentage 40",
    "set_default_active_thread_percentage abc",
    "get_default_active_thread_percentage",
    "get_server_status 1",
    "get_client_list 1",
    "nonsense",
)


@pytest.fixture
def stand_in(tmp_path: Path) -> Program:
    return Program(mps_control.install(tmp_path / "bin"))


def say(program: Program, folders: Directories, commands: Sequence[str]) -> str:
    done = subprocess.run(
        [str(program.path)],
        input="".join(f"{command}\n" for command in commands),
        env=environment(program, folders),
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    return done.stdout


async def conversation(daemon: Daemon, program: Program) -> list[str]:
    return [await anyio.to_thread.run_sync(say, program, daemon.folders, [command]) for command in COMMANDS]


async def test_it_answers_as_the_real_program_does(
    newest: Program, stand_in: Program, run_folder: Path
) -> None:
    said: list[list[str]] = []
    for program in (newest, stand_in):
        bench = Bench(run_folder, program)
        # The supervisor sets a changed percentage back with its next probe.
        daemon = bench.daemon(options=replace(OPTIONS, probe_seconds=600))
        async with bench.kept(daemon):
            await reached(daemon, DaemonState.SERVING)
            said.append(await conversation(daemon, program))
        await daemon.stop()
    real, played = said
    assert dict(zip(COMMANDS, played, strict=True)) == dict(zip(COMMANDS, real, strict=True))


async def test_it_dies_is_restarted_and_leaves_nothing(stand_in: Program, run_folder: Path) -> None:
    bench = Bench(run_folder, stand_in)
    daemon = bench.daemon()
    async with bench.kept(daemon):
        first = await reached(daemon, DaemonState.SERVING)
        assert first.pid
        second = await anyio.to_thread.run_sync(
            lambda: subprocess.run(
                [str(stand_in.path), "-d"],
                env=environment(stand_in, daemon.folders) | {PIPE_DIRECTORY: str(daemon.folders.own)},
                capture_output=True,
                text=True,
                timeout=10,
                check=False,
            )
        )
        assert second.returncode == 1
        assert "already running" in second.stderr
    await daemon.stop()
    assert not await anyio.Path(daemon.folders.pipe).exists()
