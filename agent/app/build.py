"""Builds the rooms of the node agent, in the order in which each needs the ones before it."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import structlog

from agent.app import build_cdi
from agent.app.agent import Agent
from agent.app.build_cluster import follow_cluster, follow_node_software
from agent.app.build_status import start_commands
from agent.app.build_switching import build_request, build_switching, start_switching
from agent.app.build_telemetry import build_telemetry, serve_metrics
from agent.app.parts import Core, Tasks
from agent.app.wings import WINGS
from agent.inventory.gpu_monitor import GpuMonitor
from agent.inventory.snapshot import NOT_YET
from agent.kit.cell import Cell
from agent.model.growth import Growth, Place
from agent.model.holding import Record
from agent.model.modes import Assignment, Mode
from agent.modes.mode_metrics import modes_collector
from agent.modes.wing import Node, Wing
from agent.node import writers as node_writers
from agent.settings import Settings
from agent.telemetry.free import free_collector
from agent.telemetry.health_metrics import health_collector
from agent.telemetry.reading import Collector, Sources

if TYPE_CHECKING:
    from agent.dra.door import DraDoor

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
    settings, snapshot, cluster = core.settings, core.inventory.snapshot, core.cluster
    monitor = GpuMonitor(settings, core.nvml, core.calls, core.inventory, core.supervisor)
    ending.callback(monitor.thread.end_within, NVML_SECONDS)
    closing.callback(monitor.close)
    await monitor.start(tasks.group)
    assignment: Cell[Assignment] = Cell(Assignment())
    grown: Cell[Mapping[Place, Growth]] = Cell({})
    sampler, containers = build_telemetry(core, assignment, grown)
    tasks.start("sampler", sampler.run)
    tasks.start("attribution", containers.run)
    pods, recorder = follow_cluster(cluster, settings, core.holdings, tasks)
    injector, keeper = await build_cdi.build_cdi(core)
    await injector.update(None)
    if injector.companions:
        tasks.start("companion devices", injector.watch_companions)
    if cluster:
        tasks.start("injection", follow_node_software, cluster.node, injector)
    with anyio.move_on_after(FIRST_LOOK_SECONDS):
        await core.holdings.refresh()
        await snapshot.wait_for(lambda now: now.problem != NOT_YET)
    if keeper:
        await build_cdi.keep_true(keeper, injector, tasks)
    tasks.start("holdings", core.holdings.run)
    request = await build_request(settings)
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
        uses=containers.uses,
        nvml=core.nvml,
        calls=core.calls,
        supervisor=core.supervisor,
        grown=grown,
        read_again=monitor.read_again,
    )
    wings = {each.mode: await each.build(node) for each in WINGS}
    for wing in wings.values():
        for task in wing.tasks():
            tasks.start(task.name, task.run)
    door = await _door(node, wings, core)
    requests = door.requests if door else None
    switching = await build_switching(
        core, tasks, monitor, request, wings, assignment, grown, sampler, injector.lacks, requests
    )
    written = switching.node.writers if switching.node else {}
    collectors: list[Collector] = [
        partial(health_collector, core.inventory, monitor.events),
        *([partial(build_cdi.metrics, keeper)] if keeper else []),
        *(each.metrics for each in wings.values()),
        *([door.metrics] if door else []),
        partial(modes_collector, switching.switcher, switching.unexplained),
        partial(
            free_collector,
            snapshot,
            assignment,
            core.holdings.cell,
            containers.uses,
            settings.mps.most_clients,
        ),
        partial(node_writers.metrics, written),
    ]
    core.readiness.follow(
        lambda: simulated(settings.simulator.profile),
        *([cluster.remarks] if cluster else []),
        *([keeper.remarks] if keeper else []),
        *(each.remarks for each in wings.values()),
        door.remarks if door else partial(_no_door, settings, core.holdings.cell),
        lambda: [] if cluster is None or cluster.problem else node_writers.remarks(written),
        switching.cordons.remarks,
        *([switching.upgrade.remarks] if switching.upgrade else []),
        switching.switcher.remarks,
    )
    sources = Sources(
        core.inventory,
        sampler,
        [core.calls, monitor.thread],
        core.readiness.endpoints,
        core.supervisor,
        core.readiness.blockers,
        collectors,
        containers.uses,
    )
    await serve_metrics(core, tasks, sources)

    async def serve() -> None:
        if door:
            for task in door.tasks():
                tasks.start(task.name, task.run)
            await door.taken_up()
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
        door,
    )
    return agent, serve


async def _door(node: Node, wings: Mapping[Mode, Wing], core: Core) -> "DraDoor | None":
    """The second door, where it is wanted and there is a way to the Kubernetes API."""
    if not node.settings.dra.enabled or node.cluster is None:
        return None
    from agent.dra.door import DraDoor  # noqa: PLC0415  a mebibyte for nodes without it

    return await DraDoor.build(node, node.cluster, wings, core.readiness.switch)


def _no_door(settings: Settings, record: Cell[Record | None]) -> list[str]:
    """A door that cannot be had, or is closed on those inside: the kubelet ends no pod without its driver."""
    if not settings.dra.enabled:
        holdings = record.value.holdings if record.value else ()
        pods = sorted({f"{each.namespace}/{each.pod}" for each in holdings if each.share})
        text = f"{len(pods)} pod(s) have GPUs by claims ({', '.join(pods[:5])}), and dra.enabled is off"
        return [f"{text}: they cannot end before it is on again"] if pods else []
    return [
        "dra.enabled is true, but there is no way to the API server: GPUs of mode dra are offered to nobody"
    ]


def simulated(profile: str | None) -> list[str]:
    """GPUs that are not there."""
    return [f"the GPUs are simulated (simulator.profile: {profile}): pods get none"] if profile else []
