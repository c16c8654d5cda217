"""All daemons of a node: set up, taken back, left over, refused."""

import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from agent.kit.tasks import Cell
from agent.model.gpu import Driver, Gpu
from agent.model.modes import Assignment, GpuMode, Mode, Offering
from agent.mps import connections, processes
from agent.mps import daemon_manager as fleet_module
from agent.mps.binary import Program, find
from agent.mps.control_commands import environment
from agent.mps.daemon import Daemon
from agent.mps.daemon_manager import DaemonManager
from agent.mps.directories import Directories
from agent.mps.mps_errors import MpsError, ProgramMissing
from agent.mps.probing import DaemonProber
from agent.nvml.port import ComputeMode
from tests.component.mps.keeping import OPTIONS, Modes, Reports, one_server

DRIVER = Driver("580.95.05", "13.580.95.05", (13, 0))


def gpu(number: int) -> Gpu:
    uuid = f"GPU-5fd4f087-86f3-7a43-b711-4771313afc5{number}"
    return Gpu(uuid, number, number, f"0000:{number:02x}:00.0", "NVIDIA H200", 143771 << 20, (9, 0))


@contextlib.asynccontextmanager
async def running(
    manager: DaemonManager, assignment: Cell[Assignment] | None = None
) -> AsyncIterator[Cell[Assignment]]:
    cell = assignment or Cell(Assignment())
    async with anyio.create_task_group() as group:
        group.start_soon(manager.run, cell)
        yield cell
        group.cancel_scope.cancel()


def manager_of(run: Path, program: Program, modes: Modes, seconds: float = 20.0) -> DaemonManager:
    return DaemonManager(run, lambda: program, modes, Reports(), OPTIONS, set_up_seconds=seconds)


async def daemons(run: Path, uuid: str) -> list[int]:
    found = await anyio.to_thread.run_sync(processes.daemons, Directories.of(run, uuid).pipe)
    return [each.pid for each in found]


async def test_set_up_and_tear_down_of_single_gpus(newest: Program, run_folder: Path) -> None:
    modes = Modes()
    manager = manager_of(run_folder, newest, modes)
    one, other = gpu(0), gpu(1)
    async with running(manager):
        async with anyio.create_task_group() as group:
            for each in (one, other):
                group.start_soon(manager.set_up, each)
        assert {uuid: status.serving for uuid, status in manager.statuses.value.items()} == {
            one.uuid: True,
            other.uuid: True,
        }
        assert manager.unready(one.uuid) == ""
        pid = manager.status(other.uuid).pid
        await manager.tear_down(one)
        assert await daemons(run_folder, one.uuid) == []
        assert modes.modes[one.uuid] is ComputeMode.DEFAULT
        assert "no MPS control daemon" in manager.unready(one.uuid)
        assert await daemons(run_folder, other.uuid) == [pid]
        await manager.set_up(one)
        await manager.tear_down(one)
        await manager.tear_down(other)


async def test_set_up_that_fails_leaves_nothing(tmp_path: Path, run_folder: Path) -> None:
    broken = tmp_path / "nvidia-cuda-mps-control"
    broken.write_text("#!/bin/sh\necho 'error while loading shared libraries' >&2\nexit 127\n")
    broken.chmod(0o755)
    modes = Modes()
    manager = manager_of(run_folder, Program(broken), modes)
    async with running(manager):
        with pytest.raises(MpsError, match="error while loading shared libraries"):
            await manager.set_up(gpu(0))
        assert manager.statuses.value == {}
        assert modes.modes[gpu(0).uuid] is ComputeMode.DEFAULT
        assert not await anyio.Path(Directories.of(run_folder, gpu(0).uuid).pipe).exists()


async def test_a_program_that_has_died_is_not_waited_for(tmp_path: Path, run_folder: Path) -> None:
    broken = tmp_path / "nvidia-cuda-mps-control"
    broken.write_text("#!/bin/sh\necho 'no CUDA here' >&2\nsleep 0.3\nexit 1\n")
    broken.chmod(0o755)
    reports = Reports()
    manager = DaemonManager(
        run_folder, lambda: Program(broken), Modes(), reports, OPTIONS, set_up_seconds=300
    )
    async with running(manager):
        with (
            anyio.fail_after(20),
            pytest.raises(MpsError, match=r"ended with 1: no CUDA here; see .*/control.log$"),
        ):
            await manager.set_up(gpu(0))
        assert manager.statuses.value == {}
    assert reports.kinds() == []  # the error names it, and once


async def test_a_set_up_that_is_cancelled_is_taken_back(newest: Program, run_folder: Path) -> None:
    modes = Modes()
    manager = manager_of(run_folder, newest, modes)
    async with running(manager):
        with anyio.move_on_after(0.3):
            await manager.set_up(gpu(0))
        await manager.tear_down(gpu(0))
        assert await daemons(run_folder, gpu(0).uuid) == []
        assert modes.modes.get(gpu(0).uuid, ComputeMode.DEFAULT) is ComputeMode.DEFAULT
        assert manager.statuses.value == {}


async def test_daemons_of_an_earlier_agent_are_adopted_by_set_up(newest: Program, run_folder: Path) -> None:
    modes = Modes()
    first = manager_of(run_folder, newest, modes)
    async with running(first):
        await first.set_up(gpu(0))
        pid = first.status(gpu(0).uuid).pid
    second = manager_of(run_folder, newest, modes)
    async with running(second):
        await second.set_up(gpu(0))
        status = second.status(gpu(0).uuid)
        assert (status.pid, status.adopted) == (pid, True)
        await second.tear_down(gpu(0))


async def test_leftovers_on_gpus_of_another_mode_are_stopped(newest: Program, run_folder: Path) -> None:
    modes = Modes()
    first = manager_of(run_folder, newest, modes)
    async with running(first):
        await first.set_up(gpu(0))
        await first.set_up(gpu(1))
    second = manager_of(run_folder, newest, modes)
    offered = {gpu(0).uuid: GpuMode(Mode.PGPU), gpu(1).uuid: GpuMode(Mode.MPS)}
    async with running(second, Cell(Assignment(offered))):
        with anyio.fail_after(20):
            while (
                await daemons(run_folder, gpu(0).uuid) or modes.modes[gpu(0).uuid] is not ComputeMode.DEFAULT
            ):
                await anyio.sleep(0.05)
        # One that its GPU still needs is left for `set_up`.
        assert len(await daemons(run_folder, gpu(1).uuid)) == 1
        await second.set_up(gpu(1))
        await second.tear_down(gpu(1))


async def test_daemons_are_left_alone_until_the_switcher_has_judged_their_gpus(
    newest: Program, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kubelet or the driver away that takes as long as they are; pods are at work meanwhile."""
    monkeypatch.setattr(fleet_module, "LEFTOVER_SECONDS", 0.1)
    modes, one = Modes(), gpu(0)
    first = manager_of(run_folder, newest, modes)
    async with running(first):
        await first.set_up(one)
        pid = first.status(one.uuid).pid
    second = manager_of(run_folder, newest, modes)
    async with running(second) as assignment:
        await anyio.sleep(1)
        assert await daemons(run_folder, one.uuid) == [pid]
        assignment.publish(Assignment({one.uuid: GpuMode(Mode.OFF)}))
        with anyio.fail_after(20):
            while await anyio.Path(Directories.of(run_folder, one.uuid).pipe).exists():
                await anyio.sleep(0.05)
    assert not await daemons(run_folder, one.uuid)


async def test_what_is_set_up_while_leftovers_are_stopped_is_none(
    newest: Program, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes, uuids = Modes(), {gpu(0).uuid: gpu(0), gpu(1).uuid: gpu(1)}
    first = manager_of(run_folder, newest, modes)
    async with running(first):
        for each in uuids.values():
            await first.set_up(each)
    stopping, go_on = list[str](), anyio.Event()
    stop = Daemon.stop

    async def slow(daemon: Daemon) -> None:
        stopping.append(daemon.uuid)
        await go_on.wait()
        await stop(daemon)

    monkeypatch.setattr(Daemon, "stop", slow)
    second = manager_of(run_folder, newest, modes)
    async with running(second, Cell(Assignment(dict.fromkeys(uuids, GpuMode(Mode.PGPU))))) as assignment:
        with anyio.fail_after(20):
            while not stopping:
                await anyio.sleep(0.01)
        (kept,) = set(uuids) - set(stopping)
        await second.set_up(uuids[kept])
        pid = second.status(kept).pid
        go_on.set()
        with anyio.fail_after(20):
            while await daemons(run_folder, stopping[0]):
                await anyio.sleep(0.05)
        await anyio.sleep(0.5)
        assert second.status(kept).pid == pid
        assert await daemons(run_folder, kept) == [pid]
        assignment.publish(Assignment({kept: GpuMode(Mode.MPS)}))
        await second.tear_down(uuids[kept])


async def test_a_daemon_in_use_outlives_a_set_up_that_takes_too_long(
    newest: Program, run_folder: Path
) -> None:
    modes, one = Modes(), gpu(0)
    first = manager_of(run_folder, newest, modes)
    async with running(first):
        await first.set_up(one)
        pid = first.status(one.uuid).pid
    assert pid
    second = manager_of(run_folder, newest, modes, seconds=1.0)
    in_use = Assignment({one.uuid: GpuMode(Mode.MPS, Offering.CLOSED)})
    async with running(second, Cell(in_use)):
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(MpsError, match="cannot be set up"):
                await second.set_up(one)
        finally:
            os.kill(pid, signal.SIGCONT)
        with anyio.fail_after(20):
            await second.wait_serving(one.uuid)
        await second.set_up(one)
        assert (second.status(one.uuid).pid, second.status(one.uuid).adopted) == (pid, True)
        await second.tear_down(one)


async def test_who_is_at_work_by_a_server_is_seen_also_where_that_outlived_its_daemon(
    newest: Program, run_folder: Path, stand_in_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody names the pods the switcher takes such a GPU over, and a set-up that fails leaves all."""
    modes, one, clients = Modes(), gpu(0), {os.getpid()}

    def peers(_: int) -> frozenset[int]:
        if not clients:
            raise PermissionError("pidfd_getfd")
        return frozenset(clients)

    first = manager_of(run_folder, newest, modes)
    async with running(first):
        monkeypatch.setattr(connections, "peers_of", peers)
        monkeypatch.setattr(processes, "in_pods", lambda pids: os.getpid() in pids)
        assert await first.at_work(one.uuid, surely=False) is False
        await first.set_up(one)
        daemon, pid = first.daemon(one.uuid), first.status(one.uuid).pid
        assert daemon
        assert pid
        assert await first.at_work(one.uuid, surely=False) is False  # it has no server
        await daemon.control.start_server()
        server = await one_server(daemon)
        assert await first.at_work(one.uuid, surely=True) is True
        clients.clear()
        assert await first.at_work(one.uuid, surely=False) is None
        clients.add(1)  # a process of the host
        assert await first.at_work(one.uuid, surely=False) is False
        held, identify = threading.Event(), processes.identify
        monkeypatch.setattr(processes, "identify", lambda pid: identify(pid) if held.wait(20) else None)
        with anyio.fail_after(10):
            assert await first.at_work(one.uuid, surely=False) is None
        held.set()
    os.kill(pid, signal.SIGKILL)
    pipe = await anyio.Path(daemon.folders.pipe).stat()
    second = manager_of(run_folder, newest, modes, seconds=1.0)
    with anyio.fail_after(20):
        while not await second.at_work(one.uuid, surely=False):  # the daemon has yet to end
            await anyio.sleep(0.01)
    assert not await second.at_work(one.uuid, surely=True)
    kept = Assignment({one.uuid: GpuMode(Mode.MPS, Offering.CLOSED)})
    async with running(second, Cell(kept)):
        with pytest.raises(MpsError, match="of the dead daemon still runs"):
            await second.set_up(one)
        assert await anyio.to_thread.run_sync(processes.remaining, [server.pid])
        os.kill(server.pid, signal.SIGKILL)
        with anyio.fail_after(20):
            await second.set_up(one)
        assert os.path.samestat(pipe, await anyio.Path(daemon.folders.pipe).stat())
        await second.tear_down(one)
        assert not await second.at_work(one.uuid, surely=False)


async def test_nobody_is_at_work_where_no_daemon_can_be(newest: Program, tmp_path: Path) -> None:
    """As on a node without MPS: a path that is too long for its sockets must not end the switcher."""
    manager = manager_of(tmp_path / ("long" * 30), newest, Modes())
    assert not await manager.at_work(gpu(0).uuid, surely=False)


async def test_supervision_that_crashed_is_taken_up_again(
    newest: Program, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes, one = Modes(), gpu(0)
    manager = manager_of(run_folder, newest, modes)
    crashed = anyio.Event()

    async def crash(_: DaemonProber) -> None:
        crashed.set()
        raise RuntimeError("a fault of ours")

    with pytest.RaisesGroup(RuntimeError, flatten_subgroups=True), monkeypatch.context() as patch:
        patch.setattr(DaemonProber, "_probe", crash)
        async with running(manager):
            await manager.set_up(one)
    assert crashed.is_set()
    async with running(manager):
        with anyio.fail_after(20):
            await manager.wait_serving(one.uuid)
        await manager.tear_down(one)
    assert not await daemons(run_folder, one.uuid)


async def test_leftovers_are_ended_without_their_program(newest: Program, run_folder: Path) -> None:
    def nowhere() -> Program:
        raise ProgramMissing("it was taken away")

    modes, one = Modes(), gpu(0)
    first = manager_of(run_folder, newest, modes)
    async with running(first):
        await first.set_up(one)
    second = DaemonManager(run_folder, nowhere, modes, Reports(), OPTIONS)
    async with running(second):
        await second.tear_down(one)
    assert not await daemons(run_folder, one.uuid)
    assert modes.modes[one.uuid] is ComputeMode.DEFAULT


async def test_missing_program_refuses_the_mode_with_the_remedy(tmp_path: Path, run_folder: Path) -> None:
    def finder() -> Program:
        return find(tmp_path, search=str(tmp_path))

    manager = DaemonManager(run_folder, finder, Modes(), Reports(), OPTIONS)
    await manager.look()
    refused = manager.refusal(gpu(0), DRIVER)
    assert refused is not None
    assert "install the driver's MPS package" in refused
    assert "MIG" in (manager.refusal(replace(gpu(0), mig_enabled=True), DRIVER) or "")
    async with running(manager):
        with pytest.raises(ProgramMissing):
            await manager.set_up(gpu(0))
        await manager.tear_down(gpu(0))  # nothing to do, and no way to fail


def test_program_is_found_in_the_driver_root_before_path(newest: Program, tmp_path: Path) -> None:
    folder = str(newest.path.parent)
    assert find(tmp_path, search=folder) == Program(newest.path)
    inside = tmp_path / "usr" / "bin" / "nvidia-cuda-mps-control"
    inside.parent.mkdir(parents=True)
    inside.symlink_to(newest.path)
    loader = tmp_path / "lib64" / "ld-linux-x86-64.so.2"
    loader.parent.mkdir()
    loader.touch()  # as in every root that programs can run in
    found = find(tmp_path, search=folder)
    assert found == Program(inside, tmp_path)
    assert found.inner == "/usr/bin/nvidia-cuda-mps-control"
    with pytest.raises(ProgramMissing, match=r"mps\.controlProgram"):
        find(tmp_path, explicit=tmp_path / "nothing")


@pytest.mark.parametrize("prefix", ["usr/local/nvidia", "home/kubernetes/bin/nvidia"])
def test_server_of_a_driver_in_a_folder_of_its_own_finds_its_libraries(tmp_path: Path, prefix: str) -> None:
    for name in ("bin/nvidia-cuda-mps-control", "lib64/libcuda.so.1"):
        file = tmp_path / prefix / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o755)
    program = find(tmp_path, search="/nonexistent")
    folders = Directories(tmp_path / "gpu")
    assert environment(program, folders)["LD_LIBRARY_PATH"] == f"/{prefix}/lib64"
    explicit = find(tmp_path, explicit=program.path)
    assert environment(explicit, folders)["LD_LIBRARY_PATH"] == f"{tmp_path}/{prefix}/lib64"
    # Where the system loader knows the library nothing is said of it.
    (tmp_path / "usr" / "bin").mkdir(parents=True)
    (tmp_path / "usr" / "bin" / "nvidia-cuda-mps-control").touch(mode=0o755)
    assert "LD_LIBRARY_PATH" not in environment(find(tmp_path, search="/nonexistent"), folders)


async def test_a_kernel_that_holds_no_processes_is_refused_with_the_remedy(
    newest: Program, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: int) -> int:
        raise OSError(38, "Function not implemented")

    manager = manager_of(run_folder, newest, Modes())
    await manager.look()
    assert manager.refusal(gpu(0), DRIVER) is None
    monkeypatch.setattr(os, "pidfd_open", missing)
    await manager.look()
    assert "needs Linux 5.3" in (manager.refusal(gpu(0), DRIVER) or "")
