"""Builds the limits of vGPU containers. Imported only where vGPUs are offered with limits, or were before."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from anyio.abc import TaskGroup

from agent.app.agent import Agent
from agent.app.avoidance import Avoidance
from agent.app.build_compute import build_compute, percents_of
from agent.app.driver_fence import DriverFence
from agent.cdi import memory_limits
from agent.isolation.compute import Compute
from agent.isolation.driver import DriverLimits
from agent.isolation.errors import IsolationError
from agent.isolation.folders import About, LimitFolders
from agent.isolation.library import IMAGE_FILE
from agent.isolation.limits import Policy, Request
from agent.isolation.publishing import Publisher
from agent.isolation.resize import ANNOTATION as RESIZE
from agent.isolation.resize import NoUnits, Resizer
from agent.isolation.room import Isolation
from agent.isolation.watch import LimitWatch, Measured, Place
from agent.kit.cell import Cell
from agent.kubelet.plugin_types import Allocation, Reason, Refused
from agent.model.demand import VGPU
from agent.model.ledger import PairMember
from agent.model.modes import Mode
from agent.nvml.port import NvmlPort
from agent.pairing.ports import PairRefused, Recorder
from agent.pairing.reducer import Grant
from agent.plugins.inject import Injector
from agent.plugins.shared_pair import SharedPair
from agent.telemetry.attribution import Grade
from agent.telemetry.container_use import Uses
from agent.telemetry.limit_metrics import limits_collector

if TYPE_CHECKING:
    from agent.cluster.pods import PodCache

log = structlog.get_logger()


class LimitParts:
    """The limits as the rest of the agent sees them."""

    def __init__(
        self,
        isolation: Isolation,
        publisher: Publisher,
        policy: Policy,
        driver: DriverFence,
        avoidance: Avoidance,
        *,
        computes: bool,
    ) -> None:
        self.isolation = isolation
        self.fence = VgpuFence(isolation, driver, avoidance)
        self._driver = driver
        self._publisher = publisher
        self._policy = policy
        self.computes = computes

    def allotted(self) -> Mapping[Place, float]:
        """See agent.app.agent.Limits."""
        return {place: share.allotted / 100 for place, share in self._publisher.shares().items()}

    @property
    def problem(self) -> str | None:
        """Why containers start without the library, though they should have it; None: they have it."""
        return self.isolation.problem if self._policy.enforces else None

    def fences(self) -> Mapping[str, bool]:
        """Which fences hold for containers that start now."""
        library = self._policy.enforces and self.isolation.problem is None
        driver = self._policy.enforces and self._driver.holds
        return {"driver": driver, "library": library, "sweep": self._publisher.sweeps}

    def units_grown(self, uuid: str) -> frozenset[str]:
        """See agent.app.agent.Limits."""
        return self.isolation.grown.get(uuid, frozenset())

    def follow_resizes(self, agent: Agent, shares: SharedPair, group: TaskGroup) -> None:
        """See agent.app.agent.Limits."""
        spawn = agent.supervisor.restarting
        group.start_soon(spawn, "grown units", _follow_growth, agent, self.isolation, shares)
        if not agent.settings.vgpu.resize:
            return
        if agent.cluster is None:
            log.warning("resize_unavailable", problem="without the Kubernetes API nobody can ask for it")
            return
        pods = agent.cluster.pods
        resizer = Resizer(self.isolation, GpuUnits(shares), self._publisher)
        group.start_soon(
            spawn, "resizes", resizer.run, pods.reflector.items, partial(_resize_annotations, pods)
        )

    def document(self, namespace: str, pod: str, container: str, gpu: str) -> Mapping[str, Any] | None:
        """The limits of a container, for `status`; None: it has none, and is not measured."""
        return self._publisher.document((namespace, pod, container, gpu))


async def build_isolation(
    agent: Agent, nvml: NvmlPort, injector: Injector, group: TaskGroup, recorder: Recorder | None
) -> LimitParts:
    """Build the room, find what containers that run have, and start its tasks."""
    settings, spawn = agent.settings, agent.supervisor.restarting
    policy = Policy(settings.vgpu.enforcement)
    isolation = Isolation(
        LimitFolders(Path(settings.host.run)),
        Path(settings.vgpu.library or IMAGE_FILE),
        Path(settings.host.state),
        policy,
        agent.holdings.cell,
        _namespaces(agent, group),
        compute=settings.vgpu.compute != "off",
    )
    await isolation.start()
    compute = await build_compute(agent, isolation, group)
    publisher = Publisher(isolation, recorder or Recorder(), compute.shares if compute else None)
    group.start_soon(spawn, "limits", isolation.run)
    if agent.sources and agent.sources.uses:
        ends = settings.vgpu.above_cap == "end"
        watch = LimitWatch(isolation, publisher, Path(settings.host.proc), ends)
        group.start_soon(spawn, "limit sweep", _sweep, agent.sources.uses, watch, compute)
        group.start_soon(spawn, "limits published", publisher.follow, watch)
    agent.collectors.append(limits_collector(publisher, agent.grown, partial(_vgpu_indices, agent)))
    driver = DriverFence(agent, injector)
    await driver.start()
    group.start_soon(spawn, "driver fence", driver.run, injector.looked)
    if agent.cluster:
        pods = agent.cluster.pods
        cgroups = Path(settings.host.cgroups)
        limits = DriverLimits(
            isolation, (nvml, agent.calls), cgroups, partial(_container_ids, pods), publisher
        )
        group.start_soon(spawn, "driver limits", limits.run, pods.reflector.items)
    return LimitParts(isolation, publisher, policy, driver, Avoidance(agent), computes=compute is not None)


class KeptLimits:
    """Limits that were given before: no container gets new ones."""

    def __init__(self, isolation: Isolation) -> None:
        self._isolation = isolation

    def units_grown(self, uuid: str) -> frozenset[str]:
        """See agent.app.agent.Limits."""
        return self._isolation.grown.get(uuid, frozenset())

    def follow_resizes(self, agent: Agent, shares: SharedPair, group: TaskGroup) -> None:
        """Keep units that containers have grown by out of the pools until these are gone."""
        group.start_soon(
            agent.supervisor.restarting, "grown units", _follow_growth, agent, self._isolation, shares
        )


async def keep_limits(agent: Agent, group: TaskGroup) -> KeptLimits:
    """Have the folders of containers that were given limits before enforcement was switched off.

    The kubelet repeats their mounts after a reboot, and the library refuses memory without the files.
    They go with their containers, and the room is not built any more at the next start.
    """
    settings = agent.settings
    folders = LimitFolders(Path(settings.host.run))
    source = Path(settings.vgpu.library or IMAGE_FILE)
    isolation = Isolation(folders, source, Path(settings.host.state), Policy.OFF, agent.holdings.cell)
    await isolation.start()
    group.start_soon(agent.supervisor.restarting, "limits", isolation.run)
    return KeptLimits(isolation)


class VgpuFence:
    """Additions of a container's limits to the answer for its memory."""

    def __init__(self, isolation: Isolation, driver: DriverFence, avoidance: Avoidance) -> None:
        self._isolation = isolation
        self._driver = driver
        self._avoidance = avoidance

    async def __call__(self, member: PairMember, grant: Grant) -> Allocation:
        """See agent.plugins.shared_pair.Sharing. Whole GPUs need no fence: nobody else is on them."""
        if member is not PairMember.MEMORY or grant.demand.whole:
            return Allocation()
        ways: tuple[str, ...] = ()
        if self._isolation.policy(grant.pod.namespace).enforces:
            ways = await self._avoidance.ways(grant.pod, grant.container)
        request = Request(
            grant.pod.uid,
            grant.pod.namespace,
            grant.pod.name,
            grant.container,
            grant.gpus[0],
            tuple(sorted(grant.ids)),
            len(grant.ids) * VGPU.block_bytes,
            grant.demand.cores,
            self._driver.obstacle(grant.gpus[0]) is None,
            ways,
        )
        try:
            admission = await self._isolation.admit(request)
        except IsolationError as error:
            text = f"the memory of container {grant.container} cannot be capped: {error}"
            raise Refused(text, Reason.UNAVAILABLE) from error
        limit = (memory_limits.device(len(grant.ids)),) if admission.driver else ()
        return Allocation(mounts=admission.mounts, cdi_devices=limit)


def _vgpu_indices(agent: Agent) -> Mapping[str, int]:
    """Indices of the GPUs that are in mode vGPU now, by UUID."""
    switch = agent.switcher.state.value.gpus if agent.switcher else ()
    shared = {each.uuid for each in switch if each.active.mode is Mode.VGPU}
    return {each.uuid: each.gpu.index for each in agent.inventory.snapshot.value.gpus if each.uuid in shared}


class GpuUnits:
    """Free units of memory, as resizing needs them (`agent.isolation.resize.Units`)."""

    def __init__(self, shares: SharedPair) -> None:
        self._shares = shares

    async def take(self, gpu: str, count: int, keep: Callable[[tuple[str, ...]], Awaitable[None]]) -> None:
        """See agent.isolation.resize.Units. They leave the pool before another call is served."""

        async def kept(ids: tuple[str, ...]) -> None:
            try:
                await keep(ids)
            finally:
                self._shares.restock()

        try:
            await self._shares.pairing.set_aside(gpu, count, kept)
        except PairRefused as refusal:
            raise NoUnits(str(refusal)) from refusal

    def give_back(self) -> None:
        """See agent.isolation.resize.Units."""
        self._shares.restock()


async def _follow_growth(agent: Agent, isolation: Isolation, shares: SharedPair) -> None:
    """Units come back when their container is gone, too; for ever."""
    async for _ in isolation.containers.values():
        shares.restock()
        grown = {gpu: len(ids) * VGPU.block_bytes for gpu, ids in isolation.grown.items()}
        if grown != agent.grown.value:
            agent.grown.publish(grown)


def _container_ids(pods: "PodCache", about: About) -> list[str]:
    """The runtime's ID of a container, by its pod's status."""
    pod = pods.pods().get(about.uid)
    return [each for each, name in pod.container_names.items() if name == about.container] if pod else []


def _resize_annotations(pods: "PodCache") -> Mapping[str, str]:
    found = {uid: pod.metadata.annotations.get(RESIZE) for uid, pod in pods.pods().items()}
    return {uid: text for uid, text in found.items() if text is not None}


async def _sweep(uses: Cell[Uses], watch: LimitWatch, compute: Compute | None) -> None:
    """Have each round of samples looked at, for ever."""
    async for now in uses.values():
        if compute:
            compute.measured(percents_of(now))
        await watch.look(round_of(now))


def round_of(uses: Uses) -> list[Measured]:
    """The vGPU containers which the driver measures process by process."""
    return [
        Measured(
            (share.namespace, share.pod, share.container, share.gpu),
            share.memory_limit,
            each.use.memory,
            each.use.pids,
        )
        for each in uses.containers
        for share in (each.use.share,)
        if share.mode is Mode.VGPU and each.use.memory_grade is Grade.MEASURED
    ]


def _namespaces(agent: Agent, group: TaskGroup) -> Callable[[str], Policy | None]:
    """Settings of namespaces; without the API server none."""
    if agent.cluster is None:
        return lambda _: None
    from agent.cluster.namespaces import LABEL, NamespaceLabels  # noqa: PLC0415  loads the client

    labels = NamespaceLabels(agent.cluster.api)
    group.start_soon(agent.supervisor.restarting, "namespace watch", labels.run)
    reported: dict[str, str] = {}

    def of(namespace: str) -> Policy | None:
        value = labels.of(namespace)
        if value is None:
            return None
        try:
            return Policy(value)
        except ValueError:
            if reported.get(namespace) != value:
                reported[namespace] = value
                known = ", ".join(each.value for each in Policy)
                log.warning(
                    "namespace_label_ignored", namespace=namespace, label=LABEL, value=value, known=known
                )
            return None

    return of
