"""Builds sampling, attribution and the metrics page, and starts their tasks."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from anyio.abc import TaskGroup

from agent.app.agent import Agent
from agent.kubelet.owners import Owners
from agent.nvml.port import NvmlPort
from agent.telemetry.attribution import KnownPod
from agent.telemetry.container_use import ContainerWatch
from agent.telemetry.page import MetricsPage
from agent.telemetry.reading import Sources
from agent.telemetry.sampler import Sampler

SWITCH_SECONDS = 0.001


def build_telemetry(agent: Agent, nvml: NvmlPort, group: TaskGroup) -> Sources:
    """Start sampler and attribution, serve /metrics. The GPU monitor must be there already."""
    assert agent.gpu_monitor is not None
    # Pages are rendered in a thread, and the event loop must not wait 5 ms for the interpreter each time.
    sys.setswitchinterval(SWITCH_SECONDS)
    settings, spawn = agent.settings, agent.supervisor.restarting
    snapshot = agent.inventory.snapshot
    window = settings.sampling.window_seconds
    sampler = Sampler(
        nvml,
        agent.calls,
        snapshot,
        settings.sampling.interval_seconds,
        window,
        settings.sampling.pcie_throughput,
    )
    watch = ContainerWatch(
        snapshot,
        sampler.samples,
        agent.holdings.cell,
        Owners(Path(settings.host.proc)),
        _known_pods(agent),
        window,
    )
    group.start_soon(spawn, "sampler", sampler.run)
    group.start_soon(spawn, "attribution", watch.run)
    sources = Sources(
        agent.inventory,
        sampler,
        [agent.calls, agent.gpu_monitor.thread],
        agent.endpoints,
        agent.supervisor,
        agent.blockers,
        agent.collectors,
        watch.uses,
    )
    compatible = node_name(agent) if settings.metrics.gpu_manager_names else None
    MetricsPage(sources, compatible, simulated=settings.simulator.profile is not None).add_to(agent.http)
    return sources


def node_name(agent: Agent) -> str:
    """The node's name, as far as it is known without asking."""
    return agent.settings.cluster.own_node


def _known_pods(agent: Agent) -> Callable[[], Mapping[str, KnownPod]]:
    """The pods of this node by the UID in their cgroups; none without the API server."""
    last: tuple[Any, Mapping[str, KnownPod]] = ({}, {})

    def known() -> Mapping[str, KnownPod]:
        nonlocal last
        if agent.cluster is None:
            return {}
        pods = agent.cluster.pods.by_cgroup_uid()
        if pods is not last[0]:
            found = {
                uid: KnownPod(pod.metadata.namespace, pod.metadata.name, pod.container_names, pod.finished)
                for uid, pod in pods.items()
            }
            last = (pods, found)
        return last[1]

    return known
