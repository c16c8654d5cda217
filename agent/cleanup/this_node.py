"""Takes the agent's traces off one node, with no agent running: daemons, modes, files, labels.

Safe to run again: each step looks for the rest.
"""

from collections.abc import AsyncIterator, Collection
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from agent.app.wings import WINGS
from agent.cleanup.request import CleanupFailed, CleanupRefused
from agent.cluster.api import ApiError, KubeApi
from agent.cluster.pods import PodCache
from agent.holdings.holdings import HoldingsWatch
from agent.injection import toolkit
from agent.injection.toolkit import FOLDER as BIN
from agent.kit import files
from agent.kit.files import DRAFT, Taken, exclusive
from agent.kubelet.podresources import PodResources, PodResourcesUnavailable
from agent.modes.wing import NotLeft
from agent.node.forget import forget
from agent.nvml.port import NvmlPort
from agent.pairing.cluster_pods import ClusterPods
from agent.settings import Settings

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


async def refuse_holders(settings: Settings, known: PodCache | None) -> frozenset[str]:
    """Raise CleanupRefused while pods of this node hold shares whose work would end with what runs for them.

    Answers the pods that hold GPUs otherwise: these run on, and need our CDI specification to start again.

    `known`: the node's pods by the API server, followed by somebody. Without them PodResources count
    alone: the kubelet's checkpoint keeps entries of pods that have ended. Raises CleanupFailed where
    neither answers.
    """
    client = PodResources(Path(settings.kubelet.root))
    record = HoldingsWatch(client, settings.device_plugins_folder if known else None)
    if known:
        record.view = ClusterPods(known).view
        with anyio.move_on_after(SYNC_SECONDS):
            while not record.view().complete:
                await anyio.sleep(POLL_SECONDS / 10)
        if not record.view().complete:
            raise CleanupFailed(
                f"who holds {_shares()} shares is not known: the API server does not list the node's pods "
                f"({known.reflector.problem})"
            )
    try:
        pods = await record.look(LIST_SECONDS)
    except PodResourcesUnavailable as error:
        raise CleanupFailed(f"who holds {_shares()} shares is not known: {error}") from error
    holders = [holder for each in pods.by_gpu.values() for holder in each]
    ending = {wing.mode for wing in WINGS if wing.mode.row.needs_daemon}
    held = {holder.pod for holder in holders if holder.mode in ending}
    if held:
        raise CleanupRefused(
            f"{len(held)} pod(s) hold {_shares()} shares and would lose their daemon: "
            f"{', '.join(sorted(held))}; delete them, or wait until they have ended"
        )
    return frozenset(holder.pod for holder in holders)


def _shares() -> str:
    """The modes, as people say them, whose containers need something of the agent's that runs."""
    pairs = [wing.mode.row.pair for wing in WINGS if wing.mode.row.needs_daemon]
    return " and ".join(pair.name for pair in pairs if pair)


async def leave_modes(settings: Settings, nvml: NvmlPort) -> None:
    """End what runs for modes, and give their GPUs back. Raises CleanupFailed."""
    for wing in WINGS:
        try:
            await wing.leave(settings, nvml)
        except NotLeft as error:
            raise CleanupFailed(str(error)) from error


def remove_files(settings: Settings, users: AbstractSet[str] = frozenset()) -> bool:
    """Remove sockets, the CDI files and the content of the agent's folders. Blocks. Raises CleanupFailed.

    `leave_modes` comes first: it needs some of them.

    `users`: pods that hold GPUs. While there are any, the GPUs' CDI specification and its hook stay, and what
    vGPU containers have mounted: the kubelet repeats CDI names and mounts when a container is started again.
    Answers whether everything was removed.
    """
    gpus = Path(settings.host.cdi) / toolkit.FILE
    state, run = Path(settings.host.state), Path(settings.host.run)
    needed = (gpus, *(path for wing in WINGS for path in wing.needed_by_holders(settings)))
    kept = bool(users) and any(each.exists() for each in needed)
    stay = {
        root: {path.name for path in (*needed, state / BIN) if path.parent == root} for root in (state, run)
    }
    try:
        for socket in (Path(settings.kubelet.root) / "plugins_registry").glob(SOCKETS):
            socket.unlink(missing_ok=True)
        for file in () if kept else needed:
            # The folder may be read-only where there is nothing of ours.
            if file.is_file():
                file.unlink()
        for draft in gpus.parent.glob(f"{DRAFT}*"):
            draft.unlink(missing_ok=True)
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


async def forget_node(api: KubeApi, name: str, keep: Collection[str] = ()) -> None:
    """Remove the agent's entries of the Node object but annotations in `keep`. Raises CleanupFailed."""
    try:
        await forget(api, name, keep)
    except ApiError as error:
        raise CleanupFailed(f"node {name}: labels and condition cannot be removed: {error}") from error


def _empty(root: Path, kept: AbstractSet[str]) -> None:
    """Remove the content of a folder but `kept`. Pods of before could write below: no link is followed."""
    with files.opened(root) as descriptor:
        for entry in root.iterdir():
            if entry.name not in kept:
                try:
                    files.remove(descriptor, entry.name)
                except OSError as error:
                    raise OSError(error.errno, error.strerror, str(entry)) from error
