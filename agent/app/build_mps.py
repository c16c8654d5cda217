"""Builds MPS: the daemons, their resources, what the switcher needs of them, and their events."""

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from agent.app.mode_parts import ModeContext, ModeParts
from agent.app.mps_degradations import AdvisoryCaps, remarks
from agent.app.mps_root_check import RootCheck
from agent.injection.inject import Injector
from agent.inventory.snapshot import Snapshot
from agent.kit.cell import Cell
from agent.lists.pairs import pairs_collector
from agent.model.gpu import Gpu
from agent.model.holding import Record
from agent.model.modes import Mode
from agent.modes.ports import SetUpFailed
from agent.mps import plugin as mps
from agent.mps.binary import find
from agent.mps.clients import ClientWatch, Overview, PodFacts
from agent.mps.compute_mode import NvmlComputeModes
from agent.mps.daemon_manager import DaemonManager
from agent.mps.daemon_parts import Options
from agent.mps.daemon_status import EventReason
from agent.mps.mps_errors import MpsError
from agent.mps.mps_metrics import mps_collector
from agent.mps.shares_cdi import ShareSpecificationKeeper
from agent.mps.upkeep import Upkeep
from agent.settings import Settings
from agent.telemetry.container_use import above_limit
from agent.telemetry.reading import Series

if TYPE_CHECKING:
    from agent.cluster.event_recorder import EventRecorder
    from agent.cluster.pods import PodCache

log = structlog.get_logger()


class MpsBackend:
    """Daemons as the mode switcher sees them (`agent.modes.ports.Backend`)."""

    def __init__(self, manager: DaemonManager) -> None:
        self._manager = manager

    async def set_up(self, gpu: Gpu) -> None:
        try:
            await self._manager.set_up(gpu)
        except MpsError as error:
            raise SetUpFailed(str(error)) from error

    async def tear_down(self, gpu: Gpu) -> None:
        await self._manager.tear_down(gpu)

    def depends_on(self) -> object:
        return self._manager.program


async def build(context: ModeContext) -> ModeParts:
    """Build the rooms and start their tasks; no daemon starts before a GPU is set up for MPS."""
    core, tasks, cluster, injector = context.core, context.tasks, context.cluster, context.plugins.injector
    settings, snapshot, held = core.settings, core.inventory.snapshot, core.holdings.cell
    explicit = settings.mps.control_program
    pods = pod_facts(cluster.pods if cluster else None)
    events = MpsEvents(snapshot, held, cluster.events if cluster else None, pods)
    manager = DaemonManager(
        Path(settings.host.run),
        partial(find, Path(settings.driver.root), Path(explicit) if explicit else None),
        NvmlComputeModes(core.nvml, core.calls),
        events,
        _options(settings),
    )
    await manager.look()
    clients = ClientWatch(
        manager,
        held,
        pods,
        lambda: above_limit(context.uses.value, Mode.MPS),
        events,
        proc=Path(settings.host.proc),
    )
    root_check = RootCheck(cluster.pods if cluster else None)
    pairing, conditions, plugins = mps.build(
        context.plugins, manager, root_check if settings.mps.root_pods == "refuse" else None
    )
    upkeep = Upkeep(
        manager,
        Path(settings.host.run),
        settings.mps.shared_memory_mebibytes << 20,
        partial(_is_held, held),
        Path(settings.host.proc),
    )

    keeper = ShareSpecificationKeeper(
        Path(settings.host.cdi),
        snapshot,
        manager.statuses,
        partial(mps.mounts, manager),
        mps.PIPE_IN_CONTAINER,
        needed=lambda: Mode.MPS in context.desired.catalog.modes,
    )
    caps = AdvisoryCaps(settings, injector, context.plugins.modes, cluster.events if cluster else None)
    tasks.start("mps daemons", manager.run, context.plugins.modes)
    tasks.start("mps clients", clients.run)
    tasks.start("mps folders", upkeep.run)
    tasks.start("cdi specification", keeper.run)
    tasks.start("mps caps", caps.run)

    def pairs() -> Iterator[Series]:
        return pairs_collector("mps", pairing.stats, pairing.waiting, {"mps": injector.caps_problem is None})

    daemons = partial(mps_collector, manager.statuses, clients.overviews, conditions.ceiling)
    core.collectors.extend([pairs, daemons])
    core.readiness.degradations.append(partial(remarks, settings, snapshot, manager, caps))
    return ModeParts(
        plugins,
        MpsBackend(manager),
        refusal=lambda state: manager.refusal(state.gpu, snapshot.value.driver),
        daemon=partial(_report, manager, clients, conditions.ceiling, injector),
        enforced=lambda: "no" if injector.caps_problem else "yes",
    )


def _report(
    manager: DaemonManager,
    clients: ClientWatch,
    ceiling: Callable[[str], int],
    injector: Injector,
    uuid: str,
) -> dict[str, Any] | None:
    """A GPU's daemon for `status`; None: it has none. Limits hold per client process."""
    status = manager.statuses.value.get(uuid)
    if status is None:
        return None
    overview = clients.overviews.value.get(uuid, Overview())
    return {
        "state": status.state.value,
        "reason": status.reason,
        "pid": status.pid,
        "server": status.server,
        "serverState": status.server_state.value if status.server_state else None,
        "adopted": status.adopted,
        "restarts": status.restarts,
        "faults": status.faults,
        "connectionsCut": status.cut,
        "multiUser": status.multi_user,
        "privateSharedMemory": status.private_shm,
        "limitsHoldPer": "client process",
        "capsAdvisory": injector.caps_problem,
        "clientCeiling": ceiling(uuid),
        "clients": [{"pid": each.pid, "pod": each.pod or None} for each in overview.clients],
        "podsWithoutClient": sorted(overview.silent),
        "podsWithManyClients": sorted(overview.crowded),
        "podsAboveCap": sorted(overview.exceeding),
        "rootPods": sorted(overview.rooted),
        "podsOfOtherUsers": sorted(overview.apart),
    }


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


class MpsEvents:
    """Reports as events of the node, with the pods that they concern."""

    def __init__(
        self,
        inventory: Cell[Snapshot],
        held: Cell[Record | None],
        events: "EventRecorder | None",
        pods: Callable[[], Sequence[PodFacts]],
    ) -> None:
        """`events` of the node; None: there is no way to the Kubernetes API. `pods` of the node."""
        self._known = pods
        self._inventory = inventory
        self._held = held
        self._events = events

    def __call__(
        self, kind: EventReason, uuid: str, message: str, pids: frozenset[int] = frozenset()
    ) -> None:
        state = self._inventory.value.by_uuid.get(uuid)
        gpu = f"GPU {state.gpu.index} ({uuid})" if state else f"GPU {uuid}"
        text = f"{gpu}: {message}"
        pods = sorted(self._pods(uuid))
        if kind is EventReason.FAULT and pods:
            text += f"; every MPS client of the GPU is affected: {', '.join(pods)} must be restarted"
        if pids and kind is EventReason.FAULT:
            text += f"; the log names process {', '.join(map(str, sorted(pids)))}"
        if kind is EventReason.SILENT:
            for pod in self._known():
                # The supervisor of a daemon knows a pod by its cgroup, which has the UID.
                text = text.replace(f"pod {pod.uid}", f"pod {pod.key}")
        warning = kind is not EventReason.RECOVERED
        (log.warning if warning else log.info)("mps_report", gpu=uuid, reason=kind.value, message=text)
        if self._events:
            self._events.node(kind.value, text, warning=warning)

    def _pods(self, uuid: str) -> set[str]:
        held = self._held.value
        holders = held.by_gpu.get(uuid, []) if held else []
        return {holder.pod for holder in holders if holder.mode is Mode.MPS}


def _is_held(held: Cell[Record | None], uuid: str) -> bool | None:
    """Whether a pod holds shares of a GPU; None: it is not known."""
    pods = held.value
    if pods is None:
        return None
    return any(holder.mode is Mode.MPS for holder in pods.by_gpu.get(uuid, []))


def pod_facts(pods: "PodCache | None") -> Callable[[], Sequence[PodFacts]]:
    """The pods of the node by what marks their clients; without the Kubernetes API none is known."""

    def facts() -> Sequence[PodFacts]:
        if pods is None:
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
            for uid, pod in pods.cgroup_uids().pods.items()
        ]

    return facts


def _moment(text: str | None) -> dt.datetime | None:
    """deletionTimestamp is the end of the grace period, not its beginning."""
    return dt.datetime.fromisoformat(text) if text else None
