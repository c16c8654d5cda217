"""Builds the rooms of the node agent, in the order in which each needs the ones before it."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from agent.app.agent import Agent
from agent.app.build_switching import build_request, build_switching, start_switching
from agent.app.build_telemetry import build_telemetry, serve_metrics
from agent.app.parts import Core, Tasks
from agent.app.wings import WINGS
from agent.cluster.reach import ClusterAccess
from agent.dra.door import DraDoor
from agent.holdings.holdings import HoldingsWatch
from agent.injection import companions, toolkit
from agent.injection import toolkit as programs
from agent.injection.inject import Injector
from agent.injection.keeper import SpecificationKeeper
from agent.inventory.gpu_monitor import GpuMonitor
from agent.inventory.snapshot import NOT_YET
from agent.kit.tasks import Cell
from agent.model.holding import Growth, Place, Record
from agent.model.modes import Assignment, Mode
from agent.modes.switcher import modes_collector
from agent.modes.unexplained import Unexplained
from agent.modes.wing import Node, Wing
from agent.modes.withholding import CordonBook
from agent.node import conditions as node_writers
from agent.node import refused_pods
from agent.pairing.cluster_pods import ClusterPods, ClusterRecorder
from agent.pairing.pairing import Recorder
from agent.pairing.pod_source import PodSource
from agent.settings import Settings
from agent.status import top
from agent.status.commands import Commands
from agent.status.report import LastHolders, StatusSources
from agent.telemetry import definitions as d
from agent.telemetry.health_metrics import free_collector, health_collector
from agent.telemetry.series import Collector, Series, Sources
from agent.web.control import NAME as CONTROL_SOCKET
from agent.web.control import ControlServer

# Builds what keeps our own CDI specification of the GPUs, where NVIDIA's programs are at hand.

log = structlog.get_logger()

FIRST_SECONDS = 5.0


async def build_cdi(core: Core) -> tuple[Injector, SpecificationKeeper | None]:
    """The injector, and what keeps the specification; None: nothing can, or it is not wanted."""
    settings = core.settings
    configured = settings.injection
    folder = Path(configured.toolkit) if configured.toolkit else None
    if configured.strategy == "envvar" or folder is None or settings.simulator.profile:
        return Injector(settings), None
    if not await anyio.to_thread.run_sync(programs.present, folder):
        log.info("no_cdi_generator", folder=str(folder), reason="nvidia-ctk or nvidia-cdi-hook is missing")
        return Injector(settings), None
    root = configured.driver_root or settings.driver.root
    places = toolkit.Places(
        folder,
        Path(root),
        Path(configured.host_driver_root or root),
        Path(settings.host.state) / programs.FOLDER,
        companions.wanted(configured),
    )
    keeper = SpecificationKeeper(
        Path(settings.host.cdi), toolkit.Toolkit(places), core.inventory.snapshot, core.holdings.cell
    )
    await keeper.take_up()
    return Injector(settings, keeper.devices), keeper


async def keep_true(keeper: SpecificationKeeper, injector: Injector, tasks: Tasks) -> None:
    """Make the specification before the first list is sent, if it does not take too long, and keep it."""
    with anyio.move_on_after(FIRST_SECONDS):
        await keeper.keep()
    await injector.update(injector.software)
    tasks.start("gpu specification", keeper.run)
    tasks.start("gpu specification users", injector.follow_specification)


def metrics(keeper: SpecificationKeeper) -> Iterator[Series]:
    yield d.CDI_DEVICES, len(keeper.devices.value.names), ()
    yield d.CDI_GENERATIONS, keeper.generations, ("ok",)
    yield d.CDI_GENERATIONS, keeper.failures, ("failed",)


# Starts the tasks of the Kubernetes API, where there is a way to it.


def follow_cluster(
    cluster: ClusterAccess | None, settings: Settings, holdings: HoldingsWatch, tasks: Tasks
) -> tuple[PodSource, Recorder]:
    """Watch the node and its pods, send events; the record of who holds what learns of the pods.

    Answers the pods, and reports to their owners; without an API server nothing is behind them.
    """
    if cluster is None:
        return PodSource(), Recorder()
    pods = ClusterPods(cluster.pods)
    pods.inform(holdings)
    recorder = ClusterRecorder(cluster.api, cluster.events, settings.vgpu.write_choice)
    tasks.start("node watch", cluster.node.reflector.run)
    tasks.start("pod watch", cluster.pods.reflector.run)
    tasks.start("events", cluster.events.run)
    tasks.start("refused pods", refused_pods.follow, cluster.pods.reflector.items, cluster.events)
    tasks.start("choices", recorder.run)
    return pods, recorder


# Builds the socket of `gpu-node-agent status`, `top`, `cordon`, `clear-health` and `release`.


def start_commands(
    core: Core,
    tasks: Tasks,
    monitor: GpuMonitor,
    injector: Injector,
    wings: Mapping[Mode, Wing],
    cordons: CordonBook,
    unexplained: Unexplained,
    sources: Sources,
) -> None:
    last = LastHolders(core.holdings.cell)
    tasks.start("last holders", last.run)
    control = ControlServer(Path(core.settings.host.run) / CONTROL_SOCKET)
    readiness = core.readiness
    status = StatusSources(
        core.inventory,
        monitor,
        core.holdings,
        readiness.switch,
        injector,
        readiness.blockers,
        # Probes have no part of the second: it names pods by their UIDs.
        lambda: [*readiness.remarks(), *unexplained.sentences()],
        cordons,
        wings,
        last,
    )
    Commands(status).add_to(control)
    top.add_to(control, sources, readiness.switch, wings)
    tasks.start("control socket", control.serve)


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
    injector, keeper = await build_cdi(core)
    await injector.update(None)
    if injector.companions:
        tasks.start("companion devices", injector.watch_companions)
    if cluster:
        tasks.start("injection", injector.follow_node, cluster.node)
    with anyio.move_on_after(FIRST_LOOK_SECONDS):
        await core.holdings.refresh()
        await snapshot.wait_for(lambda now: now.problem != NOT_YET)
    if keeper:
        await keep_true(keeper, injector, tasks)
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
        *([partial(metrics, keeper)] if keeper else []),
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


async def _door(node: Node, wings: Mapping[Mode, Wing], core: Core) -> DraDoor | None:
    """The second door, where it is wanted and there is a way to the Kubernetes API."""
    if not node.settings.dra.enabled or node.cluster is None:
        return None
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
