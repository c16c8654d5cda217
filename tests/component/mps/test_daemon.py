"""The supervisor against the real control daemon."""

import os
import re
import signal
import socket
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agent.mps import daemon_logs
from agent.mps.binary import Program
from agent.mps.daemon_parts import DaemonState, EventReason
from agent.mps.directories import Directories
from agent.mps.mps_errors import MpsError
from agent.nvml.port import ComputeMode
from tests.component.mps.keeping import (
    OPTIONS,
    UUID,
    Bench,
    Word,
    daemons_of,
    one_server,
    reached,
    servers_of,
)

FATAL, RECREATED = "Server is handling a fatal GPU error.", "Creating server context on device 0"
EIGHT = [f"GPU-5fd4f087-86f3-7a43-b711-4771313afc5{number}" for number in range(8)]


def environment_of(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_bytes().decode()
    return dict(item.split("=", 1) for item in text.split("\0") if item)


def _tell(folder: Path, line: str) -> None:
    with (folder / "server.log").open("a") as file:
        file.write(f"[2026-11-21 10:00:00.000 Server  4711] {line}\n")


async def test_one_daemon_for_each_of_eight_gpus(program: Program, run_folder: Path) -> None:
    bench = Bench(run_folder, program)
    daemons = [bench.daemon(uuid) for uuid in EIGHT]
    async with bench.kept(*daemons):
        statuses = [await reached(daemon, DaemonState.SERVING) for daemon in daemons]
        assert len({status.pid for status in statuses}) == 8
        for uuid, status in zip(EIGHT, statuses, strict=True):
            assert status.pid is not None
            variables = environment_of(status.pid)
            assert variables["CUDA_VISIBLE_DEVICES"] == uuid
            assert variables["CUDA_MPS_PIPE_DIRECTORY"] == f"{run_folder}/mps/{uuid}/pipe"
            assert variables["CUDA_MPS_LOG_DIRECTORY"] == f"{run_folder}/mps/{uuid}/log"
            assert os.getsid(status.pid) != os.getsid(0)
            # These versions take the flag for a request to run as a client.
            assert status.multi_user is False
        assert bench.modes.modes == dict.fromkeys(EIGHT, ComputeMode.EXCLUSIVE_PROCESS)
    for daemon in daemons:
        await daemon.stop()


async def test_shared_memory_is_a_tmpfs_of_its_own(newest: Program, run_folder: Path) -> None:
    bench = Bench(run_folder, newest)
    daemon = bench.daemon()
    async with bench.kept(daemon):
        status = await reached(daemon, DaemonState.SERVING)
        folders = Directories.of(run_folder, UUID)
        assert status.private_shm
        assert folders.shm.is_mount()
        await anyio.Path(folders.shm / "cuda.shm.1").touch()
        assert await anyio.Path(f"/proc/{status.pid}/root/dev/shm/cuda.shm.1").exists()
        assert not await anyio.Path("/dev/shm/cuda.shm.1").exists()
        # Any user passes through to the sockets and may make shared memory.
        assert stat.S_IMODE(folders.shm.stat().st_mode) == 0o1777
        for folder in (folders.pipe, folders.root, folders.root.parent, run_folder):
            assert folder.stat().st_mode & 0o111 == 0o111, folder
    await daemon.stop()


async def test_cancelled_supervision_leaves_the_daemon_for_the_next(
    program: Program, run_folder: Path
) -> None:
    bench = Bench(run_folder, program)
    first = bench.daemon()
    async with bench.kept(first):
        before = await reached(first, DaemonState.SERVING)
    assert [each.pid for each in await daemons_of(first)] == [before.pid]
    second = bench.daemon()
    async with bench.kept(second):
        after = await reached(second, DaemonState.SERVING)
        assert (after.pid, after.adopted, after.private_shm) == (before.pid, True, True)
    await second.stop()


async def test_killed_daemon_is_restarted_and_told(program: Program, run_folder: Path) -> None:
    bench = Bench(run_folder, program)
    daemon = bench.daemon()
    async with bench.kept(daemon):
        first = await reached(daemon, DaemonState.SERVING)
        assert first.pid
        os.kill(first.pid, signal.SIGKILL)
        down = await reached(daemon, DaemonState.STARTING)
        assert "restarted" in down.reason
        second = await reached(daemon, DaemonState.SERVING)
        assert second.pid != first.pid
        assert second.restarts == 1
        assert bench.reports.kinds() == [EventReason.FAILED, EventReason.RECOVERED]
    await daemon.stop()


async def test_stale_sockets_are_no_obstacle(program: Program, run_folder: Path) -> None:
    folders = Directories.of(run_folder, UUID)
    await anyio.to_thread.run_sync(folders.make)
    for name in ("control", "control_privileged"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
            stale.bind(str(folders.pipe / name))
    await anyio.Path(folders.pipe / "control_lock").touch()
    await anyio.Path(folders.pipe / "nvidia-cuda-mps-control.pid").write_text("1\n")
    os.mkfifo(folders.pipe / "log")
    bench = Bench(run_folder, program)
    daemon = bench.daemon()
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
    await daemon.stop()


async def test_second_agent_is_refused_and_starts_nothing(newest: Program, run_folder: Path) -> None:
    bench = Bench(run_folder, newest)
    first, second = bench.daemon(), bench.daemon()
    async with bench.kept(first):
        status = await reached(first, DaemonState.SERVING)
        with pytest.raises(MpsError, match="another agent"):
            await second.run()
        await second.stop()  # it has no right to end it either
        assert [each.pid for each in await daemons_of(first)] == [status.pid]
        assert status.serving
    await first.stop()


async def test_stop_leaves_nothing(program: Program, run_folder: Path, stand_in_server: Path) -> None:
    bench = Bench(run_folder, program)
    daemon = bench.daemon()
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
        await daemon.control.start_server()
        await one_server(daemon)
    await daemon.stop()
    assert not await daemons_of(daemon)
    assert not await servers_of(daemon)
    assert not daemon.folders.pipe.exists()
    assert not daemon.folders.shm.exists()
    assert str(run_folder) not in await anyio.Path("/proc/self/mountinfo").read_text()
    assert bench.modes.modes[UUID] is ComputeMode.DEFAULT
    assert daemon.status.value.state is DaemonState.STOPPED


async def test_stop_restores_the_compute_mode_of_a_dead_daemon(newest: Program, run_folder: Path) -> None:
    bench = Bench(run_folder, newest)
    daemon = bench.daemon()
    async with bench.kept(daemon):
        status = await reached(daemon, DaemonState.SERVING)
    assert status.pid
    os.kill(status.pid, signal.SIGKILL)
    await bench.daemon().stop()
    assert bench.modes.modes[UUID] is ComputeMode.DEFAULT
    assert not daemon.folders.pipe.exists()


async def test_not_serving_while_a_server_of_the_dead_daemon_lives(
    newest: Program, run_folder: Path, stand_in_server: Path
) -> None:
    bench = Bench(run_folder, newest)
    daemon = bench.daemon()
    async with bench.kept(daemon):
        status = await reached(daemon, DaemonState.SERVING)
        await daemon.control.start_server()
        orphan = await one_server(daemon)
        assert status.pid
        os.kill(status.pid, signal.SIGKILL)
        # A child that the server has just forked looks like it, and is named beside it.
        named = re.compile(rf"server .*\b{orphan.pid}\b.* of the dead")
        with anyio.fail_after(20):
            await daemon.status.wait_for(lambda status: bool(named.search(status.reason)))
        assert not await daemons_of(daemon)
        os.kill(orphan.pid, signal.SIGKILL)
        assert (await reached(daemon, DaemonState.SERVING)).pid != status.pid
    await daemon.stop()


async def test_compute_mode_that_somebody_changed_is_set_back(newest: Program, run_folder: Path) -> None:
    bench = Bench(run_folder, newest)
    daemon = bench.daemon()
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
        bench.modes.broken = True
        bench.modes.modes[UUID] = ComputeMode.DEFAULT
        lost = await reached(daemon, DaemonState.STARTING)
        assert "compute modes cannot be set" in lost.reason
        bench.modes.broken = False
        await reached(daemon, DaemonState.SERVING)
        assert bench.modes.modes[UUID] is ComputeMode.EXCLUSIVE_PROCESS
    await daemon.stop()


async def test_prestarted_server_is_held_to_be_up(
    newest: Program, run_folder: Path, stand_in_server: Path
) -> None:
    bench = Bench(run_folder, newest)
    daemon = bench.daemon(options=replace(OPTIONS, prestart=True))
    async with bench.kept(daemon):
        first = await reached(daemon, DaemonState.SERVING)
        assert first.server is not None
        server = await one_server(daemon)
        assert server.pid == first.server
        os.kill(server.pid, signal.SIGKILL)
        with anyio.fail_after(20):
            await daemon.status.wait_for(
                lambda status: status.serving and status.server not in (None, first.server)
            )
        # A server that cannot start, as on a node without libcuda.
        await anyio.Path(stand_in_server).write_text("#!/bin/sh\nexit 1\n")
        for each in await servers_of(daemon):
            os.kill(each.pid, signal.SIGKILL)
        failed = await reached(daemon, DaemonState.STARTING)
        assert "does not start" in failed.reason
    await daemon.stop()


async def test_fault_in_the_server_log_and_recovery(
    oldest: Program, run_folder: Path, stand_in_server: Path
) -> None:
    """The lines are those of NVIDIA's documentation on MPS errors; no GPU writes them here."""
    bench = Bench(run_folder, oldest)
    daemon = bench.daemon(options=replace(OPTIONS, prestart=True))
    server_log = daemon.folders.log / "server.log"

    def said(*lines: str) -> None:
        with server_log.open("a") as file:
            file.writelines(f"[2026-11-21 10:00:00.000 Server  4711] {line}\n" for line in lines)

    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
        said("Server is handling a fatal GPU error.", "Status of client {815, 1} is INACTIVE")
        fault = await reached(daemon, DaemonState.FAULT)
        assert "fatal GPU error" in fault.reason
        said(
            "Client {0, 1} exit", "Destroy server context on device 0", "Creating server context on device 0"
        )
        after = await reached(daemon, DaemonState.SERVING)
        assert after.faults == 1
        assert bench.reports.kinds() == [EventReason.FAULT, EventReason.RECOVERED]
    await daemon.stop()


async def test_a_fault_is_told_without_a_look_at_the_clock(
    newest: Program, run_folder: Path, tmp_path: Path, stand_in_server: Path
) -> None:
    """Neither probe nor poll comes within the test: the kernel reports the write, so the daemon is asked."""
    word = Word.of(newest, tmp_path)
    bench = Bench(run_folder, word.program)
    daemon = bench.daemon(options=replace(OPTIONS, prestart=True, probe_seconds=600, log_seconds=600))
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
        word.say("FAULT")
        await anyio.to_thread.run_sync(_tell, daemon.folders.log, FATAL)
        await reached(daemon, DaemonState.FAULT)
        assert bench.reports.kinds() == [EventReason.FAULT]
        word.say("ACTIVE")
        await anyio.to_thread.run_sync(_tell, daemon.folders.log, RECREATED)
        await reached(daemon, DaemonState.SERVING)
        assert daemon.status.value.faults == 1
    await daemon.stop()


async def test_logs_are_looked_at_where_the_kernel_gives_no_watch(
    oldest: Program,
    run_folder: Path,
    stand_in_server: Path,
    monkeypatch: pytest.MonkeyPatch,
    logs: list[Any],
) -> None:
    def no_watch(*_: object, **__: object) -> object:
        raise OSError(24, "too many watches")

    monkeypatch.setattr(daemon_logs, "watching", no_watch)
    bench = Bench(run_folder, oldest)
    daemon = bench.daemon(options=replace(OPTIONS, prestart=True, probe_seconds=600))
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
        await anyio.to_thread.run_sync(_tell, daemon.folders.log, FATAL)
        await reached(daemon, DaemonState.FAULT)
    await daemon.stop()
    assert [event for event in logs if event["event"] == "mps_logs_not_watched"]


async def test_the_logs_do_not_grow_for_ever(
    program: Program, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon writes down every question, and the run folder is memory."""
    monkeypatch.setattr(daemon_logs, "LARGE_BYTES", 2000)
    bench = Bench(run_folder, program)
    daemon = bench.daemon(options=replace(OPTIONS, probe_seconds=0.02))
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
        kept = anyio.Path(daemon.folders.log / "control.log.1")
        with anyio.fail_after(20):
            while not await kept.exists():
                await anyio.sleep(0.02)
        written = (await kept.stat()).st_mtime_ns
        with anyio.fail_after(20):  # and again: the daemon goes on in the emptied file
            while (await kept.stat()).st_mtime_ns == written:
                await anyio.sleep(0.02)
        assert (await anyio.Path(daemon.folders.log / "control.log").stat()).st_size < 10_000
        assert "\0" not in await kept.read_text()
        assert daemon.status.value.serving
    await daemon.stop()


async def test_old_faults_in_the_log_are_not_taken_for_new(
    oldest: Program, run_folder: Path, stand_in_server: Path
) -> None:
    bench = Bench(run_folder, oldest)
    folders = Directories.of(run_folder, UUID)
    await anyio.to_thread.run_sync(folders.make)
    await anyio.Path(folders.log / "server.log").write_text(
        "[x Server 1] Server is handling a fatal GPU error.\n"
    )
    daemon = bench.daemon(options=replace(OPTIONS, prestart=True))
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
        assert daemon.status.value.faults == 0
    await daemon.stop()


async def test_program_that_cannot_run_is_told_and_tried_again(run_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "nvidia-cuda-mps-control"
    broken.write_text("#!/bin/sh\necho 'no libcuda here' >&2\nexit 1\n")
    broken.chmod(0o755)
    bench = Bench(run_folder, Program(broken))
    daemon = bench.daemon()
    async with bench.kept(daemon):
        with anyio.fail_after(20):
            status = await daemon.status.wait_for(lambda status: status.restarts >= 2)
        assert "no libcuda here" in status.reason
        assert bench.reports.kinds()[0] is EventReason.FAILED
    await daemon.stop()
    assert bench.modes.modes[UUID] is ComputeMode.DEFAULT
