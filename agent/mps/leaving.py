"""Takes MPS off a node that no agent serves: daemons, compute modes, files outside of the agent's folders."""

import os
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread

from agent.mps import processes, shared_memory, shares_cdi
from agent.mps.binary import find_any, finder_of
from agent.mps.compute_mode import RECORD, ComputeModes, NvmlComputeModes
from agent.mps.daemon import Daemon
from agent.mps.daemon_parts import EventReason, Options
from agent.mps.directories import Directories, existing_below
from agent.mps.mps_errors import MpsError
from agent.nvml.event_watch import WorkerThread
from agent.nvml.port import NvmlError, NvmlPort
from agent.settings import Settings


async def stop_daemons(settings: Settings, nvml: NvmlPort) -> None:
    """End every MPS daemon of the agent's and give its GPU back. Raises MpsError."""
    left = await anyio.to_thread.run_sync(existing_below, Path(settings.host.run))
    if not left:
        return
    thread = WorkerThread("cleanup")
    try:
        program = await anyio.to_thread.run_sync(find_any, finder_of(settings))
        compute = ComputeModes()
        # It may have been set before the configuration said otherwise.
        if settings.mps.exclusive_process or await anyio.to_thread.run_sync(_any_record, left):
            await thread.run(nvml.open, deadline=30.0)
            compute = NvmlComputeModes(nvml, thread)
        options = Options(cgroups=Path(settings.host.cgroups), quit_seconds=settings.mps.quit_seconds)
        problems = {}
        for folders in left:
            daemon = Daemon(folders.root.name, program, folders, compute, _no_report, options)
            problems[folders] = await daemon.stop()
    except (MpsError, NvmlError) as error:
        raise MpsError(f"MPS daemons cannot be stopped: {error}") from error
    finally:
        thread.close()
    for folders, problem in problems.items():
        running = await anyio.to_thread.run_sync(processes.daemons, folders.pipe)
        if problem or running or folders.existing():
            raise MpsError(
                f"the MPS daemon in {folders.root} could not be stopped: {problem or 'it is still there'}"
            )


def remove_files(settings: Settings) -> None:
    """Remove the CDI file of shares, mounts of logs, folders in the driver root. Blocks. Raises OSError."""
    file = Path(settings.host.cdi) / shares_cdi.FILE
    # The folder may be read-only where there is nothing of ours.
    if file.exists():
        file.unlink()
    for root in (Path(settings.host.run) / "mps").glob("*"):
        # An agent that was gone back to left it where it was.
        shared_memory.release_logs(Directories(root).log)
    _remove_mount_points(Path(settings.driver.root), Path(settings.host.run))


def _remove_mount_points(driver: Path, run: Path) -> None:
    """Take the empty folders out of a driver root on which daemons had the run folder in their namespaces.

    The host's own root is no such one: the folder there is the agent's itself. What holds anything stays.
    """
    top = driver / run.absolute().relative_to("/")
    if driver == Path("/") or top.is_symlink() or not top.is_dir() or (run.exists() and top.samefile(run)):
        return
    for folder, _, _ in os.walk(top, topdown=False):
        with suppress(OSError):
            os.rmdir(folder)  # noqa: PTH106  a name of os.walk


def _any_record(left: list[Directories]) -> bool:
    return any((each.root / RECORD).exists() for each in left)


def _no_report(kind: EventReason, uuid: str, message: str, pids: frozenset[int]) -> None:
    """Events are for running agents."""
