"""How a daemon outlives the agent and its pod: a session, a cgroup and a mount namespace of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from agent.mps import launch
from agent.mps.binary import Program
from agent.mps.daemon import Daemon
from agent.mps.daemon_parts import DaemonState
from agent.mps.mps_errors import MpsError
from agent.nvml.port import ComputeMode
from tests.component.mps.keeping import OPTIONS, UUID, Bench, daemons_of, reached

CGROUPS = Path("/sys/fs/cgroup")
# Stands for the agent: it supervises until it is killed.
KEEPER = """
import sys
from pathlib import Path
import anyio
from agent.mps.binary import Program
from tests.component.mps.keeping import Bench

async def main() -> None:
    bench = Bench(Path(sys.argv[1]), Program(Path(sys.argv[2])))
    await bench.daemon().run()

anyio.run(main)
"""


@pytest.fixture
def cgroup(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A name that no other test uses; it must be gone at the end."""
    name = f"gna-mps-test-{os.getpid()}"
    monkeypatch.setattr(launch, "CGROUP", name)
    monkeypatch.setattr("agent.model.cgroup.MPS_CGROUP", name)
    yield name
    left = [folder / name for folder in launch.hierarchies(CGROUPS) if (folder / name).exists()]
    for folder in left:
        folder.rmdir()
    assert not left


async def test_cgroup_of_its_own_in_every_hierarchy_gone_after_stop(
    newest: Program, run_folder: Path, cgroup: str
) -> None:
    bench = Bench(run_folder, newest)
    daemon = bench.daemon(options=replace(OPTIONS, cgroups=CGROUPS))
    async with bench.kept(daemon):
        status = await reached(daemon, DaemonState.SERVING)
        assert status.pid
        lines = (await anyio.Path(f"/proc/{status.pid}/cgroup").read_text()).splitlines()
        paths = {line.split(":", 2)[2] for line in lines}
        assert paths == {f"/{cgroup}"}
    await daemon.stop()


async def test_adopted_after_sigkill_of_the_agent(program: Program, run_folder: Path) -> None:
    # Blocking for the moment that a fork takes.
    keeper = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", KEEPER, str(run_folder), str(program.path)],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.DEVNULL,
    )
    bench = Bench(run_folder, program)
    daemon = bench.daemon()
    try:
        with anyio.fail_after(20):
            # Its socket is there once it is in the background; before, there are tries that end.
            while not await anyio.Path(daemon.folders.pipe / "control").exists():
                await anyio.sleep(0.05)
            while len(found := await daemons_of(daemon)) != 1:
                await anyio.sleep(0.05)
    finally:
        os.killpg(keeper.pid, signal.SIGKILL) if os.getpgid(keeper.pid) == keeper.pid else keeper.kill()
        await anyio.to_thread.run_sync(keeper.wait)
    # A program that it was starting has its lock until that is executed.
    with anyio.fail_after(20):
        while not await free(daemon):
            await anyio.sleep(0.01)
    async with bench.kept(daemon):
        status = await reached(daemon, DaemonState.SERVING, adopted=True)
        assert status.pid == found[0].pid
        # The compute mode was lost with nothing: the new agent holds it again.
        assert bench.modes.modes[UUID] is ComputeMode.EXCLUSIVE_PROCESS
    await daemon.stop()


async def free(daemon: Daemon) -> bool:
    """Whether nobody looks after a daemon."""
    try:
        async with daemon.folders.locked():
            return True
    except MpsError:
        return False


async def test_hung_supervision_lock_is_told_in_words(newest: Program, run_folder: Path) -> None:
    bench = Bench(run_folder, newest)
    first, second = bench.daemon(), bench.daemon()
    async with bench.kept(first):
        await reached(first, DaemonState.SERVING)
        with pytest.raises(MpsError, match=f"held by process {os.getpid()}"):
            await second.run()
    await first.stop()
