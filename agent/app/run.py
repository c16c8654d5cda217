"""The composition root: runs the task tree and stops it in order."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import anyio
import anyio.to_thread
import structlog
from anyio.abc import TaskStatus

from agent import __version__
from agent.app.agent import Agent
from agent.app.build import NVML_SECONDS, build
from agent.app.parts import Core, Readiness, Tasks
from agent.cluster.api import ApiError
from agent.cluster.reach import ClusterAccess, reach_cluster
from agent.holdings.holdings import HoldingsWatch
from agent.inventory.actor import Inventory
from agent.inventory.verdicts import rules_from
from agent.kit.files import Taken, exclusive
from agent.kit.tasks import FatalError, Supervisor
from agent.kubelet.podresources import PodResources
from agent.node.conditions import node_events
from agent.node.forget import forget
from agent.node.withdrawal import STOP_SECONDS
from agent.nvml.event_watch import WorkerThread
from agent.nvml.port import NvmlPort
from agent.settings import Settings
from agent.telemetry.rendering import METRICS_PATH
from agent.web.probes import Probes
from agent.web.server import HttpServer

log = structlog.get_logger()

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# An agent that is being replaced may need this long to leave.
LOCK_SECONDS = 11.0

# A node that no agent may be wanted on any more is cleared of what is ours, once nothing is offered.
FORGET_SECONDS = 1.0


class StoppedEarly(Exception):
    """The agent was asked to stop before it was there."""


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
    node, StoppedEarly when `stop` was set before this agent was there.
    """
    stop = stop or anyio.Event()
    cluster = await reach_cluster(settings)
    core = core_of(settings, nvml, cluster)
    agent: Agent | None = None
    gives_back = False
    async with AsyncExitStack() as closing:
        closing.callback(core.calls.close)
        if cluster:
            closing.push_async_callback(cluster.api.close)
        async with _alone(Path(settings.host.run), stop), anyio.create_task_group() as outer:
            log.info("agent_starting", version=__version__)
            outer.start_soon(core.supervisor.fatal, "inventory", core.inventory.run)
            # The probes are asked from the first moment on and until the last.
            readiness = core.readiness
            Probes(core.supervisor, readiness.blockers, readiness.remarks, readiness.shortcomings).add_to(
                core.http
            )
            core.http.announce(METRICS_PATH)
            await outer.start(_serve_http, core)
            async with anyio.create_task_group() as inner:
                with ExitStack() as ending:
                    ending.callback(core.calls.end_within, NVML_SECONDS)
                    tasks = Tasks(core.supervisor, inner)
                    built = await _in_time(stop, build, core, tasks, ending, closing)
                    if built:
                        agent, serve = built
                        await _in_time(stop, serve)
                    try:
                        if agent:
                            yield agent
                    finally:
                        readiness.stopping = True
                        log.info("agent_stopping")
                        # Nothing is offered any more before the lists end; bounded in time.
                        if agent and agent.node:
                            with anyio.CancelScope(shield=True):
                                gives_back = agent.node.report.nothing_to_give_back
                                until = anyio.current_time() + STOP_SECONDS
                                await agent.node.withdrawals.stop(agent.switcher.close)
                                if agent.door:
                                    await agent.door.closed(until)
                        withdrawn()
                        inner.cancel_scope.cancel()
            outer.cancel_scope.cancel()
        if agent and agent.cluster and gives_back:
            with anyio.CancelScope(shield=True), anyio.move_on_after(FORGET_SECONDS):
                await _forgotten(agent.cluster)
    log.info("agent_stopped")
    if agent is None:
        raise StoppedEarly


def core_of(settings: Settings, nvml: NvmlPort, cluster: ClusterAccess | None = None) -> Core:
    """The parts that exist before anything runs."""
    listeners = [node_events(cluster.events.node)] if cluster else []
    inventory = Inventory(rules_from(settings.health), listeners)
    holdings = HoldingsWatch(PodResources(Path(settings.kubelet.root)), settings.device_plugins_folder)
    holdings.instances = lambda: inventory.snapshot.value.parents
    holdings.gpus = lambda: inventory.snapshot.value.by_uuid
    return Core(
        settings,
        nvml,
        WorkerThread("calls"),
        inventory,
        holdings,
        Supervisor(),
        HttpServer(settings.http.address, settings.http.port),
        Readiness(inventory.snapshot, holdings),
        cluster,
    )


async def _forgotten(cluster: ClusterAccess) -> None:
    """Take all that is ours off the Node object. A next agent on this node writes it again."""
    try:
        await forget(cluster.api, cluster.node.name)
    except ApiError as error:
        log.warning("node_not_cleared", problem=str(error), remedy="gpu-node-agent cleanup")
    else:
        log.info("node_cleared", reason="nothing is wanted of this node")


async def _in_time(stop: anyio.Event, act: Callable[[*Ts], Awaitable[T]], *arguments: *Ts) -> T | None:
    """The result of `act`; None: `stop` came first and cut it short."""

    async def cut_short() -> None:
        await stop.wait()
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(cut_short)
        result = await act(*arguments)
        group.cancel_scope.cancel()
        return result
    return None


async def _serve_http(core: Core, *, task_status: TaskStatus[int]) -> None:
    await core.supervisor.fatal("http", partial(core.http.serve, task_status=task_status))


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
