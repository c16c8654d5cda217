"""The composition root: builds the rooms, runs the task tree, stops it in order."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from agent import __version__
from agent.inventory.actor import Inventory
from agent.inventory.scanner import Scanner
from agent.kit.lock import Taken, exclusive
from agent.kit.supervise import FatalError, Supervisor
from agent.kubelet.endpoint import Endpoint
from agent.kubelet.holdings import HoldingsWatch
from agent.kubelet.podresources import PodResources
from agent.model.modes import Mode
from agent.modes.switcher import ModeSwitcher
from agent.nvml.lane import Lane
from agent.nvml.port import NvmlPort
from agent.plugins.inject import Injector
from agent.plugins.pgpu import PgpuPlugin
from agent.settings import Settings

log = structlog.get_logger()

# An agent that is being replaced may need this long to leave.
LOCK_SECONDS = 10.0
# The first list should be the true one: an empty list first would make the kubelet's figures dip.
FIRST_SCAN_SECONDS = 2.0
STOP_SECONDS = 4.0


@dataclass
class Agent:
    """A running agent, as probes, metrics and tests see it."""

    settings: Settings
    inventory: Inventory
    holdings: HoldingsWatch
    supervisor: Supervisor
    calls: Lane
    endpoints: list[Endpoint] = field(default_factory=list)
    http_port: int = 0
    stopping: bool = False

    def blockers(self) -> list[str]:
        """Why the node cannot serve, each in a sentence; empty: it can."""
        found = ["the agent is stopping"] if self.stopping else []
        problem = self.inventory.snapshot.value.problem
        if problem:
            found.append(problem)
        found.extend(endpoint.blocker for endpoint in self.endpoints if endpoint.blocker)
        return found


@asynccontextmanager
async def running(settings: Settings, nvml: NvmlPort) -> AsyncIterator[Agent]:
    """Run the node agent while the context is open; leaving it stops everything in order.

    A fatal task that fails cancels the body and leaves as an exception group. Raises FatalError when
    another agent serves this node.
    """
    agent = Agent(
        settings,
        Inventory(),
        HoldingsWatch(PodResources(Path(settings.kubelet.root))),
        Supervisor(),
        Lane("calls"),
    )
    async with _alone(Path(settings.host.run)), anyio.create_task_group() as outer:
        log.info("agent_starting", version=__version__)
        outer.start_soon(agent.supervisor.fatal, "inventory", agent.inventory.run)
        async with anyio.create_task_group() as inner:
            await _start(agent, nvml, inner)
            log.info("agent_started", http_port=agent.http_port)
            try:
                yield agent
            finally:
                agent.stopping = True
                log.info("agent_stopping")
                inner.cancel_scope.cancel()
        outer.cancel_scope.cancel()
    agent.calls.close()
    log.info("agent_stopped")


async def _start(agent: Agent, nvml: NvmlPort, group: anyio.abc.TaskGroup) -> None:
    settings, supervisor = agent.settings, agent.supervisor
    scanner = Scanner(nvml, agent.calls, agent.inventory)
    group.start_soon(supervisor.restarting, "scanner", scanner.run)
    group.start_soon(supervisor.restarting, "holdings", agent.holdings.run)
    injector = Injector(settings)
    await anyio.to_thread.run_sync(injector.look, None)
    with anyio.move_on_after(FIRST_SCAN_SECONDS):
        await agent.inventory.snapshot.wait_change(0)
    wanted = Mode.OFF if settings.default_mode == "none" else Mode(settings.default_mode)
    switcher = ModeSwitcher(agent.inventory.snapshot, wanted)
    group.start_soon(supervisor.restarting, "mode switcher", switcher.run)
    plugin = PgpuPlugin(agent.inventory.snapshot, switcher.assignment, injector)
    group.start_soon(supervisor.restarting, f"plugin {plugin.resource}", plugin.run)
    endpoint = Endpoint(
        plugin,
        Path(settings.kubelet.root),
        settings.device_plugins_folder,
        settings.kubelet.registration,
        settings.kubelet.registry_wait_seconds,
    )
    agent.endpoints.append(endpoint)
    group.start_soon(supervisor.restarting, f"endpoint {plugin.resource}", endpoint.run)


@asynccontextmanager
async def _alone(folder: Path) -> AsyncIterator[None]:
    """Two agents on one node would take each other's sockets away: the second waits, then gives up."""
    deadline = anyio.current_time() + LOCK_SECONDS
    while True:
        lock = exclusive(folder / "agent.lock")
        try:
            lock.__enter__()
        except Taken as error:
            if anyio.current_time() >= deadline:
                raise FatalError(f"another agent serves this node ({error}); stop it first") from error
            await anyio.sleep(0.1)
            continue
        except OSError as error:
            raise FatalError(
                f"{folder}: cannot be used as the agent's run folder: {error.strerror}"
            ) from error
        break
    try:
        yield
    finally:
        lock.__exit__(None, None, None)
