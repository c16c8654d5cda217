"""A supervisor with everything around it that a test looks at."""

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.to_thread

from agent.mps import processes
from agent.mps.binary import CONTROL, Program
from agent.mps.compute_mode import ComputeModes
from agent.mps.daemon import Daemon
from agent.mps.daemon_parts import DaemonState, DaemonStatus, EventReason, Options
from agent.mps.directories import Directories
from agent.mps.mps_errors import MpsError
from agent.mps.processes import Process
from agent.nvml.port import ComputeMode
from tests.pace import scaled

UUID = "GPU-5fd4f087-86f3-7a43-b711-4771313afc50"
# No server without a GPU; no cgroup unless a test is about cgroups.
OPTIONS = Options(
    cgroups=Path("/nonexistent"),
    shared_memory=64 << 20,
    prestart=False,
    probe_seconds=0.2,
    log_seconds=0.05,
    quit_seconds=0,  # stand-ins for servers leave at a signal only
)


@dataclass
class Modes(ComputeModes):
    """Compute modes in memory. `broken` makes changes fail, `away` all; `lost` are GPUs without an answer."""

    modes: dict[str, ComputeMode] = field(default_factory=dict)
    broken: bool = False
    away: bool = False
    lost: set[str] = field(default_factory=set)

    async def get(self, uuid: str) -> ComputeMode | None:
        if self.away:
            raise MpsError("the compute mode cannot be read: NVML did not answer within 2 s")
        return None if uuid in self.lost else self.modes.get(uuid, ComputeMode.DEFAULT)

    async def users(self, uuid: str) -> frozenset[int] | None:
        del uuid
        return frozenset()

    async def set(self, uuid: str, mode: ComputeMode) -> None:
        if self.broken:
            raise MpsError("compute modes cannot be set on this test machine")
        self.modes[uuid] = mode


@dataclass
class Reports:
    """Events of the supervisor."""

    told: list[tuple[EventReason, str, str, frozenset[int]]] = field(default_factory=list)

    def __call__(
        self, kind: EventReason, uuid: str, message: str, pids: frozenset[int] = frozenset()
    ) -> None:
        self.told.append((kind, uuid, message, pids))

    def kinds(self) -> list[EventReason]:
        return [kind for kind, *_ in self.told]


@dataclass
class Bench:
    """One run folder and what the supervisors on it share."""

    run: Path
    program: Program
    modes: Modes = field(default_factory=Modes)
    reports: Reports = field(default_factory=Reports)

    def daemon(self, uuid: str = UUID, options: Options = OPTIONS) -> Daemon:
        folders = Directories.of(self.run, uuid)
        return Daemon(uuid, self.program, folders, self.modes, self.reports, options)

    @contextlib.asynccontextmanager
    async def kept(self, *daemons: Daemon) -> AsyncIterator[None]:
        """Supervise while the context is open; the daemons live on after it."""
        async with anyio.create_task_group() as group:
            for daemon in daemons:
                group.start_soon(daemon.run)
            yield
            group.cancel_scope.cancel()


@dataclass
class Word:
    """The reports of a server about its state, through its real daemon: no server runs without a GPU.

    `program` is the daemon's own, with the one word replaced that it has for a stand-in server. That has no
    clients: asked for them, the daemon would wait for its answer for ever.
    """

    program: Program
    file: Path

    @classmethod
    def of(cls, real: Program, folder: Path) -> Self:
        """Of a real program of a version that reports the state; its files are written into `folder`."""
        word = cls(Program(folder / CONTROL), folder / "state")
        word.say("ACTIVE")
        word.program.path.write_text(
            f'#!/bin/sh\ncase "$1" in -d) exec {real.path} "$@";; esac\n'
            f'sed /^get_client_list/d | {real.path} | sed "s/^INITIALIZING$/$(cat {word.file})/"\n'
        )
        word.program.path.chmod(0o755)
        return word

    def say(self, state: str) -> None:
        self.file.write_text(state)


async def reached(daemon: Daemon, state: DaemonState, deadline: float = 20.0, **also: Any) -> DaemonStatus:
    """Wait for a state, with the named fields of the status having the given values."""
    with anyio.move_on_after(scaled(deadline)):
        return await daemon.status.wait_for(
            lambda status: (
                status.state is state and all(getattr(status, key) == value for key, value in also.items())
            )
        )
    raise TimeoutError(
        f"not {state.value} with {also} within {deadline:g} s; last seen: {daemon.status.value}"
    )


@contextlib.contextmanager
def halted(pid: int) -> Iterator[None]:
    """A process that hangs: it lives, and answers nobody."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def daemons_of(daemon: Daemon) -> tuple[Process, ...]:
    """Control daemons that run on the supervisor's pipe folder."""
    return await anyio.to_thread.run_sync(processes.daemons, daemon.folders.pipe)


async def servers_of(daemon: Daemon) -> tuple[Process, ...]:
    """Servers that were started for the supervisor's pipe folder."""
    return await anyio.to_thread.run_sync(processes.servers, daemon.folders.pipe)


async def one_server(daemon: Daemon, deadline: float = 10.0) -> Process:
    """The server that was just started: for a moment it still looks like its daemon."""
    with anyio.fail_after(deadline):
        while len(found := await servers_of(daemon)) != 1:
            await anyio.sleep(0.01)
    return found[0]
