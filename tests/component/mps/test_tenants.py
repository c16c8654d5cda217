"""Interfaces that tenants of an MPS node reach: the log fifo, the control socket, the looks of a daemon."""

import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from structlog.testing import capture_logs

from agent.mps import daemon_logs, launch, probing, processes, shared_memory
from agent.mps.binary import CONTROL, Program
from agent.mps.control_commands import environment
from agent.mps.daemon import Daemon
from agent.mps.daemon_parts import DaemonState, DaemonStatus, EventReason
from agent.mps.directories import Directories
from tests.component.mps.keeping import OPTIONS, UUID, Bench, Word, daemons_of, reached
from tests.pace import scaled

TENANT = 65534
CGROUPS = Path("/sys/fs/cgroup")
POD = f"pod3fa85f64-5717-4562-b3fc-2c963f66afa6/{'0123456789abcdef' * 4}"
FATAL, RECREATED = "Server is handling a fatal GPU error.", "Creating server context on device 0"
WITH_SERVER = replace(OPTIONS, prestart=True)
# Goes from one given cgroup to the next, then plays a control daemon.
PLAYER = """
import os, sys
from agent.mps import launcher
program, pipe, user, *cgroups = sys.argv[1:]
for folder in cgroups:
    launcher.enter(folder)
os.setuid(int(user))
os.execve(program, [program, "-d"], {"CUDA_MPS_PIPE_DIRECTORY": pipe})
"""


def message(text: str, kind: int = 0xABCDE000, pid: int = 777) -> bytes:
    """As a client sends it to the daemon's log: kind, process, moment, length, two words of nothing."""
    head = struct.pack("<12I", kind, pid, 2026, 11, 22, 0, 4, 42, 53, 83, len(text), 0)
    return head + text.encode()


def inject(fifo: Path, *texts: str) -> None:
    """Write into the daemon's log as a process of any tenant can."""
    code = f"import os, sys\nos.setuid({TENANT})\nfd = os.open(sys.argv[1], os.O_WRONLY)\n" + "".join(
        f"os.write(fd, {message(text)!r})\n" for text in texts
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(fifo)], check=True, timeout=30)


def as_tenant(program: Program, folders: Directories, command: str) -> None:
    """Say something to the control daemon as a process of any tenant can."""
    mine = shutil.copy(program.path, folders.root / CONTROL)
    subprocess.run(
        [str(mine)],
        input=f"{command}\n",
        env=environment(program, folders),
        user=TENANT,
        text=True,
        capture_output=True,
        timeout=10,
        check=False,
    )


async def written(daemon: Daemon, times: int = 1) -> None:
    """Return once the daemon has written forged lines into its log."""
    with anyio.fail_after(20):
        while True:
            logs = [daemon.folders.log / name for name in ("server.log", "control.log")]
            texts = [await anyio.Path(each).read_text(errors="replace") for each in logs if each.exists()]
            if sum(text.count(FATAL) + text.count(RECREATED) for text in texts) >= times:
                return
            await anyio.sleep(0.02)


@asynccontextmanager
async def seen_states(daemon: Daemon) -> AsyncIterator[list[DaemonStatus]]:
    """Every status that is published meanwhile."""
    seen: list[DaemonStatus] = []

    async def follow() -> None:
        async for status in daemon.status.values():
            seen.append(status)  # noqa: PERF401  it never ends

    async with anyio.create_task_group() as group:
        group.start_soon(follow)
        yield seen
        group.cancel_scope.cancel()


async def test_forged_log_is_no_verdict(
    newest: Program,
    run_folder: Path,
    tmp_path: Path,
    stand_in_server: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lines make the agent ask; what the server says counts. No probe but these comes within the test."""
    monkeypatch.setattr(probing, "SETTLE_SECONDS", 0.4)
    word = Word.of(newest, tmp_path)
    bench = Bench(run_folder, word.program)
    daemon = bench.daemon(options=replace(WITH_SERVER, probe_seconds=600))
    daemon.control._deadline = scaled(2.0)
    fifo = daemon.folders.pipe / "log"
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
        async with seen_states(daemon) as seen:
            await anyio.to_thread.run_sync(inject, fifo, FATAL, "Status of client {815, 1} is INACTIVE")
            await written(daemon)
            await anyio.sleep(0.8)
        assert {status.state for status in seen} == {DaemonState.SERVING}
        assert not bench.reports.told
        # A true fault is seen at once, and cannot be hidden.
        word.say("FAULT")
        await anyio.to_thread.run_sync(inject, fifo, FATAL)
        fault = await reached(daemon, DaemonState.FAULT)
        assert fault.reason == "a client's fatal error: its server says FAULT"
        await anyio.to_thread.run_sync(inject, fifo, RECREATED)
        await written(daemon, 3)
        await anyio.sleep(0.8)
        assert daemon.status.value.state is DaemonState.FAULT
        word.say("ACTIVE")
        await anyio.to_thread.run_sync(inject, fifo, FATAL, RECREATED)
        await reached(daemon, DaemonState.SERVING)
        assert [(kind, pids) for kind, _, _, pids in bench.reports.told] == [
            (EventReason.FAULT, frozenset()),  # nobody whom a line names without being a client
            (EventReason.RECOVERED, frozenset()),
        ]
    await daemon.stop()


@pytest.mark.parametrize("generation", ["oldest", "newest"])
async def test_a_flood_of_forged_lines_does_no_harm(
    request: pytest.FixtureRequest, generation: str, run_folder: Path, tmp_path: Path, stand_in_server: Path
) -> None:
    """The oldest has nothing but its log: there faults are forged, and last the longer the more there are.

    How often daemons are asked meanwhile is shown in tests/unit/mps/test_probing.py.
    """
    program: Program = request.getfixturevalue(generation)
    if generation == "newest":
        program = Word.of(program, tmp_path).program
    bench = Bench(run_folder, program)
    daemon = bench.daemon(options=replace(WITH_SERVER, probe_seconds=1.0))
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
        for number in range(6):
            lines = [*(40 * (FATAL, RECREATED)), FATAL if number % 2 == 0 else RECREATED]
            await anyio.to_thread.run_sync(inject, daemon.folders.own / "log", *lines)
            await anyio.sleep(0.3)
        await reached(daemon, DaemonState.SERVING)
        if generation == "newest":
            assert not bench.reports.told
        else:
            assert daemon.status.value.faults >= 1
            assert len(bench.reports.told) == 2 * daemon.status.value.faults <= 12
    await daemon.stop()


def flooded(fifo: Path, size: int) -> None:
    """Write so many bytes into a daemon's log as a process of any tenant can."""
    code = (
        f"import os, sys\nos.setuid({TENANT})\nfd = os.open(sys.argv[1], os.O_WRONLY)\n"
        f"for _ in range({size} // 3000):\n    os.write(fd, {message('x' * 2900)!r})\n"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(fifo)], check=True, timeout=60)


def used(folder: Path) -> int:
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


async def test_log_flood_is_bounded_without_the_agent(
    program: Program, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tmpfs bounds the logs; the agent that returns makes room first, and the daemon goes on."""
    monkeypatch.setattr(shared_memory, "LOG_BYTES", 2 << 20)
    monkeypatch.setattr(daemon_logs, "LARGE_BYTES", 1 << 20)
    monkeypatch.setattr(daemon_logs, "KEPT_BYTES", 64 << 10)
    bench = Bench(run_folder, program)
    first = bench.daemon()
    async with bench.kept(first):
        before = await reached(first, DaemonState.SERVING)
    log = first.folders.log
    await anyio.to_thread.run_sync(flooded, first.folders.pipe / "log", 6 << 20)
    assert await anyio.to_thread.run_sync(used, log) == 2 << 20
    second = bench.daemon()
    async with bench.kept(second):
        after = await reached(second, DaemonState.SERVING, adopted=True)
        assert after.pid == before.pid
        await anyio.to_thread.run_sync(inject, second.folders.pipe / "log", FATAL)
        await written(second)
        assert await anyio.to_thread.run_sync(used, log) < 1 << 20
        assert (await anyio.Path(log / "control.log.1").stat()).st_size == 64 << 10
    assert await second.stop() is None
    assert not await anyio.to_thread.run_sync(log.is_mount)
    assert await anyio.Path(log / "control.log").exists()  # for diagnosis


async def test_a_daemon_whose_logs_have_no_bound_is_told_of_and_gets_one_with_its_next_start(
    newest: Program, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As agents up to 0.2.0 started it: it writes into the run folder."""
    bench = Bench(run_folder, newest)
    before = bench.daemon()
    log = before.folders.log
    with monkeypatch.context() as earlier:
        earlier.setattr(shared_memory, "bound_logs", lambda _: None)
        async with bench.kept(before):
            await reached(before, DaemonState.SERVING)
    assert not await anyio.to_thread.run_sync(log.is_mount)
    daemon = bench.daemon()
    async with bench.kept(daemon):
        with capture_logs() as said:
            status = await reached(daemon, DaemonState.SERVING, adopted=True)
        assert [each["lacks"] for each in said if each["event"] == "mps_daemon_degraded"] == ["log"]
        assert status.pid
        os.kill(status.pid, signal.SIGKILL)
        await reached(daemon, DaemonState.SERVING, adopted=False)
        assert await anyio.to_thread.run_sync(log.is_mount)
    await daemon.stop()


async def test_default_percentage_is_restored(program: Program, run_folder: Path) -> None:
    bench = Bench(run_folder, program)
    daemon = bench.daemon()
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
        # 535 obeys anybody, 550 refuses: there it takes root on the node.
        command = "set_default_active_thread_percentage 1"
        await anyio.to_thread.run_sync(as_tenant, program, daemon.folders, command)
        if "535" not in str(program.path):
            await anyio.sleep(1)
            assert not bench.reports.told
            await daemon.control.set_default_percentage(1)
        with anyio.fail_after(20):
            while EventReason.SETTING not in bench.reports.kinds():
                await anyio.sleep(0.05)
        assert await daemon.control.alive() == 100
        assert "set the default active thread percentage to 1" in bench.reports.told[0][2]
        # Again and again: set back each time, reported once.
        await daemon.control.set_default_percentage(2)
        with anyio.fail_after(20):
            while await daemon.control.alive() != 100:
                await anyio.sleep(0.05)
        assert bench.reports.kinds() == [EventReason.SETTING]
        assert daemon.status.value.serving
    await daemon.stop()


@pytest.fixture
def pod_cgroup() -> Iterator[list[Path]]:
    """The cgroup of a pod's container in every hierarchy, as a kubelet makes it, and the way there."""
    top = [folder / f"gna-test-{os.getpid()}" for folder in launch.hierarchies(CGROUPS)]
    ways = [(root, (root / POD).parent, root / POD) for root in top]
    yield [folder for way in ways for folder in way]
    for folder in (each for way in ways for each in reversed(way)):
        if folder.exists():
            folder.rmdir()


@pytest.fixture(params=[0, TENANT])
def false_daemon(request: pytest.FixtureRequest, run_folder: Path, pod_cgroup: list[Path]) -> Iterator[int]:
    """A process of this PID namespace with a daemon's name, arguments and environment; its PID.

    Root is in a pod; another user needs none.
    """
    program = run_folder / CONTROL
    program.write_text("#!/bin/sh\nwhile read -r line; do :; done\n")
    program.chmod(0o755)
    run_folder.chmod(0o755)
    pipe = Directories.of(run_folder, UUID).pipe
    cgroups = pod_cgroup if request.param == 0 else []
    player = subprocess.Popen(
        [sys.executable, "-c", PLAYER, str(program), str(pipe), str(request.param), *map(str, cgroups)],
        stdin=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    try:
        deadline = time.monotonic() + scaled(20)
        while not processes.impostors(pipe):
            assert time.monotonic() < deadline, player.poll()
            time.sleep(0.02)
        yield player.pid
    finally:
        player.kill()
        player.communicate()


async def test_false_daemon_is_not_adopted(newest: Program, run_folder: Path, false_daemon: int) -> None:
    """A pod with hostPID has the daemon's PID namespace, and may give a process any name."""
    bench = Bench(run_folder, newest)
    pids = set()
    for _ in range(2):  # at a start, and at an update of the agent
        daemon = bench.daemon()
        async with bench.kept(daemon):
            status = await reached(daemon, DaemonState.SERVING)
            pids.add(status.pid)
            assert {each.pid for each in await daemons_of(daemon)} == pids
        assert [(kind, named) for kind, _, _, named in bench.reports.told] == [
            (EventReason.IMPOSTOR, frozenset({false_daemon}))
        ]
        bench.reports.told.clear()
    assert status.adopted
    assert len(pids) == 1
    assert false_daemon not in pids
    await daemon.stop()
    alive = await anyio.to_thread.run_sync(processes.identify, false_daemon)
    assert alive, "a pod's process is not the agent's to end"


async def test_the_listener_is_whom_the_kernel_names(program: Program, run_folder: Path) -> None:
    bench = Bench(run_folder, program)
    daemon = bench.daemon()
    assert await anyio.to_thread.run_sync(processes.listener, daemon.folders) is None
    async with bench.kept(daemon):
        status = await reached(daemon, DaemonState.SERVING)
        assert await anyio.to_thread.run_sync(processes.listener, daemon.folders) == status.pid
    await daemon.stop()
    assert await anyio.to_thread.run_sync(processes.listener, daemon.folders) is None
