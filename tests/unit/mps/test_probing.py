"""When a daemon is asked, and what its logs are worth: with a daemon and logs that are played."""

import os
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from agent.mps import connections, probing, processes
from agent.mps.connections import PeersSeen
from agent.mps.control_commands import ServerState, Survey
from agent.mps.daemon_logs import ServerLog
from agent.mps.daemon_parts import DaemonParts, DaemonState, EventReason, Options, StatusPublisher
from agent.mps.directories import Directories
from agent.mps.mps_errors import MpsError, ProgramMissing
from agent.mps.probing import DaemonProber
from agent.mps.processes import Process

PROBE_SECONDS = 0.4
FATAL, RECREATED = "Server is handling a fatal GPU error.", "Creating server context on device 0"


class Scene:
    """A daemon with a server, and logs into which lines are written as fast as they are read, or never."""

    def __init__(self, state: ServerState | None, flood: bool = False) -> None:
        self.said = ServerLog()
        self.state = state
        self.gives_state = state is not None
        self.clients: tuple[int, ...] = ()
        self.seen_by_driver: frozenset[int] | None = frozenset()
        self.moments: list[float] = []
        self.told: list[EventReason] = []
        self._flood = flood
        publisher = StatusPublisher("GPU-1", lambda kind, *_: self.told.append(kind))
        self.publisher = publisher
        any_part: Any = self
        options = Options(probe_seconds=PROBE_SECONDS, prestart=False)
        folders = Directories(Path("/nowhere"))
        parts = DaemonParts(any_part, folders, any_part, any_part, publisher, options, any_part)
        self.prober = DaemonProber(parts)

    async def hold(self, lost: bool = False) -> None:
        """Nothing to hold."""

    async def users(self, uuid: str) -> frozenset[int] | None:
        del uuid
        return self.seen_by_driver

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        yield

    async def survey(self, server: int | None = None, clients: bool = False) -> Survey:
        self.moments.append(anyio.current_time())
        return Survey((17,), self.state, self.clients if clients else None, 100.0)

    async def grown(self) -> None:
        if not self._flood:
            await anyio.sleep_forever()
        await anyio.sleep(0.01)
        self.said.feed([RECREATED if self.said.fault else FATAL])

    async def ask(self, times: int) -> None:
        for _ in range(times):
            await self.prober._probe()
            await self.prober._until_due()


async def test_a_flood_of_lines_ends_in_the_usual_pauses() -> None:
    scene = Scene(ServerState.ACTIVE, flood=True)
    await scene.ask(6)  # the pauses double from 50 ms on
    scene.moments.clear()
    await scene.ask(3)
    pauses = [after - before for before, after in zip(scene.moments, scene.moments[1:], strict=False)]
    assert min(pauses) >= 0.9 * PROBE_SECONDS
    assert not scene.told


async def test_a_line_is_answered_by_a_question_and_the_word_of_the_server_counts() -> None:
    scene = Scene(ServerState.ACTIVE)
    await scene.prober._probe()
    scene.said.feed([FATAL])
    scene.prober._turned = anyio.current_time()
    await scene.prober._probe()
    assert scene.publisher.now.serving
    assert scene.prober._unsettled()  # it may take its own fault in late: it is asked again soon
    scene.state = ServerState.FAULT
    await scene.prober._probe()
    assert scene.publisher.now.state is DaemonState.FAULT
    scene.said.feed([RECREATED])
    await scene.prober._probe()
    assert scene.publisher.now.state is DaemonState.FAULT
    scene.state = ServerState.ACTIVE
    await scene.prober._probe()
    assert scene.told == [EventReason.FAULT, EventReason.RECOVERED]


async def test_faults_by_the_logs_alone_last_the_longer_the_more_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, now = Scene(None), 1000.0
    monkeypatch.setattr("agent.mps.probing.anyio.current_time", lambda: now)
    await scene.prober._probe()
    held = []
    for _ in range(10):
        scene.said.feed([FATAL])
        await scene.prober._probe()
        began = now
        scene.said.feed([RECREATED])
        while not scene.publisher.now.serving:
            now += 0.25
            await scene.prober._probe()
        held.append(now - began)
    assert held == [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    now += probing.LONGEST_FAULT_SECONDS + 1
    scene.said.feed([FATAL, RECREATED, FATAL])
    await scene.prober._probe()
    assert scene.prober._held_until - now == 0.5
    assert scene.told == 10 * [EventReason.FAULT, EventReason.RECOVERED] + [EventReason.FAULT]


@pytest.mark.parametrize("error", [ProgramMissing("no program"), MpsError("the compute mode cannot be read")])
async def test_silent_peers_are_looked_for_at_each_probe_of_a_daemon_that_cannot_be_asked(
    error: MpsError, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, looks = Scene(ServerState.ACTIVE), 0

    async def hold(lost: bool = False) -> None:
        raise error

    def look(_daemon: Process) -> PeersSeen:
        nonlocal looks
        looks += 1
        return PeersSeen((), None)

    monkeypatch.setattr(scene, "hold", hold)
    monkeypatch.setattr(scene.prober._guard._peers, "look", look)
    async with anyio.create_task_group() as group:
        group.start_soon(scene.prober._probing, Process(5, 1))
        group.start_soon(scene.prober._guard.run, Process(5, 1))
        with anyio.fail_after(10):
            while looks < 3:
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()


@pytest.mark.parametrize(
    "word", ["nobody", "daemon", "kernel", "driver", "driver is silent", "kernel is silent"]
)
async def test_a_daemon_that_hangs_is_ended_only_where_kernel_and_driver_see_no_client(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, server = Process(5, 1), Process(17, 1)
    ended: list[Process] = []

    async def end(found: Collection[Process]) -> None:
        ended.extend(found)

    def peers_of(_pid: int) -> frozenset[int]:
        if word == "kernel is silent":
            raise PermissionError(1, "Operation not permitted")
        return frozenset({os.getpid()} if word == "kernel" else ())

    monkeypatch.setattr(processes, "servers", lambda _: (server,))
    monkeypatch.setattr(processes, "end", end)
    monkeypatch.setattr(connections, "peers_of", peers_of)
    scene = Scene(ServerState.ACTIVE)
    scene.clients = (os.getpid(),) if word == "daemon" else ()
    if word == "driver is silent":
        scene.seen_by_driver = None
    else:
        scene.seen_by_driver = frozenset({17, os.getpid()} if word == "driver" else {17})
    await scene.prober._probe()
    await scene.prober._end_hung(daemon)
    assert ended == ([daemon, server] if word == "nobody" else [])
