"""Connections that say nothing, to real daemons: found by the kernel's word, named, and cut off alone."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from agent.mps import connections
from agent.mps.binary import Program
from agent.mps.daemon import Daemon
from agent.mps.daemon_parts import DaemonState, EventReason
from tests.component.mps.keeping import OPTIONS, Bench, daemons_of, halted, one_server, reached
from tests.component.mps.test_tenants import TENANT, as_tenant, seen_states
from tests.pace import scaled

# Connects so often as it may, and says nothing until its input ends. Its last line: how many were cut off.
HOLD = """
import os, select, socket, sys
os.setuid(int(sys.argv[2]))
held = []
for _ in range(int(sys.argv[3])):
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.settimeout(0.2)
    try:
        one.connect(sys.argv[1])
    except OSError:
        break
    held.append(one)
print(len(held), flush=True)
sys.stdin.read()
print(sum(bool(select.select([each], [], [], 0)[0]) for each in held), flush=True)
"""
WITH_SERVER = replace(OPTIONS, prestart=True, probe_seconds=1.0)


class Holder:
    """A tenant's process with silent connections."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout
        self.held = int(process.stdout.readline())

    @property
    def pid(self) -> int:
        return self._process.pid

    def cut(self) -> int:
        """Ends it; how many of its connections had been cut off."""
        said, _ = self._process.communicate(timeout=10)
        return int(said)


@contextmanager
def holding(daemon: Daemon, count: int) -> Iterator[Holder]:
    socket = str(daemon.folders.pipe / "control")
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", HOLD, socket, str(TENANT), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Holder(process)
    finally:
        process.kill()
        process.communicate()


async def test_silent_mps_connection_harms_nobody(
    program: Program, run_folder: Path, stand_in_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units stay Healthy, daemon and server stay, others are heard: for one, and for all that fit."""
    monkeypatch.setattr(connections, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(connections, "AGAIN_SECONDS", 0.005)  # 200 at 50 ms each would take ten seconds
    bench = Bench(run_folder, program)
    daemon = bench.daemon(options=WITH_SERVER)
    daemon.control._deadline = scaled(2.0)
    async with bench.kept(daemon):
        before = await reached(daemon, DaemonState.SERVING)
        server = await one_server(daemon)
        async with seen_states(daemon) as seen:
            for count in (1, 200):
                with holding(daemon, count) as tenant:
                    assert tenant.held >= min(count, 128)  # the daemon's queue takes no more
                    with anyio.fail_after(10):
                        while daemon.status.value.cut < tenant.held:
                            await anyio.sleep(0.02)
                        # A neighbour is heard while the tenant goes on.
                        await anyio.to_thread.run_sync(as_tenant, program, daemon.folders, "get_server_list")
                    assert tenant.cut() == tenant.held
                daemon._prober._guard._peers._known.clear()  # each begins as somebody unknown
                daemon.status.publish(replace(daemon.status.value, cut=0))
        assert {status.state for status in seen} == {DaemonState.SERVING}
        after = daemon.status.value
        assert (after.pid, after.server, after.restarts) == (before.pid, server.pid, 0)
        assert await anyio.to_thread.run_sync(server.alive)
        assert set(bench.reports.kinds()) == {EventReason.SILENT}
        assert (
            f"of user {TENANT} in no pod connected to the MPS control daemon and said"
            in bench.reports.told[0][2]
        )
    await daemon.stop()


async def test_nobody_is_cut_off_who_waits_for_a_daemon_that_is_halted(
    newest: Program, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been halted with a connection in hand: then its system call still names that one."""
    monkeypatch.setattr(connections, "SILENT_SECONDS", 0.1)
    bench = Bench(run_folder, newest)
    daemon = bench.daemon()
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
    process = (await daemons_of(daemon))[0]
    peers = connections.SilentPeers(daemon.folders.pipe)
    with holding(daemon, 3):  # one in hand, the others behind it
        with anyio.fail_after(10):
            while (await anyio.to_thread.run_sync(peers.look, process)).again is None:
                await anyio.sleep(0.01)
        seen = peers._seen
        assert seen
        with halted(process.pid):
            while time.monotonic() < seen.end + 0.1:
                assert not (await anyio.to_thread.run_sync(peers.look, process)).cut
                await anyio.sleep(0.02)
        with anyio.fail_after(10):
            while not (await anyio.to_thread.run_sync(peers.look, process)).cut:
                await anyio.sleep(0.01)
    await daemon.stop()
