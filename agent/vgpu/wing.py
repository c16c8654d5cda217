"""The wing of vGPU: fractions of a GPU, with limits where they are enforced."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Self

import anyio
import anyio.to_thread
import structlog

from agent.cluster.pods import NamespaceLabels, PodCache
from agent.injection.inject import Injector
from agent.inventory.snapshot import Snapshot
from agent.kit.tasks import Cell
from agent.kubelet.wire import Allocation, Reason, Refused, ResourcePlugin
from agent.lists.shared_pair import SharedPair, SharedPairPlugin, Sharing, pairing_of, pairs_collector
from agent.model.cuda import hooked, vgpu_warning
from agent.model.gpu import Driver, Gpu
from agent.model.holding import Growth, Holding, PairMember, by_gpu
from agent.model.holding import Place as PlaceOfContainer
from agent.model.look import Look
from agent.model.modes import Mode
from agent.model.placement import RESIZE
from agent.model.pod import VGPU
from agent.modes.wing import Document, Machine, Node, Task, Wing
from agent.nvml.port import NvmlPort
from agent.pairing.pair_rules import Grant
from agent.settings import Settings
from agent.telemetry import definitions as d
from agent.telemetry.series import Series
from agent.vgpu import library
from agent.vgpu.avoidance import Avoidance
from agent.vgpu.compute import Compute, ComputeRequests, release, work_of
from agent.vgpu.driver import DriverFence, DriverLimits
from agent.vgpu.events import LimitEvents
from agent.vgpu.folders import FOLDER, About, LimitFolders, Place, roots
from agent.vgpu.isolation_errors import IsolationError
from agent.vgpu.library import IMAGE_FILE
from agent.vgpu.limits import MEMORY_FILE, Enforcement, NamespaceEnforcement, context_bytes
from agent.vgpu.publishing import Publisher
from agent.vgpu.resize import FreeUnits, Resizer
from agent.vgpu.room import Isolation
from agent.vgpu.watch import LimitWatch, round_of

# The limits of this node's vGPU containers as one: begun when the first GPU is offered as vGPU.
#
# Until then nothing of them is on the host, and no task runs. Where containers were given limits before the
# agent started they are begun at once: units that containers have grown by must be on no list. With
# enforcement switched off they begin for these alone: no container gets new ones, but the kubelet repeats the
# mounts of the old ones after a reboot, and the library refuses memory without the files. They go with their
# containers.

log = structlog.get_logger()

# Beginning reads some small files; a disk that hangs would keep Allocate, and a stop, waiting.
BEGIN_SECONDS = 15.0


class NodeLimits:
    """Complete from the start; `begin` puts them in force."""

    def __init__(self, node: Node) -> None:
        settings, host = node.settings, node.settings.host
        self._node = node
        self.enforcement = Enforcement(settings.vgpu.enforcement)
        self.begun = False
        self._turn = anyio.Lock()
        self._pods = node.cluster.pods if node.cluster else None
        self._labels = NamespaceLabels(node.cluster.api) if node.cluster else None
        self._namespaces = NamespaceEnforcement(self._labels)
        compute = settings.vgpu.compute
        self.isolation = Isolation(
            LimitFolders(Path(host.run)),
            Path(settings.vgpu.library or IMAGE_FILE),
            Path(host.state),
            self.enforcement,
            node.holdings.cell,
            self._namespaces.of,
            compute=compute != "off",
            expected=self._expected_context,
            read=lambda: node.holdings.published,
        )
        requests = ComputeRequests(self._pods, may_burst=settings.vgpu.resize)
        self._compute = (
            Compute(self.isolation, requests.of, soft=compute == "soft") if compute != "off" else None
        )
        self._events = LimitEvents(self.isolation, node.recorder)
        ends = settings.vgpu.above_cap == "end"
        self._watch = LimitWatch(self.isolation, self._events, Path(host.proc), ends, self._container_ids)
        self.publisher = Publisher(
            self.isolation, self._events, self._watch, self._compute.shares if self._compute else None
        )
        self._driver = DriverFence(host, node.snapshot, node.injector)
        self._avoidance = Avoidance(settings, self._pods)

    async def given_before(self) -> bool:
        """Whether containers were given limits that may still run."""
        host = self._node.settings.host
        return await anyio.to_thread.run_sync(_given_before, Path(host.state), Path(host.run))

    async def begin(self) -> None:
        """Put the limits in force, if they are not yet. An Allocate that is cut off does not stop it.

        Raises TimeoutError, and what beginning raises: the next call does it again.
        """
        if self.begun:
            return
        async with self._turn:
            if not self.begun:
                with anyio.move_on_after(BEGIN_SECONDS, shield=True):
                    await self._begin()
            if not self.begun:
                raise TimeoutError(
                    f"the limits of vGPU containers were not there within {BEGIN_SECONDS:g} s; look whether "
                    "the folders host.state and host.run answer"
                )

    async def _begin(self) -> None:
        await self.isolation.start()
        if self.enforcement is not Enforcement.OFF:
            await self._begin_compute()
            await self._driver.start()
            self.publisher.take_up()
        self.begun = True

    def tasks(self, shares: SharedPair) -> list[Task]:
        """The tasks that keep limits in force once they have begun."""
        node, settings = self._node, self._node.settings.vgpu
        found = [
            Task("limits", self.isolation.run),
            Task("grown units", partial(self._follow_growth, shares)),
        ]
        if self.enforcement is Enforcement.OFF:
            return found
        if self._labels:
            found.append(Task("namespace watch", self._labels.reflector.run))
        if self._compute:
            found.append(Task("compute shares", self._compute.run))
        found += [
            Task("limit sweep", self._sweep),
            Task("limits published", self.publisher.run),
            Task("driver fence", partial(self._driver.run, node.injector.looked)),
        ]
        if self._pods:
            changes, cgroups = self._pods.reflector.items, Path(node.settings.host.cgroups)
            limits = DriverLimits(
                self.isolation, (node.nvml, node.calls), cgroups, self._container_ids, self._events
            )
            found.append(Task("driver limits", partial(limits.run, changes)))
            if settings.resize:
                resizer = Resizer(self.isolation, FreeUnits(shares), self._events, self._watch)
                requests = partial(_resize_annotations, self._pods)
                found.append(Task("resizes", partial(resizer.run, changes, requests)))
        elif settings.resize:
            log.warning("resize_unavailable", problem="without the Kubernetes API nobody can ask for it")
        return found

    async def _begin_compute(self) -> None:
        if self._compute is None:
            await anyio.to_thread.run_sync(release, self.isolation, abandon_on_cancel=True)
        elif not self.enforcement.enforces:
            log.warning(
                "compute_not_enforced",
                problem="shares of compute are kept by the enforcement library, which containers do not get",
                remedy="set vgpu.enforcement to library or strict",
            )

    async def additions(self, member: PairMember, grant: Grant) -> Allocation:
        """Files and devices of a container's limits, beside the answer for its memory. Raises Refused.

        Whole GPUs need no fence: nobody else is on them.
        """
        if member is not PairMember.MEMORY or grant.demand.whole:
            return Allocation()
        await self._namespaces.known()
        ways: tuple[str, ...] = ()
        if self.isolation.policy(grant.pod.namespace).enforces:
            ways = await self._avoidance.ways(grant.pod, grant.container)
        request = About(
            grant.pod.uid,
            grant.pod.namespace,
            grant.pod.name,
            grant.container,
            grant.gpus[0],
            tuple(sorted(grant.ids)),
            len(grant.ids) * VGPU.block_bytes,
            grant.demand.cores,
            avoidable=ways,
            driver=self._driver.obstacle(grant.gpus[0]) is None,
        )
        try:
            return await self.isolation.admit(request)
        except IsolationError as error:
            text = f"the memory of container {grant.container} cannot be capped: {error}"
            raise Refused(text, Reason.UNAVAILABLE) from error

    @property
    def problem(self) -> str | None:
        """Why containers start without the library, though they should have it; None: they have it."""
        return self.isolation.libraries.problem if self.begun and self.enforcement.enforces else None

    def fences(self) -> Mapping[str, bool]:
        """Which fences new containers get."""
        library = self.enforcement.enforces and self.isolation.libraries.problem is None
        driver = self.enforcement.enforces and self._driver.holds
        return {"driver": driver, "library": library, "sweep": self.publisher.sweeps}

    def enforced(self) -> str:
        """Whether containers are kept to their shares, see agent.status.report."""
        return word_of(self.fences(), computes=self._compute is not None)

    async def _sweep(self) -> None:
        """Have each round of samples looked at, for ever."""
        async for now in self._node.uses.values():
            if self._compute:
                self._compute.measured(work_of(now))
            await self._watch.look(round_of(now))

    async def _follow_growth(self, shares: SharedPair) -> None:
        """Keep units that containers have grown by out of the pools until these are gone, for ever."""
        async for _ in self.isolation.containers.values():
            shares.restock()
            grown = self.isolation.growth()
            if grown != self._node.grown.value:
                self._node.grown.publish(grown)

    def _expected_context(self, gpu: str) -> int:
        state = self._node.snapshot.value.by_uuid.get(gpu)
        return context_bytes(state.gpu.product) if state else 0

    def _container_ids(self, about: About) -> list[str]:
        """The runtime's ID of a container, by its pod's status."""
        pod = self._pods.pods().get(about.uid) if self._pods else None
        return [each for each, name in pod.container_names.items() if name == about.container] if pod else []


def word_of(fences: Mapping[str, bool], *, computes: bool) -> str:
    """The word of agent.status.report for these fences; `computes`: the library enforces compute, too."""
    if computes and fences["library"]:
        return "yes"
    return "memory" if fences["driver"] or fences["library"] else "no"


def _resize_annotations(pods: PodCache) -> Mapping[str, str]:
    found = {uid: pod.metadata.annotations.get(RESIZE) for uid, pod in pods.pods().items()}
    return {uid: text for uid, text in found.items() if text is not None}


def _given_before(state: Path, run: Path) -> bool:
    return any((state / "limits").glob("*.json")) or any(any(each.glob("*")) for each in roots(run).values())


# vGPU: fractions of a GPU as `tencent.com/vcuda-core` and `tencent.com/vcuda-memory`.


class VgpuPlugin(SharedPairPlugin):
    def __init__(
        self,
        shares: SharedPair,
        member: PairMember,
        injector: Injector,
        inventory: Cell[Snapshot],
        enforcement: str = "off",
        library: str | None = None,
    ) -> None:
        """`enforcement`: the node's policy. `library`: that of `vgpu.library`, None: the agent's own."""
        self._hooked = hooked(enforcement, library)
        self._snapshot = inventory
        self._enforcement = enforcement
        super().__init__(shares, member, injector)

    async def run(self) -> None:
        """Keep the list true; the core member logs what is to be known of the mode."""
        async with anyio.create_task_group() as group:
            group.start_soon(super().run)
            if self._member is PairMember.CORE:
                log.info("vgpu_in_use", enforcement=self._enforcement)
                if self._hooked:
                    group.start_soon(self._warn)

    async def _warn(self) -> None:
        known: Driver | None = None
        async for snapshot in self._snapshot.values():
            if snapshot.driver != known:
                known = snapshot.driver
                if warning := vgpu_warning(known):
                    log.warning("cuda_baseline", problem=warning)


class VgpuSharing(Sharing):
    """Limits of containers, and units that they have grown by."""

    def __init__(self, limits: NodeLimits, *, trim: bool) -> None:
        super().__init__(VGPU, Mode.VGPU, trim=trim)
        self._limits = limits

    def grown(self, uuid: str) -> frozenset[str]:
        return self._limits.isolation.grown.get(uuid, frozenset())

    async def additions(
        self,
        member: PairMember,
        grant: Grant,
        gpus: Sequence[Gpu],  # noqa: ARG002
    ) -> Allocation:
        """Raises Refused, and what beginning of the limits raises."""
        if self._limits.enforcement is Enforcement.OFF:
            return Allocation()
        try:
            await self._limits.begin()
        except TimeoutError as error:
            text = f"the memory of container {grant.container} cannot be capped: {error}"
            raise Refused(text, Reason.UNAVAILABLE) from error
        return await self._limits.additions(member, grant)


def build(node: Node, limits: NodeLimits) -> tuple[SharedPair, list[VgpuPlugin]]:
    """Both resources."""
    settings, inventory = node.settings, node.snapshot
    configured = settings.vgpu
    pairing = pairing_of(node, VGPU, configured.placement, configured.reservation_seconds)
    sharing = VgpuSharing(limits, trim=not settings.cluster.extender)
    shares = SharedPair(sharing, inventory, node.assignment, pairing, node.holdings.cell)
    return shares, [
        VgpuPlugin(shares, member, node.injector, inventory, configured.enforcement, configured.library)
        for member in PairMember
    ]


class VgpuWing(Wing):
    mode: ClassVar[Mode] = Mode.VGPU

    def __init__(self, node: Node) -> None:
        self._node = node
        self.limits = NodeLimits(node)
        self._shares, self._plugins = build(node, self.limits)

    @classmethod
    def checks(cls, settings: Settings, machine: Machine) -> Iterator[Look]:
        if not settings.modes.vgpu:
            return
        hooks = hooked(settings.vgpu.enforcement, settings.vgpu.library)
        if machine.gpus and hooks and (warning := vgpu_warning(machine.driver)):
            yield Look.warning("mode vgpu", warning)
        if Enforcement(settings.vgpu.enforcement).enforces:
            if problem := library.obstacle(machine.state):
                yield Look.failed("vGPU limits", problem)
            else:
                found = f"containers can load the enforcement library from below {machine.state}"
                yield Look.ok("vGPU limits", found)

    @classmethod
    async def leave(cls, settings: Settings, nvml: NvmlPort) -> None:
        """Nothing of it runs without the agent, and all of its files are among `needed_by_holders`."""

    @classmethod
    def needed_by_holders(cls, settings: Settings) -> Sequence[Path]:
        """Limits, their copies, the library, and the CDI devices by which the driver limits memory."""
        host = settings.host
        state = Path(host.state)
        limits = (state / FOLDER, *roots(Path(host.run)).values())
        return (state / library.LIBRARY_FOLDER, *limits, Path(host.cdi) / MEMORY_FILE)

    @classmethod
    async def build(cls, node: Node) -> Self:
        """Limits begin at once where containers have some already; see `agent.vgpu.wing`."""
        made = cls(node)
        if await made.limits.given_before():
            await made.limits.begin()
        return made

    def tasks(self) -> Sequence[Task]:
        """Those of limits, where they have begun; else one that waits for the first GPU that is offered.

        That one is there even where vGPU is not allowed: a reload may allow it.
        """
        if self.limits.begun:
            return self.limits.tasks(self._shares)
        off = self.limits.enforcement is Enforcement.OFF
        return () if off else (Task("vgpu limits", self._limit_when_offered),)

    async def _limit_when_offered(self) -> None:
        await self._node.assignment.wait_for(lambda _: self._node.offers(self.mode))
        await self.limits.begin()
        async with anyio.create_task_group() as group:
            for task in self.limits.tasks(self._shares):
                group.start_soon(self._node.supervisor.restarting, task.name, task.run)

    def plugins(self) -> Sequence[ResourcePlugin]:
        return self._plugins

    def enforced(self) -> str:
        return self.limits.enforced()

    def holder_facts(self, holding: Holding, uuid: str) -> Document:
        if self.limits.enforcement is Enforcement.OFF or holding.resource != VGPU.memory:
            return {}
        place = Place(holding.namespace, holding.pod, holding.container, uuid)
        return {"limits": self.limits.publisher.document(place)}

    def allotted(self) -> Mapping[PlaceOfContainer, float]:
        shares = self.limits.publisher.shares()
        return {place: share.allotted / 100 for place, share in shares.items()}

    def remarks(self) -> Sequence[str]:
        problem = self.limits.problem
        if problem and self._node.offers(self.mode):
            return [f"vGPU containers start without the enforcement library: {problem}"]
        return ()

    def metrics(self) -> Iterator[Series]:
        pairing = self._shares.pairing
        yield from pairs_collector(self.mode.value, pairing.stats, pairing.waiting, self.limits.fences())
        if self.limits.begun and self.limits.enforcement is not Enforcement.OFF:
            yield from self.limits.publisher.metrics()
            grown = by_gpu(self._node.grown.value)
            for state in self._node.snapshot.value.gpus:
                if self._node.assignment.value.of(state.uuid).mode is self.mode:
                    growth = grown.get(state.uuid, Growth())
                    yield d.GROWN_MEMORY, growth.memory_bytes, (state.uuid, str(state.gpu.index))
