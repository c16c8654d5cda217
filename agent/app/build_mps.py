"""Builds MPS: the daemons, their resources, what the switcher needs of them, and their events."""

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import structlog
from anyio.abc import TaskGroup

from agent.app.agent import Agent, MpsParts
from agent.app.mps_degradations import remarks, tell_of_advisory_caps
from agent.kit.cell import Cell
from agent.kubelet.holdings import holders_by_gpu
from agent.model.demand import MPS
from agent.model.gpu import Gpu
from agent.model.modes import Assignment, Mode
from agent.model.mount import Mount
from agent.modes.ports import SetUpFailed
from agent.mps.binary import Program, find
from agent.mps.clients import ClientWatch, PodFacts
from agent.mps.compute_mode import NvmlComputeModes
from agent.mps.daemon_manager import DaemonManager
from agent.mps.daemon_status import EventReason
from agent.mps.errors import MpsError
from agent.mps.options import Options
from agent.mps.upkeep import Upkeep
from agent.nvml.port import NvmlPort
from agent.pairing.ports import PodSource, Recorder
from agent.plugins import mps
from agent.plugins.inject import Injector
from agent.plugins.shares_cdi import SpecificationKeeper
from agent.settings import Settings
from agent.telemetry.container_use import above_limit
from agent.telemetry.mps_metrics import mps_collector
from agent.telemetry.pairs import pairs_collector

log = structlog.get_logger()

USER_UNKNOWN = "its user is not known without the Kubernetes API"


class MpsBackend:
    """Daemons as the mode switcher sees them."""

    def __init__(self, manager: DaemonManager) -> None:
        self._manager = manager

    async def set_up(self, gpu: Gpu) -> None:
        """See agent.modes.ports.Backend."""
        try:
            await self._manager.set_up(gpu)
        except MpsError as error:
            raise SetUpFailed(str(error)) from error

    async def tear_down(self, gpu: Gpu) -> None:
        """See agent.modes.ports.Backend."""
        await self._manager.tear_down(gpu)

    def depends_on(self) -> object:
        """See agent.modes.ports.Backend."""
        return self._manager.program


async def build_mps(
    agent: Agent,
    nvml: NvmlPort,
    assignment: Cell[Assignment],
    injector: Injector,
    group: TaskGroup,
    source: PodSource | None,
    recorder: Recorder | None,
) -> MpsParts:
    """Build the rooms and start their tasks; no daemon starts before a GPU is set up for MPS."""
    settings, spawn, snapshot = agent.settings, agent.supervisor.restarting, agent.inventory.snapshot
    compute = NvmlComputeModes(nvml, agent.calls)
    manager = DaemonManager(
        Path(settings.host.run), _finder(settings), compute, _MpsEvents(agent), _options(settings)
    )
    await manager.look()
    clients = ClientWatch(
        manager,
        agent.holdings.cell,
        _pod_facts(agent),
        proc=Path(settings.host.proc),
        exceeding=_exceeding(agent),
        report=_MpsEvents(agent),
    )
    pairing, conditions, plugins = mps.build(
        settings,
        manager,
        snapshot,
        assignment,
        injector,
        agent.holdings,
        source,
        recorder,
        agent.cluster.node.name if agent.cluster else "",
        _RootCheck(agent) if settings.mps.root_pods == "refuse" else None,
    )

    upkeep = Upkeep(
        manager,
        Path(settings.host.run),
        settings.mps.shared_memory_mebibytes << 20,
        _held(agent),
        Path(settings.host.proc),
    )

    def mounts_of(uuid: str) -> tuple[Mount, ...]:
        return mps.mounts(manager, uuid)

    def allowed() -> bool:
        return agent.desired is not None and Mode.MPS in agent.desired.catalog.modes

    keeper = SpecificationKeeper(
        Path(settings.host.cdi), snapshot, manager.statuses, mounts_of, mps.PIPE_IN_CONTAINER, allowed
    )
    group.start_soon(spawn, "mps daemons", manager.run, assignment)
    group.start_soon(spawn, "mps clients", clients.run)
    group.start_soon(spawn, "mps folders", upkeep.run)
    group.start_soon(spawn, "cdi specification", keeper.run)
    agent.collectors.append(
        pairs_collector(
            "mps",
            pairing.stats,
            enforced=lambda: {"mps": injector.caps_problem is None},
            reserved=lambda: pairing.waiting,
        )
    )
    agent.collectors.append(mps_collector(manager.statuses, clients.overviews, conditions.ceiling))
    group.start_soon(spawn, "mps caps", tell_of_advisory_caps, agent, injector, assignment)
    return MpsParts(
        manager,
        clients,
        list(plugins),
        conditions.ceiling,
        caps_problem=lambda: injector.caps_problem,
        remarks=remarks(agent, manager, injector, assignment),
    )


def _finder(settings: Settings) -> Callable[[], Program]:
    explicit = settings.mps.control_program

    def finder() -> Program:
        return find(Path(settings.driver.root), Path(explicit) if explicit else None)

    return finder


def _options(settings: Settings) -> Options:
    configured = settings.mps
    return Options(
        cgroups=Path(settings.host.cgroups),
        shared_memory=configured.shared_memory_mebibytes << 20,
        exclusive=configured.exclusive_process,
        prestart=configured.prestart_server,
        probe_seconds=configured.probe_seconds,
        # Below the time between two probes: a look that begins with the next probe is never made.
        log_seconds=min(2.0, configured.probe_seconds / 2),
        orphan_seconds=configured.orphan_seconds,
        quit_seconds=configured.quit_seconds,
    )


class _MpsEvents:
    """Reports as events of the node, with the pods that they concern."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def __call__(
        self, kind: EventReason, uuid: str, message: str, pids: frozenset[int] = frozenset()
    ) -> None:
        state = self._agent.inventory.snapshot.value.by_uuid.get(uuid)
        gpu = f"GPU {state.gpu.index} ({uuid})" if state else f"GPU {uuid}"
        text = f"{gpu}: {message}"
        pods = sorted(self._pods(uuid))
        if kind is EventReason.FAULT and pods:
            text += f"; every MPS client of the GPU is affected: {', '.join(pods)} must be restarted"
        if pids and kind is EventReason.FAULT:
            text += f"; the log names process {', '.join(map(str, sorted(pids)))}"
        warning = kind is not EventReason.RECOVERED
        (log.warning if warning else log.info)("mps_report", gpu=uuid, reason=kind.value, message=text)
        if self._agent.cluster:
            self._agent.cluster.events.node(kind.value, text, warning=warning)

    def _pods(self, uuid: str) -> set[str]:
        held = self._agent.holdings.cell.value
        holders = holders_by_gpu(held).get(uuid, []) if held else []
        return {holder.pod for holder in holders if holder.mode is Mode.MPS}


def _held(agent: Agent) -> Callable[[str], bool | None]:
    def held(uuid: str) -> bool | None:
        pods = agent.holdings.cell.value
        if pods is None:
            return None
        return any(holder.mode is Mode.MPS for holder in holders_by_gpu(pods).get(uuid, []))

    return held


def _exceeding(agent: Agent) -> Callable[[], Mapping[str, AbstractSet[str]]]:
    def exceeding() -> Mapping[str, AbstractSet[str]]:
        uses = agent.sources.uses if agent.sources else None
        return above_limit(uses.value, Mode.MPS) if uses else {}

    return exceeding


def _pod_facts(agent: Agent) -> Callable[[], Sequence[PodFacts]]:
    def facts() -> Sequence[PodFacts]:
        if agent.cluster is None:
            return ()
        return [
            PodFacts(
                uid,
                pod.metadata.namespace,
                pod.metadata.name,
                _moment(pod.metadata.deletion_timestamp),
                pod.metadata.deletion_grace_period_seconds,
                {name: each for each, name in pod.container_names.items()},
            )
            for uid, pod in agent.cluster.pods.by_cgroup_uid().items()
        ]

    return facts


def _moment(text: str | None) -> dt.datetime | None:
    """deletionTimestamp is the end of the grace period, not its beginning."""
    return dt.datetime.fromisoformat(text) if text else None


class _RootCheck:
    """Whether containers may run as root, by the pods' security contexts."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def named(self, namespace: str, pod: str, container: str) -> str | None:
        """See agent.plugins.mps.RootCheck.

        The kubelet hands an init container's units to an app container, and names that one alone: any
        container of the pod that asks for cores may be the one that starts.
        """
        if self._agent.cluster is None:
            return USER_UNKNOWN
        found = self._agent.cluster.pods.find(namespace, pod)
        if found is None:
            return "its specification is not known yet"
        spec = found.spec
        others = [
            each.name
            for each in (*spec.init_containers, *spec.containers)
            if MPS.core in each.resources.limits and each.name != container
        ]
        if why := found.may_run_as_root(container):
            return why
        for name in others:
            if why := found.may_run_as_root(name):
                return f"container {name} of the pod, whose cores it may have: {why}"
        return None

    def unnamed(self, cores: int, known: AbstractSet[tuple[str, str, str]]) -> str | None:
        """See agent.plugins.mps.RootCheck."""
        if self._agent.cluster is None:
            return USER_UNKNOWN
        suspects = [
            (pod, container.name)
            for pod in self._agent.cluster.pods.pods().values()
            if not pod.finished
            for container in (*pod.spec.init_containers, *pod.spec.containers)
            if container.resources.limits.get(MPS.core) == str(cores)
            and (pod.metadata.namespace, pod.metadata.name, container.name) not in known
        ]
        for pod, name in suspects:
            if why := pod.may_run_as_root(name):
                where = f"{pod.metadata.namespace}/{pod.metadata.name}"
                return f"container {name} of {where} may run as root ({why})"
        return None if suspects else "no container that asks for so many is known"


__all__ = ["MpsBackend", "build_mps"]
