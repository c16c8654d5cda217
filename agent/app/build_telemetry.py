"""Builds sampling, attribution and the metrics page, and starts their tasks."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus

from agent.app.parts import Core, Tasks
from agent.cluster.pods import PodCache
from agent.cluster.reviews import Reviews
from agent.holdings.process_owners import Owners
from agent.kit.tasks import Cell, Courtesy, FatalError
from agent.model.holding import Growth, Place
from agent.model.modes import Assignment
from agent.model.pod import Pod
from agent.telemetry.access import PATH, REVIEW_SECONDS, ScraperAdmission
from agent.telemetry.container_use import ContainerWatch
from agent.telemetry.rendering import MetricsPage
from agent.telemetry.sampler import Sampler
from agent.telemetry.series import Sources
from agent.web.certificates import Certificates, Files
from agent.web.connections import ConnectionLimits
from agent.web.server import HttpServer

SWITCH_SECONDS = 0.001
# For a few scrapers. A connection with TLS takes 0.3 MiB.
HTTPS_LIMITS = ConnectionLimits(
    connections=48, connections_per_address=16, requests=12, requests_per_address=8
)


def build_telemetry(
    core: Core, assignment: Cell[Assignment], grown: Cell[Mapping[Place, Growth]]
) -> tuple[Sampler, ContainerWatch]:
    """The rounds of samples, and the use of containers that is worked out from them."""
    # Pages are rendered in a thread, and the event loop must not wait 5 ms for the interpreter each time.
    sys.setswitchinterval(SWITCH_SECONDS)
    settings, snapshot = core.settings, core.inventory.snapshot
    window = settings.sampling.window_seconds
    courtesy = Courtesy(lambda: any(each.service.busy for each in core.readiness.endpoints))
    sampler = Sampler(
        core.nvml,
        core.calls,
        snapshot,
        settings.sampling.interval_seconds,
        window,
        settings.sampling.pcie_throughput,
        settings.sampling.activity,
        courtesy,
    )
    watch = ContainerWatch(
        snapshot,
        sampler.samples,
        core.holdings.cell,
        Owners(Path(settings.host.proc)),
        _known_pods(core.cluster.pods if core.cluster else None),
        window,
        assignment=assignment,
        grown=grown,
        courtesy=courtesy,
    )
    return sampler, watch


async def serve_metrics(core: Core, tasks: Tasks, sources: Sources) -> None:
    """Serve /metrics. Raises FatalError."""
    settings = core.settings
    compatible = settings.cluster.own_node if settings.metrics.gpu_manager_names else None
    page = MetricsPage(sources, compatible, simulated=settings.simulator.profile is not None)
    if settings.https.port is None:
        page.add_to(core.http)
    else:
        await _serve_admitted(core, tasks, page)


async def _serve_admitted(core: Core, tasks: Tasks, page: MetricsPage) -> None:
    """Serve the page over HTTPS to those whom the API server admits. Raises FatalError."""
    settings, cluster = core.settings, core.cluster
    if cluster is None:
        raise FatalError(
            "https.port is set, but there is no way to the API server, which says who may scrape: give the"
            " agent a service account or cluster.kubeconfig, or set https.port: null"
        )
    files = Files(settings.https.certificate, settings.https.key)
    remedy = "mount a Secret with a certificate, or set https.port: null"
    certificates = await anyio.to_thread.run_sync(Certificates, files, remedy)
    https = HttpServer(settings.http.address, settings.https.port or 0, certificates.context, HTTPS_LIMITS)
    admission = ScraperAdmission(Reviews(cluster.api, PATH, REVIEW_SECONDS).review, anyio.current_time)
    page.add_to(https, admission.guarded)
    await tasks.group.start(_serve, core, https)
    page.refer(core.http, https.port)
    tasks.start("certificates", certificates.follow)


async def _serve(core: Core, https: HttpServer, *, task_status: TaskStatus[int]) -> None:
    await core.supervisor.fatal("https", partial(https.serve, task_status=task_status))


def _known_pods(cache: PodCache | None) -> Callable[[], Mapping[str, Pod]]:
    """The pods of this node by the UID in their cgroups; none without the API server."""
    return (lambda: cache.cgroup_uids().pods) if cache else dict
