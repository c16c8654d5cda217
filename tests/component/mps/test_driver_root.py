"""A driver that is installed in a root of its own, as driver containers do: the daemon runs inside it."""

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from agent.mps.binary import CONTROL, Program, find
from agent.mps.daemon_status import DaemonState
from tests.component.mps.keeping import Bench, daemons_of, reached


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
