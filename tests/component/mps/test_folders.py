"""Attacks of pods on the folders that they share with a daemon: nothing that reaches the node.

Pods mount the pipe folder read-only. Those that started under an agent of before have it writable, and root
in one of them plays the attacker here.
"""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from agent.mps import launch, launcher
from agent.mps.binary import CONTROL, Program
from agent.mps.control_commands import environment
from agent.mps.daemon import Daemon
from agent.mps.daemon_parts import DaemonState
from agent.mps.directories import Directories
from agent.mps.mps_errors import MpsError
from tests.component.mps.keeping import Bench, daemons_of, reached
from tests.component.mps.pods import NOBODY, Container, again_and_again
from tests.unit.kit.test_trees import deep

OTHER = "GPU-5fd4f087-86f3-7a43-b711-4771313afc51"
NAMES = ("control", "control_privileged", "control_lock", "log", "nvidia-cuda-mps-control.pid")
PASSWD = "root:x:0:0:root:/root:/bin/bash\n"


class Host:
    """Files of the host that an attacker is after."""

    def __init__(self, folder: Path) -> None:
        self.file, self.absent, self.folder = folder / "passwd", folder / "cron.d-new", folder / "etc"
        self.file.write_text(PASSWD)
        self.file.chmod(0o600)
        self.folder.mkdir()
        (self.folder / "shadow").write_text(PASSWD)

    @property
    def targets(self) -> tuple[Path, ...]:
        return self.file, self.absent, self.folder

    def untouched(self) -> bool:
        """Whether all is as it was."""
        return (
            self.file.read_text() == PASSWD
            and stat.S_IMODE(self.file.stat().st_mode) == 0o600
            and not os.path.lexists(self.absent)
            and (self.folder / "shadow").read_text() == PASSWD
            and [each.name for each in self.folder.iterdir()] == ["shadow"]
        )


@pytest.fixture
def host(tmp_path: Path) -> Host:
    folder = tmp_path / "host"
    folder.mkdir()
    return Host(folder)


def links(names: tuple[str, ...]) -> Callable[[Directories, Host], None]:
    """Links in the place of what the daemon makes, one of a kind after the other."""

    def plant(folders: Directories, host: Host) -> None:
        for target in host.targets:
            for name in names:
                with suppress(OSError):
                    (folders.pipe / name).unlink()
                with suppress(OSError):
                    (folders.pipe / name).symlink_to(target)

    return plant


def shared_memory(folders: Directories, host: Host) -> None:
    """Links in the shared memory, where pods may write now and ever."""
    for number, target in enumerate((*host.targets, Path("/"))):
        with suppress(OSError):
            (folders.shm / f"cuda.shm.0.{number}").symlink_to(target)
        with suppress(OSError):
            (folders.shm / "folder").mkdir()
        with suppress(OSError):
            (folders.shm / "folder" / f"{number}").symlink_to(target)


def folders_1200_deep(folders: Directories, host: Host) -> None:
    """Deeper than the interpreter's stack, with a link in it; once made it stays in the way."""
    for folder in (folders.pipe / "control", folders.shm / "deep"):
        with suppress(IsADirectoryError, FileNotFoundError):
            folder.unlink()
        with suppress(OSError):
            deep(folder, 1200)
            (folder / "link").symlink_to(host.folder)


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(links(NAMES), id="pipe"),
        pytest.param(links(("log",)), id="log"),
        pytest.param(shared_memory, id="shm"),
        pytest.param(folders_1200_deep, id="1200-deep"),
    ],
)
async def test_planted_symlinks_reach_nothing(
    program: Program, run_folder: Path, host: Host, plant: Callable[[Directories, Host], None]
) -> None:
    """It plants before, while and after the daemon is restarted, without a pause where it is done at once."""
    bench = Bench(run_folder, program)
    daemon, neighbour = bench.daemon(), bench.daemon(OTHER)
    async with bench.kept(daemon, neighbour):
        pid = (await reached(daemon, DaemonState.SERVING)).pid
        other = (await reached(neighbour, DaemonState.SERVING)).pid
        for _ in range(1 if plant is folders_1200_deep else 2):
            assert pid
            await anyio.to_thread.run_sync(plant, daemon.folders, host)
            with (
                nullcontext()
                if plant is folders_1200_deep
                else again_and_again(lambda: plant(daemon.folders, host))
            ):
                os.kill(pid, signal.SIGKILL)
                pid = await replaced(daemon, pid)
        await reached(daemon, DaemonState.SERVING, deadline=60)
        # All supervision went on, that of other GPUs too.
        assert neighbour.status.value.pid == other
        await reached(neighbour, DaemonState.SERVING)
    await daemon.stop()
    await neighbour.stop()
    assert await anyio.to_thread.run_sync(host.untouched)
    assert not daemon.folders.pipe.exists()
    assert not daemon.folders.shm.exists()


async def replaced(daemon: Daemon, pid: int, deadline: float = 60.0) -> int:
    """The PID of the daemon after that, once it answers the agent, though pods may not find it yet."""
    before: set[int] = set()
    with anyio.fail_after(deadline):
        while True:
            with suppress(MpsError):
                # For a moment there are processes on their way into the background.
                found = {each.pid for each in await daemons_of(daemon)} - {pid}
                if len(found) == 1 and found == before and await daemon.control.alive() == 100:
                    return found.pop()
                before = found
            await anyio.sleep(0.1)


async def test_pod_finds_the_replaced_daemon(program: Program, run_folder: Path) -> None:
    """The folder that it mounts stays the same; read-only is enough to connect and to open the fifo."""
    bench = Bench(run_folder, Program(await anyio.to_thread.run_sync(for_anybody, program, run_folder)))
    daemon = bench.daemon()
    pipe = daemon.folders.pipe
    async with bench.kept(daemon):
        first = (await reached(daemon, DaemonState.SERVING)).pid
        inode = pipe.stat().st_ino
        assert first
        with Container(bench.program, daemon.folders) as running:
            for user in (0, NOBODY):
                assert await asked(running, user) == "100.0"
            os.kill(first, signal.SIGKILL)
            await reached(daemon, DaemonState.SERVING, restarts=1)
            with Container(bench.program, daemon.folders) as restarted:
                for container in (running, restarted):
                    for user in (0, NOBODY):
                        assert await asked(container, user) == "100.0"
                        # As a client opens it: for writing, and somebody reads.
                        assert (await said(container, ": >/mnt/pipe/log", user))[0] == 0
            assert pipe.stat().st_ino == inode
            for attack in ("touch /mnt/pipe/new", "rm /mnt/pipe/log", "mv /mnt/pipe/log /mnt/pipe/old"):
                code, words = await said(running, attack)
                assert code
                assert "Read-only file system" in words
            assert sorted(path.name for path in pipe.iterdir()) == ["control", "control_privileged", "log"]
    await daemon.stop()


def for_anybody(program: Program, folder: Path) -> Path:
    """A copy of the program that users other than root may run, too."""
    folder.chmod(0o755)
    return Path(shutil.copy2(program.path, folder / CONTROL))


async def asked(container: Container, user: int) -> str:
    return await anyio.to_thread.run_sync(container.ask, "get_default_active_thread_percentage", user)


async def said(container: Container, command: str, user: int = 0) -> tuple[int, str]:
    return await anyio.to_thread.run_sync(container.run, command, user)


async def test_a_socket_of_a_pods_own_is_not_asked(program: Program, run_folder: Path) -> None:
    """Root in a pod of before may put a socket of its own in the place of the daemon's."""
    bench = Bench(run_folder, program)
    daemon = bench.daemon()
    pipe = daemon.folders.pipe
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
        for name in ("control", "control_privileged"):
            (pipe / name).unlink()
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as false:
                false.bind(str(pipe / name))
        assert await daemon.control.alive() == 100
        await anyio.to_thread.run_sync(daemon.folders.show)
        for name in ("control", "control_privileged"):
            assert (pipe / name).samefile(daemon.folders.own / name)
    await daemon.stop()


async def test_a_daemon_of_an_agent_of_before_is_adopted(program: Program, run_folder: Path) -> None:
    """It works in the folder that pods mount: its sockets are taken in once, and asked there."""
    bench = Bench(run_folder, program)
    daemon = bench.daemon()
    folders = daemon.folders
    await anyio.to_thread.run_sync(folders.make)
    folders.own.rmdir()
    await anyio.to_thread.run_sync(started_by_hand, program, folders)
    for _ in range(2):
        async with bench.kept(daemon):
            await reached(daemon, DaemonState.SERVING, adopted=True)
        for name in ("control", "control_privileged"):
            (folders.pipe / name).unlink()
            (folders.pipe / name).symlink_to(run_folder / "nowhere")
        daemon = bench.daemon()
    async with bench.kept(daemon):
        before = await reached(daemon, DaemonState.SERVING, adopted=True)
        assert before.pid
        os.kill(before.pid, signal.SIGKILL)
        after = await reached(daemon, DaemonState.SERVING, adopted=False)
        assert after.pid
        assert not await anyio.to_thread.run_sync(launch.exposed, after.pid, folders)
    await daemon.stop()


def started_by_hand(program: Program, folders: Directories) -> None:
    """As agents did: on the very folder that pods mount."""
    subprocess.run([str(program.path), "-d"], env=environment(program, folders), timeout=10, check=True)


def test_a_mount_namespace_that_root_cannot_have_is_a_failure(newest: Program, run_folder: Path) -> None:
    """Root without one would open by their names what pods can write to."""
    order = {
        "program": str(newest.path),
        "arguments": ["-d"],
        "environment": {},
        "root": "/",
        "folder": str(run_folder),
        "own": str(run_folder),
        "pipe": str(run_folder),
        "shm": str(run_folder / "missing"),
        "cgroups": [],
    }
    command = [sys.executable, "-I", "-S", launcher.__file__, json.dumps(order)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert "the agent must run privileged (CAP_SYS_ADMIN)" in done.stderr
