"""Faults around a daemon: hangs, programs taken away, hostile pods, drivers that are replaced."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from agent.mps import probing, processes
from agent.mps.binary import CONTROL, SERVER, Program
from agent.mps.control_commands import Control
from agent.mps.daemon import Daemon
from agent.mps.daemon_parts import DaemonState, EventReason
from agent.mps.directories import Directories
from agent.mps.mps_errors import DaemonRefused
from agent.nvml.port import ComputeMode
from tests.component.mps.keeping import (
    OPTIONS,
    UUID,
    Bench,
    daemons_of,
    halted,
    one_server,
    reached,
    servers_of,
)
from tests.pace import scaled


def script(path: Path, text: str) -> Program:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return Program(path)


def tell(log: Path, line: str) -> None:
    with log.open("a") as file:
        file.write(f"{line}\n")


async def test_a_daemon_whose_program_was_taken_away_is_ended_and_the_gpu_given_back(
    newest: Program, run_folder: Path, tmp_path: Path
) -> None:
    link = tmp_path / CONTROL
    link.symlink_to(newest.path)
    bench = Bench(run_folder, Program(link))
    daemon = bench.daemon()
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
    link.unlink()
    await daemon.stop()
    assert not await daemons_of(daemon)
    assert not daemon.folders.pipe.exists()
    assert bench.modes.modes[UUID] is ComputeMode.DEFAULT


async def test_the_folder_stays_until_the_compute_mode_is_given_back(
    newest: Program, run_folder: Path
) -> None:
    """By it the next try, or the next agent, knows that there is something to clear up."""
    bench = Bench(run_folder, newest)
    daemon = bench.daemon()
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
    bench.modes.broken = True
    await daemon.stop()
    assert not await daemons_of(daemon)
    assert daemon.folders.pipe.exists()
    bench.modes.broken = False
    await bench.daemon().stop()
    assert not daemon.folders.pipe.exists()
    assert bench.modes.modes[UUID] is ComputeMode.DEFAULT


async def test_folders_that_a_root_pod_put_in_the_place_of_sockets_are_no_obstacle(
    newest: Program, run_folder: Path
) -> None:
    folders = Directories.of(run_folder, UUID)
    await anyio.to_thread.run_sync(folders.make)
    for name in ("control", "log"):
        await anyio.Path(folders.pipe / name / "deep").mkdir(parents=True)
    bench = Bench(run_folder, newest)
    daemon = bench.daemon()
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
    await daemon.stop()
    assert not folders.pipe.exists()


@pytest.mark.parametrize("name", [CONTROL, SERVER])
async def test_a_process_of_a_pod_is_not_taken_for_the_daemon(
    run_folder: Path, tmp_path: Path, name: str
) -> None:
    """Any user of any pod can give a process the daemon's name, arguments and environment."""
    fake = script(tmp_path / name, "sleep 60")
    folders = Directories.of(run_folder, UUID)
    pod = subprocess.Popen(  # noqa: ASYNC220  the moment that a fork takes
        ["unshare", "--fork", "--pid", "--kill-child", str(fake.path), "-d"],
        env={"PATH": os.defpath, "CUDA_MPS_PIPE_DIRECTORY": str(folders.pipe)},
    )
    found = processes.daemons if name == CONTROL else processes.servers
    try:
        with anyio.fail_after(10):
            while not await anyio.to_thread.run_sync(has_child, pod.pid, str(fake.path)):
                await anyio.sleep(0.02)
        assert await anyio.to_thread.run_sync(found, folders.pipe) == ()
    finally:
        pod.kill()
        await anyio.to_thread.run_sync(pod.wait)


def has_child(pid: int, word: str) -> bool:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return any(word in processes.arguments(int(child)) for child in children)


async def test_a_hung_daemon_is_replaced_though_its_idle_server_lives(
    newest: Program, run_folder: Path, stand_in_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(run_folder, newest)
    daemon = bench.daemon(options=replace(OPTIONS, prestart=True))
    async with bench.kept(daemon):
        before = await reached(daemon, DaemonState.SERVING)
        server = await one_server(daemon)
        assert before.pid
        with halted(before.pid):
            # For as long only: its successor may be slow.
            with monkeypatch.context() as hasty, anyio.fail_after(30):
                hasty.setattr(probing, "HANG_SECONDS", 0.5)
                hasty.setattr(daemon.control, "_deadline", 0.5)
                await daemon.status.wait_for(lambda status: status.pid != before.pid)
            with anyio.fail_after(30):
                await daemon.status.wait_for(lambda status: status.serving and status.pid != before.pid)
        assert server not in await servers_of(daemon)
        assert bench.reports.kinds() == [EventReason.FAILED, EventReason.RECOVERED]
    await daemon.stop()


async def test_a_hung_daemon_is_left_while_a_client_lives(
    newest: Program, run_folder: Path, stand_in_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(run_folder, newest)
    daemon = bench.daemon(options=replace(OPTIONS, prestart=True))
    async with bench.kept(daemon):
        before = await reached(daemon, DaemonState.SERVING)
        assert before.pid
        with halted(before.pid), monkeypatch.context() as hasty:
            hasty.setattr(daemon.control, "_deadline", 0.5)
            await reached(daemon, DaemonState.STARTING)
            # The stand-in serves nobody: this process plays a client that was seen before the hang.
            daemon._prober.clients = (os.getpid(),)
            hasty.setattr(probing, "HANG_SECONDS", 0.2)
            with anyio.fail_after(20):
                while daemon._prober._kept is None:
                    await anyio.sleep(0.02)
            assert f"process {os.getpid()} is a client of its server" in daemon._prober._kept
            assert [each.pid for each in await daemons_of(daemon)] == [before.pid]
        assert (await reached(daemon, DaemonState.SERVING)).pid == before.pid
        # It was not served for a while, which is no failure that was reported.
        assert not bench.reports.told
    await daemon.stop()


async def test_a_long_command_of_our_own_says_nothing_against_the_daemon(
    newest: Program, run_folder: Path, tmp_path: Path
) -> None:
    """Ending a client waits for its kernels, and the daemon hears one at a time."""
    patience = min(scaled(0.5), 2.0)
    slow = script(
        tmp_path / CONTROL,
        f'text=$(cat); case "$text" in *terminate_client*) sleep {2 * patience:g};; esac; '
        f'echo "$text" | {newest.path}',
    )
    bench = Bench(run_folder, newest)
    daemon = bench.daemon()
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
        control = Control(slow, daemon.folders, deadline=patience)
        answered: list[float] = []

        async def ask() -> None:
            answered.append(await control.alive())

        async with anyio.create_task_group() as group:
            group.start_soon(refused, control)
            await anyio.sleep(0.1)
            group.start_soon(ask)
        assert answered == [100.0]
    await daemon.stop()


async def refused(control: Control) -> None:
    with pytest.raises(DaemonRefused, match="not found"):
        await control.terminate_client(1, 2)


@pytest.mark.parametrize("code", [0, 2])
async def test_whatever_a_version_says_to_an_unknown_flag_it_is_started_without(
    newest: Program, run_folder: Path, tmp_path: Path, code: int
) -> None:
    """Real ones of 580 and 595 end with 0 on an unknown flag; the one that they have is another."""
    newer = script(
        tmp_path / CONTROL,
        f'case "$*" in *multiuser*) echo "Unrecognized option" >&2; exit {code};; esac\n'
        f'exec {newest.path} "$@"',
    )
    bench = Bench(run_folder, newer)
    daemon = bench.daemon()
    async with bench.kept(daemon):
        assert (await reached(daemon, DaemonState.SERVING)).multi_user is False
    await daemon.stop()


async def test_a_daemon_without_its_library_is_told_with_the_remedy(run_folder: Path, tmp_path: Path) -> None:
    """As 580.178.04 and 595 end where there is no libcuda: with 244, and not a word."""
    mute = script(tmp_path / CONTROL, "exit 244")
    daemon = (bench := Bench(run_folder, mute)).daemon()
    async with bench.kept(daemon):
        with anyio.fail_after(20):
            status = await daemon.status.wait_for(lambda status: status.restarts > 0)
    assert "finds no libcuda.so.1: have the driver's libraries" in status.reason
    await daemon.stop()


async def test_the_flag_is_remembered_of_a_version_that_has_it(
    newest: Program, run_folder: Path, tmp_path: Path
) -> None:
    """No program that can be had without a GPU's driver has it: this one takes it for the other's sake."""
    asked = tmp_path / "asked"
    newer = script(
        tmp_path / CONTROL,
        f'case "$*" in "") exec {newest.path};; esac; echo "$*" >> {asked}; exec {newest.path} -d',
    )
    known: dict[object, bool] = {}
    bench = Bench(run_folder, newer)
    for _ in range(2):
        daemon = Daemon(
            UUID, newer, Directories.of(run_folder, UUID), bench.modes, bench.reports, OPTIONS, known
        )
        async with bench.kept(daemon):
            assert (await reached(daemon, DaemonState.SERVING)).multi_user is True
        await daemon.stop()
    assert known == {await anyio.to_thread.run_sync(newer.version): True}
    assert await anyio.Path(asked).read_text() == 2 * "-d -multiuser-server\n"


async def test_pods_are_let_through_by_selinux(
    newest: Program, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: dict[str, bytes] = {}
    monkeypatch.setattr(os, "getxattr", lambda *_: b"system_u:object_r:var_run_t:s0\0")
    monkeypatch.setattr(os, "setxattr", lambda path, name, value: labels.update({f"{path} {name}": value}))
    daemon = (bench := Bench(run_folder, newest)).daemon()
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
    label = b"system_u:object_r:container_file_t:s0\0"
    folders = daemon.folders
    assert labels == {f"{each} security.selinux": label for each in (folders.own, folders.pipe, folders.shm)}
    await daemon.stop()


async def test_a_label_that_selinux_refuses_is_told(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    folders = Directories.of(run_folder, UUID)
    await anyio.to_thread.run_sync(folders.make)
    assert folders.label() is None  # no SELinux here
    monkeypatch.setattr(os, "getxattr", lambda *_: b"system_u:object_r:var_run_t:s0\0")
    monkeypatch.setattr(os, "setxattr", refuse)
    assert "cannot be labelled for pods: Operation not permitted" in (folders.label() or "")


async def test_a_fault_that_began_before_the_agent_is_seen(
    oldest: Program, run_folder: Path, stand_in_server: Path
) -> None:
    """Drivers before 550 report it in the log only, and clients that came now would fail."""
    bench = Bench(run_folder, oldest)
    first = bench.daemon()
    async with bench.kept(first):
        await reached(first, DaemonState.SERVING)
        await first.control.start_server()
        server = await one_server(first)
    log = first.folders.log / "server.log"
    fatal, over = "Server is handling a fatal GPU error.", "Creating server context on device 0"
    await anyio.to_thread.run_sync(tell, log, f"[x Server 1] {fatal}")
    second = bench.daemon()
    async with bench.kept(second):
        await reached(second, DaemonState.SERVING)  # a server of long ago
    await anyio.to_thread.run_sync(tell, log, f"[x Server {server.pid}] {fatal}")
    third = bench.daemon()
    async with bench.kept(third):
        await reached(third, DaemonState.FAULT)
        await anyio.to_thread.run_sync(tell, log, f"[x Server {server.pid}] {over}")
        await reached(third, DaemonState.SERVING)
    await third.stop()


def test_a_program_in_the_place_of_another_is_another(tmp_path: Path) -> None:
    program = script(tmp_path / CONTROL, "exit 1")
    before = program.version()
    assert program.version() == before
    script(tmp_path / "new", "exit 1").path.replace(program.path)
    assert program.version() != before
    program.path.unlink()
    assert program.version() is None
