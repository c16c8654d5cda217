"""Takes the agent's traces off one node, with no agent running: daemons, modes, files, labels.

Safe to run again: each step looks for the rest.
"""

from collections.abc import AsyncIterator, Collection
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import structlog

from agent.cleanup.request import CleanupFailed, CleanupRefused
from agent.holdings.holdings import HoldingsWatch
from agent.injection import specification
from agent.injection.hook import FOLDER as BIN
from agent.kit import trees
from agent.kit.lock import Taken, exclusive
from agent.kubelet.podresources import PodResources, PodResourcesUnavailable
from agent.model.modes import Mode
from agent.mps import processes, shared_memory, shares_cdi
from agent.mps.binary import Program, find, find_any
from agent.mps.compute_mode import RECORD, ComputeModes, NvmlComputeModes
from agent.mps.daemon import Daemon
from agent.mps.daemon_parts import Options
from agent.mps.daemon_status import EventReason
from agent.mps.directories import Directories
from agent.mps.mps_errors import MpsError
from agent.nvml.nvml_errors import NvmlError
from agent.nvml.port import NvmlPort
from agent.nvml.worker_thread import WorkerThread
from agent.settings import Settings
from agent.vgpu import memory_limits
from agent.vgpu.folders import FOLDER as LIMITS
from agent.vgpu.library import FOLDER as LIBRARIES

if TYPE_CHECKING:
    from agent.cluster.api import KubeApi
    from agent.cluster.pods import PodCache

log = structlog.get_logger()

LOCK = "agent.lock"
SOCKETS = "gna-*.sock"
LIST_SECONDS = 10.0
POLL_SECONDS = 0.5
SYNC_SECONDS = 10.0  # for a first list of the node's pods


@asynccontextmanager
async def without_agent(settings: Settings, wait_seconds: float) -> AsyncIterator[None]:
    """Keep agents off this node while the context is open. Raises CleanupFailed if one stays."""
    deadline = anyio.current_time() + wait_seconds
    while True:
        lock = exclusive(Path(settings.host.run) / LOCK)
        try:
            await anyio.to_thread.run_sync(lock.__enter__)  # it makes a folder and a file
            break
        except Taken as error:
            if anyio.current_time() >= deadline:
                raise CleanupFailed(f"an agent still serves this node ({error}); stop it first") from error
            await anyio.sleep(POLL_SECONDS)
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


async def refuse_holders(settings: Settings, known: "PodCache | None") -> frozenset[str]:
    """Raise CleanupRefused while pods of this node hold MPS shares: their work would end with the daemons.

    Answers the pods that hold GPUs otherwise: these run on, and need our CDI specification to start again.

    `known`: the node's pods by the API server, followed by somebody. Without them PodResources count
    alone: the kubelet's checkpoint keeps entries of pods that have ended. Raises CleanupFailed where
    neither answers.
    """
    client = PodResources(Path(settings.kubelet.root))
    record = HoldingsWatch(client, settings.device_plugins_folder if known else None)
    if known:
        from agent.pairing.cluster_pods import ClusterPods  # noqa: PLC0415  loads the API client

        record.view = ClusterPods(known).view
        with anyio.move_on_after(SYNC_SECONDS):
            while not record.view().complete:
                await anyio.sleep(POLL_SECONDS / 10)
        if not record.view().complete:
            raise CleanupFailed(
                "who holds MPS shares is not known: the API server does not list the node's pods "
                f"({known.reflector.problem})"
            )
    try:
        pods = await record.look(LIST_SECONDS)
    except PodResourcesUnavailable as error:
        raise CleanupFailed(f"who holds MPS shares is not known: {error}") from error
    holders = [holder for each in pods.by_gpu.values() for holder in each]
    held = {holder.pod for holder in holders if holder.mode is Mode.MPS}
    if held:
        raise CleanupRefused(
            f"{len(held)} pod(s) hold MPS shares and would lose their daemon: {', '.join(sorted(held))}; "
            "delete them, or wait until they have ended"
        )
    return frozenset(holder.pod for holder in holders)


async def stop_daemons(settings: Settings, nvml: NvmlPort) -> None:
    """End every MPS daemon of the agent's and give its GPU back. Raises CleanupFailed."""
    left = await anyio.to_thread.run_sync(_daemon_folders, Path(settings.host.run))
    if not left:
        return
    thread = WorkerThread("cleanup")
    try:
        program = await anyio.to_thread.run_sync(_program, settings)
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
        raise CleanupFailed(f"MPS daemons cannot be stopped: {error}") from error
    finally:
        thread.close()
    for folders, problem in problems.items():
        running = await anyio.to_thread.run_sync(processes.daemons, folders.pipe)
        if problem or running or folders.existing():
            raise CleanupFailed(
                f"the MPS daemon in {folders.root} could not be stopped: {problem or 'it is still there'}"
            )


def _any_record(left: list[Directories]) -> bool:
    return any((each.root / RECORD).exists() for each in left)


def _program(settings: Settings) -> Program:
    """The control program; none that can be run, where there is none: daemons are ended by signals then."""
    explicit = settings.mps.control_program
    return find_any(lambda: find(Path(settings.driver.root), Path(explicit) if explicit else None))


def remove_files(settings: Settings, users: AbstractSet[str] = frozenset()) -> bool:
    """Remove sockets, the CDI files and the content of the agent's folders. Blocks. Raises CleanupFailed.

    `users`: pods that hold GPUs. While there are any, the GPUs' CDI specification and its hook stay, and what
    vGPU containers have mounted: the kubelet repeats CDI names and mounts when a container is started again.
    Answers whether everything was removed.
    """
    folder = Path(settings.host.cdi)
    gpus, memory = folder / specification.FILE, folder / memory_limits.FILE
    state, run = Path(settings.host.state), Path(settings.host.run)
    stay = {state: {BIN, LIBRARIES, LIMITS}, run: {LIMITS}}
    kept = bool(users) and any(each.exists() for each in (gpus, state / LIBRARIES, run / LIMITS))
    try:
        for socket in (Path(settings.kubelet.root) / "plugins_registry").glob(SOCKETS):
            socket.unlink(missing_ok=True)
        for file in (folder / shares_cdi.FILE, *(() if kept else (gpus, memory))):
            # The folder may be read-only where there is nothing of ours.
            if file.exists():
                file.unlink()
        for root in (run / "mps").glob("*"):  # an agent that was gone back to left it where it was
            shared_memory.release_logs(Directories(root).log)
        for root, names in stay.items():
            if root.is_dir():
                _empty(root, {LOCK, *names} if kept else {LOCK})
    except OSError as error:
        raise CleanupFailed(f"{error.filename}: cannot be removed: {error.strerror}") from error
    if kept:
        pods = ", ".join(sorted(users))
        remedy = "clean up again when they have ended"
        log.warning("gpu_specification_kept", file=str(gpus), folder=str(state), pods=pods, remedy=remedy)
    return not kept


async def forget_node(api: "KubeApi", name: str, keep: Collection[str] = ()) -> None:
    """Remove the agent's entries of the Node object but annotations in `keep`. Raises CleanupFailed."""
    from agent.cluster.api import ApiError  # noqa: PLC0415  loads the API client
    from agent.node.forget import forget  # noqa: PLC0415

    try:
        await forget(api, name, keep)
    except ApiError as error:
        raise CleanupFailed(f"node {name}: labels and condition cannot be removed: {error}") from error


def _empty(root: Path, kept: AbstractSet[str]) -> None:
    """Remove the content of a folder but `kept`. Pods of before could write below: no link is followed."""
    with trees.opened(root) as descriptor:
        for entry in root.iterdir():
            if entry.name not in kept:
                try:
                    trees.remove(descriptor, entry.name)
                except OSError as error:
                    raise OSError(error.errno, error.strerror, str(entry)) from error


def _daemon_folders(run: Path) -> list[Directories]:
    folder = run / "mps"
    if not folder.is_dir():
        return []
    return [
        found
        for entry in sorted(folder.iterdir())
        if entry.is_dir() and (found := Directories(entry)).existing()
    ]


def _no_report(kind: EventReason, uuid: str, message: str, pids: frozenset[int] = frozenset()) -> None:
    """Events are for running agents."""
