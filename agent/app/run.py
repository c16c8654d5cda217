"""The composition root: runs the task tree and stops it in order."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVarTuple

import anyio
import anyio.to_thread
import msgspec
import structlog
from anyio.abc import TaskStatus

from agent import __version__
from agent.app.agent import Agent, ClusterAccess
from agent.app.build import start
from agent.app.degradations import remarks
from agent.inventory.actor import Inventory
from agent.inventory.health_rules import rules_from
from agent.kit.lock import Taken, exclusive
from agent.kit.supervise import FatalError, Supervisor
from agent.kubelet.holdings import HoldingsWatch
from agent.kubelet.podresources import PodResources
from agent.nvml.port import NvmlPort
from agent.nvml.worker_thread import WorkerThread
from agent.settings import Settings
from agent.web.probes import Probes
from agent.web.server import HttpServer

log = structlog.get_logger()

Ts = TypeVarTuple("Ts")

# An agent that is being replaced may need this long to leave.
LOCK_SECONDS = 11.0

# How long calls to NVML are waited for once nothing is offered any more: a wait for events takes a second.
NVML_SECONDS = 1.5

# A node that no agent may be wanted on any more is cleared of what is ours, once nothing is offered.
FORGET_SECONDS = 1.0


class StoppedEarly(Exception):
    """The agent was asked to stop before it had begun."""


@asynccontextmanager
async def running(
    settings: Settings,
    nvml: NvmlPort,
    stop: anyio.Event | None = None,
    withdrawn: Callable[[], None] = lambda: None,
) -> AsyncIterator[Agent]:
    """Run the node agent while the context is open; leaving it stops everything in order.

    `stop` cuts a start short that is under way; its setter leaves the context. `withdrawn` is called when
    nothing is offered any more: what is left then leaves nothing behind if cut off. A fatal task that fails
    cancels the body and leaves as an exception group. Raises FatalError when another agent serves this
    node, StoppedEarly when `stop` was set while waiting for it to go.
    """
    stop = stop or anyio.Event()
    agent = Agent(
        settings,
        Inventory(rules_from(settings.health)),
        HoldingsWatch(PodResources(Path(settings.kubelet.root)), settings.device_plugins_folder),
        Supervisor(),
        WorkerThread("calls"),
        HttpServer(settings.http.address, settings.http.port),
    )
    gives_back = False
    try:
        async with _alone(Path(settings.host.run), stop), anyio.create_task_group() as outer:
            log.info("agent_starting", version=__version__)
            outer.start_soon(agent.supervisor.fatal, "inventory", agent.inventory.run)
            # The probes are asked from the first moment on and until the last.
            Probes(agent.supervisor, agent.blockers, lambda: remarks(agent), agent.shortcomings).add_to(
                agent.http
            )
            await outer.start(_serve_http, agent)
            async with anyio.create_task_group() as inner:
                try:
                    if await _in_time(stop, start, agent, nvml, inner):
                        log.info("agent_started", http_port=agent.http_port)
                    try:
                        yield agent
                    finally:
                        agent.stopping = True
                        log.info("agent_stopping")
                        # Nothing is offered any more before the lists end; bounded in time.
                        if agent.node and agent.switcher:
                            with anyio.CancelScope(shield=True):
                                writer = agent.state_writer
                                gives_back = writer is not None and writer.nothing_to_give_back
                                await agent.node.withdrawals.stop(agent.switcher.close)
                        withdrawn()
                        inner.cancel_scope.cancel()
                finally:
                    agent.calls.end_within(NVML_SECONDS)
                    if agent.gpu_monitor:
                        agent.gpu_monitor.thread.end_within(NVML_SECONDS)
            outer.cancel_scope.cancel()
        if agent.cluster and gives_back:
            with anyio.CancelScope(shield=True), anyio.move_on_after(FORGET_SECONDS):
                await _forgotten(agent.cluster)
    finally:
        if agent.cluster:
            await agent.cluster.api.close()
        if agent.gpu_monitor:
            agent.gpu_monitor.close()
        agent.calls.close()
    log.info("agent_stopped")


async def _forgotten(cluster: ClusterAccess) -> None:
    """Take all that is ours off the Node object. A next agent on this node writes it again."""
    from agent.cluster.api import ApiError  # noqa: PLC0415  loads the API client's room
    from agent.node.forget import forget  # noqa: PLC0415

    try:
        await forget(cluster.api, cluster.node.name)
    except (ApiError, msgspec.DecodeError) as error:
        log.warning("node_not_cleared", problem=str(error), remedy="gpu-node-agent cleanup")
    else:
        log.info("node_cleared", reason="nothing is wanted of this node")


async def _in_time(stop: anyio.Event, act: Callable[[*Ts], Awaitable[None]], *arguments: *Ts) -> bool:
    """Do it unless `stop` comes first; whether it was done."""

    async def cut_short() -> None:
        await stop.wait()
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(cut_short)
        await act(*arguments)
        group.cancel_scope.cancel()
        return True
    return False


async def _serve_http(agent: Agent, *, task_status: TaskStatus[int]) -> None:
    async def serve() -> None:
        await agent.http.serve(task_status=task_status)

    await agent.supervisor.fatal("http", serve)


@asynccontextmanager
async def _alone(folder: Path, stop: anyio.Event) -> AsyncIterator[None]:
    """Two agents on one node would take each other's sockets away: the second waits, then gives up."""
    deadline = anyio.current_time() + LOCK_SECONDS
    waiting = False
    while True:
        lock = exclusive(folder / "agent.lock")
        try:
            await anyio.to_thread.run_sync(lock.__enter__)  # it makes a folder and a file
        except Taken as error:
            if anyio.current_time() >= deadline:
                raise FatalError(f"another agent serves this node ({error}); stop it first") from error
            if not waiting:
                log.info("another_agent_is_there", holder=str(error), waits_seconds=LOCK_SECONDS)
                waiting = True
            with anyio.move_on_after(0.1):
                await stop.wait()
                raise StoppedEarly from error
            continue
        except OSError as error:
            raise FatalError(
                f"host.run: {folder} cannot be used as the agent's run folder: {error.strerror}; "
                "make it writable for the agent, or name another folder"
            ) from error
        break
    try:
        yield
    finally:
        lock.__exit__(None, None, None)
