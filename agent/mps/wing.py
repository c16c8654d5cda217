"""Mode MPS as the rest of the agent has it: daemons, their resources, and all that is known of both."""

import os
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import ClassVar, Self

import anyio.to_thread

from agent.inventory.snapshot import GpuState
from agent.kubelet.wire import ResourcePlugin
from agent.lists.shared_pair import pairs_collector
from agent.model.cuda import LEAST_COMPUTE_CAPABILITY, LEAST_CUDA, dotted
from agent.model.gpu import Gpu
from agent.model.holding import Holder
from agent.model.look import Look
from agent.model.modes import Mode
from agent.model.resource_claim import ClaimedShare
from agent.modes.wing import Document, Machine, Node, NotLeft, NotYet, SetUpFailed, Task, Wing
from agent.mps import leaving, plugin
from agent.mps.binary import finder_of
from agent.mps.clients import ClientWatch, Overview
from agent.mps.compute_mode import NvmlComputeModes
from agent.mps.daemon_manager import AdvisoryCaps, DaemonManager, MpsEvents
from agent.mps.daemon_parts import DaemonState, Options
from agent.mps.mps_errors import MpsError, ProgramMissing
from agent.mps.pods import RootCheck, pod_facts
from agent.mps.processes import kernel_problem
from agent.mps.shares_cdi import ShareSpecificationKeeper, claimed
from agent.mps.upkeep import Upkeep
from agent.nvml.port import NvmlPort
from agent.settings import Settings
from agent.telemetry import definitions as d
from agent.telemetry.container_use import above_limit
from agent.telemetry.series import Series

KERNEL = (5, 10)  # mounts whose links nobody follows, which MPS shares have (docs/mps.md)


class MpsWing(Wing):
    mode: ClassVar[Mode] = Mode.MPS
    prepares: ClassVar[bool] = True

    def __init__(self, node: Node, manager: DaemonManager, events: MpsEvents) -> None:
        """See `build`."""
        settings, record = node.settings, node.holdings.cell
        run, proc = Path(settings.host.run), Path(settings.host.proc)
        pods = node.cluster.pods if node.cluster else None
        self._node = node
        self._manager = manager
        self._clients = ClientWatch(
            manager, record, pod_facts(pods), self._above_cap, events.report, proc=proc
        )
        self._upkeep = Upkeep(manager, run, settings.mps.shared_memory_mebibytes << 20, record, proc)
        self._keeper = ShareSpecificationKeeper(node, manager)
        self._caps = AdvisoryCaps(node)
        self._root_check = RootCheck(pods) if settings.mps.root_pods == "refuse" else None
        self._conditions, self._plugins = plugin.build(node, manager, self._root_check)

    # -- of the node, with no agent running ------------------------------------------------------------

    @classmethod
    def checks(cls, settings: Settings, machine: Machine) -> Iterator[Look]:
        """The kernel, the driver, its GPUs, and the control program. Blocks."""
        if not settings.modes.mps:
            return
        release = os.uname().release
        digits = [part for part in release.replace("-", ".").split(".")[:2] if part.isdigit()]
        if problem := kernel_problem():
            yield Look.failed("kernel for MPS", f"{problem}, or set modes.mps: false")
        elif tuple(map(int, digits)) < KERNEL:
            text = "links in shared memory of MPS pods are followed before Linux 5.10 (docs/mps.md)"
            yield Look.warning("kernel for MPS", f"{release}: {text}")
        if machine.driver is None or not machine.gpus:
            return
        old = [str(gpu.index) for gpu in machine.gpus if gpu.compute_capability < LEAST_COMPUTE_CAPABILITY]
        if machine.driver.cuda_version < LEAST_CUDA:
            text = f"needs a driver for CUDA {dotted(LEAST_CUDA)} or later"
            yield Look.failed("mode mps", f"{text}: get a newer driver, or set modes.mps: false")
        elif old:
            least = dotted(LEAST_COMPUTE_CAPABILITY)
            yield Look.warning(
                "mode mps", f"GPU {', '.join(old)} is older than Volta ({least}): no MPS shares"
            )
        try:
            yield Look.ok("MPS program", str(finder_of(settings)().path))
        except ProgramMissing as error:
            yield Look.failed("MPS program", str(error))

    @classmethod
    async def leave(cls, settings: Settings, nvml: NvmlPort) -> None:
        """End daemons, give their GPUs back, and remove files outside of the agent's folders."""
        try:
            await leaving.stop_daemons(settings, nvml)
            await anyio.to_thread.run_sync(leaving.remove_files, settings)
        except MpsError as error:
            raise NotLeft(str(error)) from error
        except OSError as error:
            raise NotLeft(f"{error.filename}: cannot be removed: {error.strerror}") from error

    # -- its work --------------------------------------------------------------------------------------

    @classmethod
    async def build(cls, node: Node) -> Self:
        """Look for the control program, and make the parts; no daemon starts before a GPU is prepared."""
        settings = node.settings
        events = MpsEvents(node, pod_facts(node.cluster.pods if node.cluster else None))
        manager = DaemonManager(
            Path(settings.host.run),
            finder_of(settings),
            NvmlComputeModes(node.nvml, node.calls),
            events.report,
            _options(settings),
        )
        await manager.look()
        return cls(node, manager, events)

    def _above_cap(self) -> Mapping[str, AbstractSet[str]]:
        return above_limit(self._node.uses.value, Mode.MPS)

    def tasks(self) -> Sequence[Task]:
        return (
            Task("mps daemons", partial(self._manager.run, self._node.assignment)),
            Task("mps clients", self._clients.run),
            Task("mps folders", self._upkeep.run),
            Task("cdi specification", self._keeper.run),
            Task("mps caps", self._caps.run),
        )

    def plugins(self) -> Sequence[ResourcePlugin]:
        return self._plugins

    def obstacle(self, state: GpuState) -> str:
        return self._manager.refusal(state.gpu, self._node.snapshot.value.driver) or ""

    async def prepare(self, gpu: Gpu) -> None:
        """Have the daemon of a GPU serve."""
        try:
            await self._manager.set_up(gpu)
        except MpsError as error:
            raise SetUpFailed(str(error)) from error

    async def give_back(self, gpu: Gpu) -> None:
        await self._manager.tear_down(gpu)

    async def at_work(self, gpu: Gpu, *, surely: bool) -> bool | None:
        return await self._manager.at_work(gpu.uuid, surely=surely)

    def unclaimable(self) -> str:
        injector, simulated = self._node.injector, self._node.settings.simulator.profile
        if (problem := injector.caps_problem) and not simulated:
            return f"caps of MPS shares reach containers of claims by CDI alone: {problem}"
        return injector.claim_problem

    def claimed(self, share: ClaimedShare, holders: Sequence[Holder], *, owned: bool) -> Sequence[str]:
        """The GPU, its daemon's sockets, and the caps: a claim's containers get them by CDI or not at all."""
        uuid = share.gpu
        if why := self.unclaimable() or self._manager.unready(uuid):
            raise NotYet(f"GPU {uuid} serves no MPS shares now: {why}")
        if check := self._root_check:
            if not holders:
                raise SetUpFailed("whose claim it is is not known, and mps.rootPods refuses root")
            if not owned:
                raise SetUpFailed(
                    "claim is not one pod's alone: mps.rootPods could not look at pods that use it later; "
                    "let each pod have its own, by a ResourceClaimTemplate"
                )
            for holder in holders:
                if cause := check.named(*holder):
                    raise SetUpFailed(f"{holder} may run as root ({cause}), which mps.rootPods refuses")
        return (self._node.injector.claim_device(uuid), *claimed(share))

    def depends_on(self) -> object:
        """The version of the control program."""
        return self._manager.program

    # -- what is known of it ---------------------------------------------------------------------------

    def enforced(self) -> str:
        return "no" if self._node.injector.caps_problem else "yes"

    def gpu_facts(self, uuid: str) -> Document:
        """Key `mps`: the GPU's daemon; None: it has none. Limits hold per client process."""
        status = self._manager.statuses.value.get(uuid)
        if status is None:
            return {"mps": None}
        overview = self._clients.overviews.value.get(uuid, Overview())
        daemon = {
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
            "capsAdvisory": self._node.injector.caps_problem,
            "clientCeiling": self._conditions.ceiling(uuid),
            "clients": [{"pid": each.pid, "pod": each.pod or None} for each in overview.clients],
            "podsWithoutClient": sorted(overview.silent),
            "podsWithManyClients": sorted(overview.crowded),
            "podsAboveCap": sorted(overview.exceeding),
            "rootPods": sorted(overview.rooted),
            "podsOfOtherUsers": sorted(overview.apart),
        }
        return {"mps": daemon}

    def remarks(self) -> list[str]:
        """Degradations of MPS now, each in a sentence."""
        gpus, statuses = self._node.snapshot.value.by_uuid, self._manager.statuses.value
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
        if single and self._node.settings.mps.root_pods == "refuse":
            found.append(
                "MPS of this driver serves one user at a time on a GPU, and mps.rootPods lets none be root: "
                "pods that share a GPU wait for each other unless they have one runAsUser"
            )
        return found

    def metrics(self) -> Iterator[Series]:
        """Pairs of the node; by GPU, of those that have a daemon, the daemon and its clients."""
        pairing, caps_hold = self._conditions.pairing, self._node.injector.caps_problem is None
        yield from pairs_collector("mps", pairing.stats, pairing.waiting, {"mps": caps_hold})
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
