"""Builds the rooms of the node agent, in the order in which each needs the ones before it."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from functools import partial

import anyio
import anyio.to_thread
import structlog

from agent.app import degradations
from agent.app.agent import Agent
from agent.app.build_cdi import build_cdi, start_cdi
from agent.app.build_cluster import build_pod_ports, follow_cluster, follow_node_software
from agent.app.build_status import start_commands
from agent.app.build_switching import build_request, build_switching, start_switching
from agent.app.build_telemetry import build_telemetry
from agent.app.parts import Core, Tasks
from agent.app.wings import WINGS
from agent.cluster.reach import reach_cluster
from agent.inventory.gpu_monitor import GpuMonitor
from agent.inventory.snapshot import NOT_YET
from agent.kit.cell import Cell
from agent.model.growth import Growth
from agent.model.modes import Assignment
from agent.modes.wing import Node
from agent.telemetry.health_metrics import health_collector

log = structlog.get_logger()

# The first list should be the true one: an empty list first would make the kubelet's figures dip.
FIRST_LOOK_SECONDS = 2.0
# How long calls to NVML are waited for once nothing is offered any more: a wait for events takes a second.
NVML_SECONDS = 1.5


async def build(
    core: Core, tasks: Tasks, ending: ExitStack, closing: AsyncExitStack
) -> tuple[Agent, Callable[[], Awaitable[None]]]:
    """Build all parts that `core` does not hold: the agent, and the function by which it begins to serve.

    That one waits for the first request, within a bounded time.
    `ending` is given what has to be done as the tasks are ended, `closing` once they have ended.
    """
    settings, snapshot = core.settings, core.inventory.snapshot
    core.readiness.degradations.append(lambda: degradations.simulated(settings.simulator.profile))
    monitor = GpuMonitor(settings, core.nvml, core.calls, core.inventory, core.supervisor)
    ending.callback(monitor.thread.end_within, NVML_SECONDS)
    closing.callback(monitor.close)
    await monitor.start(tasks.group)
    core.collectors.append(partial(health_collector, core.inventory, monitor.events))
    cluster = await reach_cluster(settings)
    if cluster:
        closing.push_async_callback(cluster.api.close)
    sources, uses = await build_telemetry(core, tasks, monitor.thread, cluster)
    if cluster:
        follow_cluster(cluster, core, tasks)
    injector, keeper = await build_cdi(core)
    await anyio.to_thread.run_sync(injector.look, None)
    if cluster:
        tasks.start("injection", follow_node_software, cluster.node, injector)
    with anyio.move_on_after(FIRST_LOOK_SECONDS):
        await core.holdings.refresh()
        await snapshot.wait_for(lambda now: now.problem != NOT_YET)
    if keeper:
        await start_cdi(core, tasks, keeper, injector)
    tasks.start("holdings", core.holdings.run)
    request = await build_request(settings)
    assignment: Cell[Assignment] = Cell(Assignment())
    grown: Cell[Mapping[str, Growth]] = Cell({})
    pods, recorder = build_pod_ports(settings, cluster, tasks)
    node = Node(
        settings=settings,
        name=cluster.node.name if cluster else "",
        snapshot=snapshot,
        assignment=assignment,
        desired=request.source,
        holdings=core.holdings,
        injector=injector,
        pods=pods,
        recorder=recorder,
        cluster=cluster,
        uses=uses,
        nvml=core.nvml,
        calls=core.calls,
        supervisor=core.supervisor,
        grown=grown,
    )
    wings = {each.mode: await each.build(node) for each in WINGS}
    for wing in wings.values():
        core.collectors.append(wing.metrics)
        core.readiness.degradations.append(wing.remarks)
        for task in wing.tasks():
            tasks.start(task.name, task.run)
    switching = await build_switching(
        core, tasks, cluster, monitor, request, wings, assignment, grown, sources.sampler
    )

    async def serve() -> None:
        await start_switching(switching, core, tasks, request, grown)
        start_commands(
            core, tasks, monitor, injector, wings, switching.cordons, switching.unexplained, sources
        )
        log.info("agent_started", http_port=core.http.port)

    agent = Agent(
        core,
        wings,
        request.source,
        switching.switcher,
        switching.unexplained,
        grown,
        cluster,
        switching.node,
    )
    return agent, serve
