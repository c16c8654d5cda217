"""A driver that is installed in a root of its own, as driver containers do: all of MPS runs inside it."""

import os
import platform
import re
import shutil
import stat
import subprocess
import threading
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from agent.mps.binary import CONTROL, Program, find
from agent.mps.daemon_parts import DaemonState
from tests.component.mps.keeping import Bench, daemons_of, reached
from tests.cuda_binaries import NAME as LIBRARY

# Since driver 580 the program loads libcuda in every role, and ends so where it finds none.
NEEDS_LIBRARY = r"""
#include <dlfcn.h>
#include <unistd.h>
int main(int count, char **words) {
    (void)count;
    if (!dlopen("libcuda.so.1", RTLD_NOW)) return 244;
    execv(PROGRAM, words);
    return 127;
}
"""


@pytest.fixture
def driver_root(newest: Program, tmp_path: Path) -> Path:
    """A root with the program, the libraries it names, and /dev/null."""
    root = tmp_path / "driver"
    program = root / "usr" / "bin" / CONTROL
    program.parent.mkdir(parents=True)
    shutil.copy2(newest.path, program)
    linked = subprocess.run(["ldd", str(newest.path)], capture_output=True, text=True, check=True).stdout
    for name in re.findall(r"(/\S+)", linked):
        target = root / name.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, target)
    (root / "dev" / "shm").mkdir(parents=True)
    os.mknod(root / "dev" / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    return root


async def test_daemon_runs_inside_the_driver_root(driver_root: Path, run_folder: Path) -> None:
    program = await anyio.to_thread.run_sync(find, driver_root, None, "/nonexistent")
    assert program.root == driver_root
    bench = Bench(run_folder, program)
    daemon = bench.daemon()
    async with bench.kept(daemon):
        status = await reached(daemon, DaemonState.SERVING)
        assert status.pid
        assert await anyio.Path(f"/proc/{status.pid}/root").readlink() == anyio.Path(driver_root)
        # It answers from outside, and its /dev/shm is the folder that pods get.
        assert await daemon.control.alive() == 100
        assert status.private_shm
        await anyio.Path(daemon.folders.shm / "seen").touch()
        assert await anyio.Path(f"/proc/{status.pid}/root/dev/shm/seen").exists()
    again = bench.daemon()
    async with bench.kept(again):
        adopted = await reached(again, DaemonState.SERVING)
        assert (adopted.pid, adopted.adopted, adopted.private_shm) == (status.pid, True, True)
    await again.stop()
    assert not await daemons_of(again)
    # Nothing of ours was mounted where others see it.
    assert str(driver_root) not in await anyio.Path("/proc/self/mountinfo").read_text()


def as_580(driver_root: Path, library: Path) -> None:
    """Have the program of a driver root need libcuda as that of 580 does, and put a library there."""
    program = driver_root / "usr" / "bin" / CONTROL
    real = driver_root / "usr" / "libexec" / CONTROL
    real.parent.mkdir()
    program.rename(real)
    library.parent.mkdir(parents=True, exist_ok=True)
    for text, flags, output in (
        (NEEDS_LIBRARY, [f'-DPROGRAM="/usr/libexec/{CONTROL}"'], program),
        ("int cuInit(unsigned flags) { return (int)flags; }", ["-shared", "-fPIC"], library),
    ):
        source = driver_root / "source.c"
        source.write_text(text)
        command = [os.environ.get("CC", "cc"), "-Wall", "-Werror", *flags, str(source), "-o", str(output)]
        subprocess.run(command, check=True, timeout=60)
        source.unlink()


async def test_mps_in_a_driver_root_580(driver_root: Path, run_folder: Path) -> None:
    """Only the root's own loader knows the library, so daemon, questions and settings all run inside."""
    library = driver_root / "usr" / "lib" / f"{platform.machine()}-linux-gnu" / LIBRARY
    await anyio.to_thread.run_sync(as_580, driver_root, library)
    program = await anyio.to_thread.run_sync(find, driver_root, None, "/nonexistent")
    bench = Bench(run_folder, program)
    daemon = bench.daemon()
    threads = threading.active_count()
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
        await daemon.control.set_default_percentage(40)
        assert await daemon.control.alive() == 40
        assert await daemon.control.servers() == ()
    # The root of nothing else has changed.
    assert await anyio.Path("/proc/self/root").readlink() == anyio.Path("/")
    assert threading.active_count() <= threads + 1
    assert str(driver_root) not in await anyio.Path("/proc/self/mountinfo").read_text()
    await daemon.stop()
    assert not await daemons_of(daemon)


async def test_a_root_without_a_system_is_not_run_in(
    newest: Program, tmp_path: Path, run_folder: Path
) -> None:
    """As on COS: the driver's programs and libraries in `bin` and `lib64`, and no loader."""
    folder = tmp_path / "home" / "kubernetes" / "bin" / "nvidia"
    for name in ("bin", "lib64"):
        (folder / name).mkdir(parents=True)
    shutil.copy2(newest.path, folder / "bin" / CONTROL)
    (folder / "lib64" / LIBRARY).touch()
    program = await anyio.to_thread.run_sync(find, folder, None, "/nonexistent")
    assert program == Program(folder / "bin" / CONTROL, Path("/"), str(folder / "lib64"))
    bench = Bench(run_folder, program)
    daemon = bench.daemon()
    async with bench.kept(daemon):
        await reached(daemon, DaemonState.SERVING)
        assert await daemon.control.alive() == 100
    await daemon.stop()
