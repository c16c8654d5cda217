"""Mode MPS as the rest of the agent has it: daemons, their resources, and all that is known of both."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from agent.inventory.snapshot import GpuState
from agent.kit.cell import Cell
from agent.kubelet.plugin_types import ResourcePlugin
from agent.lists.context import PluginContext
from agent.lists.pairs import pairs_collector
from agent.model.gpu import Gpu
from agent.model.modes import Mode
from agent.modes.ports import SetUpFailed
from agent.modes.sources import DesiredSource
from agent.mps import plugin
from agent.mps.binary import finder_of
from agent.mps.clients import ClientWatch, Overview
from agent.mps.compute_mode import NvmlComputeModes
from agent.mps.daemon_manager import DaemonManager
from agent.mps.daemon_parts import Options
from agent.mps.daemon_status import DaemonState
from agent.mps.events import AdvisoryCaps, MpsEvents
from agent.mps.mps_errors import MpsError
from agent.mps.pods import RootCheck, pod_facts
from agent.mps.shares_cdi import ShareSpecificationKeeper
from agent.mps.upkeep import Upkeep
from agent.nvml.port import NvmlPort
from agent.nvml.worker_thread import WorkerThread
from agent.settings import Settings
from agent.telemetry import definitions as d
from agent.telemetry.container_use import Uses, above_limit
from agent.telemetry.reading import Series

if TYPE_CHECKING:
    from agent.cluster.event_recorder import EventRecorder
    from agent.cluster.pods import PodCache

Task = tuple[str, Callable[[], Awaitable[None]]]


class MpsWing:
    """One for each agent; `build` makes it."""

    mode = Mode.MPS

    def __init__(
        self,
        context: PluginContext,
        manager: DaemonManager,
        events: MpsEvents,
        desired: DesiredSource,
        uses: Cell[Uses],
        pods: "PodCache | None",
        recorder: "EventRecorder | None",
    ) -> None:
        """See `build`."""
        settings, inventory, record = context.settings, context.inventory, context.record.cell
        run, proc = Path(settings.host.run), Path(settings.host.proc)
        self._settings = settings
        self._inventory = inventory
        self._assignment = context.modes
        self._injector = context.injector
        self._desired = desired
        self._uses = uses
        self._manager = manager
        self._clients = ClientWatch(
            manager, record, pod_facts(pods), self._above_cap, events.report, proc=proc
        )
        self._upkeep = Upkeep(manager, run, settings.mps.shared_memory_mebibytes << 20, record, proc)
        self._keeper = ShareSpecificationKeeper(
            Path(settings.host.cdi),
            inventory,
            manager.statuses,
            partial(plugin.mounts, manager),
            plugin.PIPE_IN_CONTAINER,
            self._may_be_requested,
        )
        self._caps = AdvisoryCaps(settings, context.injector, context.modes, recorder)
        root_check = RootCheck(pods) if settings.mps.root_pods == "refuse" else None
        self._pairing, self._conditions, self._plugins = plugin.build(context, manager, root_check)

    @classmethod
    async def build(
        cls,
        context: PluginContext,
        nvml: NvmlPort,
        calls: WorkerThread,
        desired: DesiredSource,
        uses: Cell[Uses],
        pods: "PodCache | None",
        recorder: "EventRecorder | None",
    ) -> Self:
        """Look for the control program, and make the parts; no daemon starts before a GPU is set up for MPS.

        `calls` makes the calls to NVML. `pods` and `recorder` of events are the node's; None: there is no way
        to the Kubernetes API.
        """
        settings = context.settings
        events = MpsEvents(context.inventory, context.record.cell, recorder, pod_facts(pods))
        manager = DaemonManager(
            Path(settings.host.run),
            finder_of(settings),
            NvmlComputeModes(nvml, calls),
            events.report,
            options_of(settings),
        )
        await manager.look()
        return cls(context, manager, events, desired, uses, pods, recorder)

    def _above_cap(self) -> Mapping[str, AbstractSet[str]]:
        return above_limit(self._uses.value, Mode.MPS)

    def _may_be_requested(self) -> bool:
        return Mode.MPS in self._desired.catalog.modes

    # -- its work ------------------------------------------------------------------------------------

    def tasks(self) -> Sequence[Task]:
        """Name and function of each."""
        return (
            ("mps daemons", partial(self._manager.run, self._assignment)),
            ("mps clients", self._clients.run),
            ("mps folders", self._upkeep.run),
            ("cdi specification", self._keeper.run),
            ("mps caps", self._caps.run),
        )

    def plugins(self) -> Sequence[ResourcePlugin]:
        return self._plugins

    def obstacle(self, state: GpuState) -> str | None:
        """Why a GPU cannot be offered as MPS shares; None: it can."""
        return self._manager.refusal(state.gpu, self._inventory.value.driver)

    async def set_up(self, gpu: Gpu) -> None:
        """Have the daemon of a GPU serve; bounded in time, and may be cancelled. Raises SetUpFailed."""
        try:
            await self._manager.set_up(gpu)
        except MpsError as error:
            raise SetUpFailed(str(error)) from error

    async def tear_down(self, gpu: Gpu) -> None:
        """Leave the GPU as it was found; never fails, never hangs."""
        await self._manager.tear_down(gpu)

    def depends_on(self) -> object:
        """The version of the control program: with another one a set-up that failed may succeed."""
        return self._manager.program

    # -- what is known of it -------------------------------------------------------------------------

    def enforced(self) -> str:
        """Whether containers are kept to their shares."""
        return "no" if self._injector.caps_problem else "yes"

    def daemon(self, uuid: str) -> dict[str, Any] | None:
        """A GPU's daemon for `status`; None: it has none. Limits hold per client process."""
        status = self._manager.statuses.value.get(uuid)
        if status is None:
            return None
        overview = self._clients.overviews.value.get(uuid, Overview())
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
            "capsAdvisory": self._injector.caps_problem,
            "clientCeiling": self._conditions.ceiling(uuid),
            "clients": [{"pid": each.pid, "pod": each.pod or None} for each in overview.clients],
            "podsWithoutClient": sorted(overview.silent),
            "podsWithManyClients": sorted(overview.crowded),
            "podsAboveCap": sorted(overview.exceeding),
            "rootPods": sorted(overview.rooted),
            "podsOfOtherUsers": sorted(overview.apart),
        }

    def remarks(self) -> list[str]:
        """Degradations of MPS now, each in a sentence."""
        gpus, statuses = self._inventory.value.by_uuid, self._manager.statuses.value
        problems = [
            *sorted(self._manager.leftovers.items()),
            *((uuid, status.unguarded) for uuid, status in sorted(statuses.items()) if status.unguarded),
        ]
        found = [
            f"GPU {gpus[uuid].gpu.index if uuid in gpus else uuid}: {problem}" for uuid, problem in problems
        ]
        if self._caps.problem:
            found.append(self._caps.problem)
        single = any(each.multi_user is False for each in statuses.values())
        if single and self._settings.mps.root_pods == "refuse":
            found.append(
                "MPS of this driver serves one user at a time on a GPU, and mps.rootPods lets none be root: "
                "pods that share a GPU wait for each other unless they have one runAsUser"
            )
        return found

    def metrics(self) -> Iterator[Series]:
        """Pairs of the node; by GPU, of those that have a daemon, the daemon and its clients."""
        caps_hold = {"mps": self._injector.caps_problem is None}
        yield from pairs_collector("mps", self._pairing.stats, self._pairing.waiting, caps_hold)
        for uuid, status in self._manager.statuses.value.items():
            for state in DaemonState:
                yield d.MPS_DAEMON, status.state is state, (uuid, state.value)
            yield d.MPS_RESTARTS, status.restarts, (uuid,)
            yield d.MPS_FAULTS, status.faults, (uuid,)
            yield d.MPS_CUT, status.cut, (uuid,)
            yield d.MPS_CLIENT_CEILING, self._conditions.ceiling(uuid), (uuid,)
        for uuid, overview in self._clients.overviews.value.items():
            yield d.MPS_CLIENTS, len(overview.clients), (uuid,)
            yield d.MPS_SILENT_PODS, len(overview.silent), (uuid,)


def options_of(settings: Settings) -> Options:
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
