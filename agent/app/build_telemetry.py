"""Builds sampling, attribution and the metrics page, and starts their tasks."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.app.parts import Core, Tasks
from agent.kit.cell import Cell
from agent.kubelet.owners import Owners
from agent.nvml.worker_thread import WorkerThread
from agent.telemetry.attribution import KnownPod
from agent.telemetry.container_use import ContainerWatch, Uses
from agent.telemetry.page import MetricsPage
from agent.telemetry.reading import Sources
from agent.telemetry.sampler import Sampler

if TYPE_CHECKING:
    from agent.cluster.pods import PodCache

SWITCH_SECONDS = 0.001


def build_telemetry(
    core: Core, tasks: Tasks, events: WorkerThread, pods: "PodCache | None"
) -> tuple[Sources, Cell[Uses]]:
    """Start sampler and attribution, serve /metrics. `events`: the thread that waits for NVML's events.

    Answers what a scrape shows, and what containers use.
    """
    # Pages are rendered in a thread, and the event loop must not wait 5 ms for the interpreter each time.
    sys.setswitchinterval(SWITCH_SECONDS)
    settings, snapshot = core.settings, core.inventory.snapshot
    window = settings.sampling.window_seconds
    sampler = Sampler(
        core.nvml,
        core.calls,
        snapshot,
        settings.sampling.interval_seconds,
        window,
        settings.sampling.pcie_throughput,
    )
    watch = ContainerWatch(
        snapshot,
        sampler.samples,
        core.holdings.cell,
        Owners(Path(settings.host.proc)),
        _known_pods(pods),
        window,
    )
    tasks.start("sampler", sampler.run)
    tasks.start("attribution", watch.run)
    sources = Sources(
        core.inventory,
        sampler,
        [core.calls, events],
        core.readiness.endpoints,
        core.supervisor,
        core.readiness.blockers,
        core.collectors,
        watch.uses,
    )
    compatible = settings.cluster.own_node if settings.metrics.gpu_manager_names else None
    MetricsPage(sources, compatible, simulated=settings.simulator.profile is not None).add_to(core.http)
    return sources, watch.uses


def _known_pods(cache: "PodCache | None") -> Callable[[], Mapping[str, KnownPod]]:
    """The pods of this node by the UID in their cgroups; none without the API server."""
    last: tuple[Any, Mapping[str, KnownPod]] = ({}, {})

    def known() -> Mapping[str, KnownPod]:
        nonlocal last
        if cache is None:
            return {}
        pods = cache.cgroup_uids().pods
        if pods is not last[0]:
            found = {
                uid: KnownPod(pod.metadata.namespace, pod.metadata.name, pod.container_names, pod.finished)
                for uid, pod in pods.items()
            }
            last = (pods, found)
        return last[1]

    return known
