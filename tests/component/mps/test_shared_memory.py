"""The /dev/shm of a GPU: its bound, and what ended containers leave in it."""

import os
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

import anyio
import anyio.to_thread
import pytest

from agent.cleanup import this_node
from agent.kit.tasks import Cell
from agent.model.holding import Record
from agent.mps import launch, shared_memory
from agent.mps import shm_sweep as sweep_module
from agent.mps.binary import Program
from agent.mps.control_commands import Survey
from agent.mps.directories import Directories
from agent.mps.shm_sweep import Swept, sweep
from agent.mps.upkeep import Upkeep
from agent.nvml.port import NvmlPort
from agent.settings import load
from tests.component.mps.keeping import OPTIONS, UUID, Modes
from tests.component.mps.pods import NOBODY, Container
from tests.component.mps.test_daemon_manager import gpu, manager_of, running
from tests.component.mps.test_folders import started_by_hand

MIB = 1 << 20
PROC = Path("/proc")
TICK_SECONDS = 0.1  # more than the kernel's clocks differ by


@pytest.fixture
def folders(run_folder: Path) -> Iterator[Directories]:
    """Those of a GPU, with 4 MiB of shared memory."""
    found = Directories.of(run_folder, UUID)
    found.make()
    assert shared_memory.prepare(found, 4 * MIB) is None
    yield found
    shared_memory.unmount(found.shm)


def test_one_pod_cannot_take_the_memory_of_the_node(folders: Directories) -> None:
    assert filled(folders.shm) == 4 * MIB
    # Nor by the kernel's own memory for files that hold nothing.
    made = 0
    with suppress(OSError):
        for made in range(5000):
            (folders.shm / str(made)).touch()
    assert 500 < made < 1100


def filled(folder: Path) -> int:
    """How many bytes fit into a folder."""
    taken = 0
    with (folder / "large").open("wb", buffering=0) as file, suppress(OSError):
        while taken < 64 * MIB:
            taken += file.write(bytes(MIB))
    return taken


def test_nobody_is_led_out_of_it(folders: Directories, tmp_path: Path) -> None:
    """The server, which is root, opens files here by names that any pod can take."""
    (tmp_path / "victim").write_text("precious")
    (folders.shm / "cuda.shm.0.1").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        (folders.shm / "cuda.shm.0.1").write_text("overwritten")
    flags = os.statvfs(folders.shm).f_flag
    assert flags & os.ST_NODEV
    assert flags & os.ST_NOSUID


def test_another_size_is_taken_up_while_it_is_in_use(folders: Directories) -> None:
    def size() -> int:
        found = os.statvfs(folders.shm)
        return found.f_blocks * found.f_frsize

    (folders.shm / "kept").write_bytes(bytes(2 * MIB))
    assert shared_memory.prepare(folders, 8 * MIB) is None
    assert size() == 8 * MIB
    # What is in use cannot be taken away.
    assert "its size stays at 8388608 bytes" in (shared_memory.limit(folders, MIB) or "")
    assert size() == 8 * MIB
    assert (folders.shm / "kept").stat().st_size == 2 * MIB


def test_what_pods_would_not_see_is_told(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = Directories.of(run_folder, UUID)
    folders.make()
    monkeypatch.setattr(shared_memory, "_seen_by_host", lambda _: False)
    said = shared_memory.prepare(folders, MIB)
    assert said == (
        "a tmpfs mounted here does not reach the host: give the run folder mountPropagation Bidirectional; "
        "pods can fill the run folder"
    )
    assert not folders.shm.is_mount()


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "YOUNG_SECONDS", 0.0)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.usefixtures("no_waiting")
def test_what_ended_containers_left_is_swept(folders: Directories, newest: Program) -> None:
    """Files that nobody has open or mapped, and that nobody who lives can have made."""
    with Container(newest, folders) as ended:
        ended.run("mkdir /dev/shm/folder; echo data >/dev/shm/folder/left; echo data >/dev/shm/left")
        ended.run("echo data >/dev/shm/open; ln -s / /dev/shm/link")
    time.sleep(TICK_SECONDS)
    with Container(newest, folders) as living:
        time.sleep(TICK_SECONDS)
        living.run("exec 9</dev/shm/open; mkdir /dev/shm/new; echo data >/dev/shm/new/kept")
        time.sleep(TICK_SECONDS)
        swept = sweep(folders.shm, (), False, PROC)
        assert names(folders.shm) == {"open", "new", "new/kept"}
        assert (swept.files, swept.bytes > 0, swept.problem) == (3, True, None)
    time.sleep(TICK_SECONDS)
    # Now nobody is seen: that is believed only where nobody holds shares.
    assert sweep(folders.shm, (), False, PROC) == Swept()
    assert sweep(folders.shm, (), True, PROC).files == 2
    assert names(folders.shm) == set()


@pytest.mark.usefixtures("no_waiting")
def test_leftovers_of_another_user_go_while_a_neighbour_lives(folders: Directories, newest: Program) -> None:
    with Container(newest, folders, NOBODY) as living:
        time.sleep(TICK_SECONDS)
        with Container(newest, folders, NOBODY - 1) as ended:
            ended.run("echo data >/dev/shm/theirs")
        living.run("echo data >/dev/shm/own")
        (folders.shm / "of-root").touch()  # an entry point that was root, and is not any more
        time.sleep(TICK_SECONDS)
        assert sweep(folders.shm, (), False, PROC).files == 1
        assert names(folders.shm) == {"own", "of-root"}


# Has a file of /dev/shm open many times, in several processes, with one table of descriptors or several.
HOARDER = """
import ctypes, os, resource, sys
count, processes, flags = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (count + 50, count + 50))
fd = os.open("/dev/shm/theirs", os.O_RDONLY)
for _ in range(count):
    os.dup(fd)
libc = ctypes.CDLL(None)
for _ in range(processes - 1):
    if libc.syscall({"x86_64": 56, "aarch64": 220}[os.uname().machine], flags | 17, 0, 0, 0, 0) == 0:
        libc.pause()
print("ready", flush=True)
sys.stdin.read()
os.killpg(0, 9)
"""
CLONE_FILES = 0x400


@contextmanager
def hoarding(folders: Directories, count: int, processes: int, flags: int) -> Iterator[None]:
    """A container with these descriptors."""
    script = 'mount --bind "$1" /dev/shm && shift && exec "$@"'
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", str(folders.shm)]
    player = subprocess.Popen(
        [*words, sys.executable, "-I", "-S", "-c", HOARDER, *map(str, (count, processes, flags))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert player.stdout
        assert player.stdout.readline() == "ready\n"
        yield
    finally:
        player.communicate(timeout=20)


@pytest.mark.usefixtures("no_waiting")
def test_sweep_is_bounded(folders: Directories, newest: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """One look for each table of descriptors, of one container no more than its share."""
    monkeypatch.setattr(sweep_module, "MOST_ENTRIES", 3000)
    monkeypatch.setattr(sweep_module, "MOST_SECONDS", 60.0)  # the machine may be slow
    for name in ("theirs", "neighbours", "left"):
        (folders.shm / name).touch()
    time.sleep(TICK_SECONDS)
    device = folders.shm.stat().st_dev
    with Container(newest, folders) as neighbour:
        neighbour.run("exec 9</dev/shm/neighbours")
        with hoarding(folders, 2000, 20, CLONE_FILES):
            seen = sweep_module.look(device, (), PROC)
            assert len(seen.users) == 21
            assert not seen.cut_short
            assert seen.inodes == {(folders.shm / name).stat().st_ino for name in ("theirs", "neighbours")}
        with hoarding(folders, 2000, 20, 0):
            swept = sweep(folders.shm, (), False, PROC)
            assert "not all descriptors of processes in mnt:[" in (swept.problem or "")
            assert names(folders.shm) == {"theirs", "neighbours"}
            monkeypatch.setattr(sweep_module, "ALL_SECONDS", 0.0)
            swept = sweep(folders.shm, (), False, PROC)
            assert swept.files == 0
            assert "was not found out within 0 s" in (swept.problem or "")


def test_shm_is_put_right(folders: Directories) -> None:
    """Root of a container owns it, and takes no capability to close it to the others."""
    assert not shared_memory.restore(folders.shm)
    folders.shm.chmod(0o700)
    os.chown(folders.shm, NOBODY, NOBODY)
    acl = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", *entry)
        for entry in (
            (1, 7, 0xFFFFFFFF),
            (2, 0, NOBODY),
            (4, 7, 0xFFFFFFFF),
            (16, 7, 0xFFFFFFFF),
            (32, 7, 0xFFFFFFFF),
        )
    )
    with suppress(OSError):  # a kernel whose tmpfs has none
        os.setxattr(folders.shm, "system.posix_acl_access", acl)
    assert shared_memory.restore(folders.shm)
    status = folders.shm.stat()
    assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (0o1777, 0, 0)
    assert not os.listxattr(folders.shm)
    assert not shared_memory.restore(folders.shm)


def test_logs_that_were_left_mounted_are_removed_by_the_clean_up(run_folder: Path, tmp_path: Path) -> None:
    """By 0.2.0, to which a node was rolled back: it does not know the mount."""
    folders = Directories.of(run_folder, UUID)
    folders.make()
    (folders.log / "control.log").write_bytes(bytes(2 * shared_memory.LOG_BYTES_KEPT))
    assert shared_memory.bound_logs(folders.log) is None
    assert shared_memory.bound_logs(folders.log) is None
    # What was there came along, its end alone.
    assert (folders.log / "control.log").stat().st_size == shared_memory.LOG_BYTES_KEPT
    folders.remove()
    places = {"kubelet.root": "kubelet", "host.state": "state", "host.cdi": "cdi"}
    words = [f"host.run={run_folder}", *(f"{key}={tmp_path}/{name}" for key, name in places.items())]
    settings = load(None, {}, [*words, "cluster.access=off"])
    anyio.run(this_node.leave_modes, settings, cast("NvmlPort", None))  # no daemon is there to ask NVML for
    this_node.remove_files(settings)
    assert not list(run_folder.iterdir())


def test_what_is_young_stays(folders: Directories) -> None:
    (folders.shm / "new").touch()
    assert sweep(folders.shm, (), True, PROC) == Swept()
    assert names(folders.shm) == {"new"}


async def test_running_daemons_are_kept_up(
    newest: Program, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that works where pods can write is replaced once it has no client; links come back."""
    monkeypatch.setattr(sweep_module, "YOUNG_SECONDS", 0.0)
    one = gpu(0)
    folders = Directories.of(run_folder, one.uuid)
    await anyio.to_thread.run_sync(folders.make)
    await anyio.to_thread.run_sync(started_by_hand, newest, folders)
    manager = manager_of(run_folder, newest, Modes())
    upkeep = Upkeep(manager, run_folder, 2 * OPTIONS.shared_memory, Cell(Record((), ())))
    async with running(manager):
        await manager.set_up(one)
        before = manager.status(one.uuid)
        assert before.adopted
        assert before.pid
        assert await anyio.to_thread.run_sync(launch.exposed, before.pid, folders)
        await upkeep.look(one.uuid, before, sweeping=True)
        with anyio.fail_after(20):
            await manager.statuses.wait_for(
                lambda now: now[one.uuid].serving and now[one.uuid].pid not in (None, before.pid)
            )
        after = manager.status(one.uuid)
        assert after.pid
        assert not await anyio.to_thread.run_sync(launch.exposed, after.pid, folders)
        (folders.pipe / "control").unlink()
        (folders.pipe / "log").unlink()
        (folders.pipe / "log").symlink_to("/etc/passwd")
        (folders.shm / "left").touch()
        folders.shm.chmod(0o700)
        await anyio.sleep(TICK_SECONDS)
        await upkeep.look(one.uuid, after, sweeping=True)
        for name in ("control", "log"):
            assert (folders.pipe / name).samefile(folders.own / name)
        assert not (folders.shm / "left").exists()
        assert stat.S_IMODE(folders.shm.stat().st_mode) == 0o1777
        found = os.statvfs(folders.shm)
        assert found.f_blocks * found.f_frsize == 2 * OPTIONS.shared_memory
        await manager.tear_down(one)


async def test_a_daemon_that_works_where_pods_write_keeps_its_sockets(
    newest: Program, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it has clients: root in a pod of before would answer the others in its place."""
    one = gpu(0)
    folders = Directories.of(run_folder, one.uuid)
    await anyio.to_thread.run_sync(folders.make)
    await anyio.to_thread.run_sync(started_by_hand, newest, folders)
    manager = manager_of(run_folder, newest, Modes())
    upkeep = Upkeep(manager, run_folder, OPTIONS.shared_memory, Cell(None))
    async with running(manager):
        await manager.set_up(one)
        status = manager.status(one.uuid)
        daemon = manager.daemon(one.uuid)
        assert daemon

        async def used(*_: object, **__: object) -> Survey:
            return Survey((4711,), clients=(4712,))

        monkeypatch.setattr(daemon.control, "survey", used)
        (folders.pipe / "control").unlink()
        (folders.pipe / "control").symlink_to("/etc/passwd")
        await upkeep.look(one.uuid, status, sweeping=False)
        assert manager.status(one.uuid).pid == status.pid
        assert (folders.pipe / "control").samefile(folders.own / "control")
        assert await daemon.control.alive() == 100
        await manager.tear_down(one)
