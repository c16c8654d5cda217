"""Builds the limits of vGPU containers. Imported only where vGPUs are offered with limits, or were before."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from agent.app.avoidance import Avoidance
from agent.app.build_compute import build_compute, work_of
from agent.app.driver_fence import DriverFence
from agent.app.mode_parts import ModeContext
from agent.app.parts import ClusterAccess, Tasks
from agent.cdi import memory_limits
from agent.inventory.snapshot import Snapshot
from agent.isolation.compute import Compute
from agent.isolation.context_table import context_bytes
from agent.isolation.driver import DriverLimits
from agent.isolation.folders import About, LimitFolders
from agent.isolation.isolation_errors import IsolationError
from agent.isolation.library import IMAGE_FILE
from agent.isolation.limits import Policy
from agent.isolation.publishing import Publisher
from agent.isolation.resize import ANNOTATION as RESIZE
from agent.isolation.resize import NoUnits, Resizer
from agent.isolation.room import Isolation
from agent.isolation.watch import LimitWatch, Measured, Place
from agent.kit.cell import Cell
from agent.kubelet.plugin_types import Allocation, Reason, Refused
from agent.kubelet.podresources import PodList
from agent.model.demand import VGPU
from agent.model.growth import Growth
from agent.model.ledger import PairMember
from agent.model.modes import Assignment, Mode
from agent.pairing.pair_rules import Grant
from agent.pairing.pod_access import PairRefused
from agent.plugins.shared_pair import SharedPair
from agent.settings import Settings
from agent.telemetry.attribution import Attribution
from agent.telemetry.container_use import Uses
from agent.telemetry.limit_metrics import limits_collector

if TYPE_CHECKING:
    from agent.cluster.namespaces import NamespaceLabels
    from agent.cluster.pods import PodCache

log = structlog.get_logger()


class KeptLimits:
    """Limits that were given before: no container gets new ones."""

    def __init__(self, isolation: Isolation) -> None:
        self.isolation = isolation

    def units_grown(self, uuid: str) -> frozenset[str]:
        """Units of a GPU that containers have grown by."""
        return self.isolation.grown.get(uuid, frozenset())

    def follow_resizes(self, context: ModeContext, shares: SharedPair) -> None:
        """Keep units that containers have grown by out of the pools until these are gone."""
        context.tasks.start("grown units", _follow_growth, self.isolation, shares, context.grown)


class LimitParts(KeptLimits):
    """The limits as the rest of the agent sees them."""

    def __init__(
        self,
        isolation: Isolation,
        publisher: Publisher,
        policy: Policy,
        driver: DriverFence,
        avoidance: Avoidance,
        labels: "NamespaceLabels | None",
        *,
        computes: bool,
    ) -> None:
        super().__init__(isolation)
        self.fence = VgpuFence(isolation, driver, avoidance, labels)
        self._driver = driver
        self._publisher = publisher
        self._policy = policy
        self.computes = computes

    def allotted(self) -> Mapping[Place, float]:
        return {place: share.allotted / 100 for place, share in self._publisher.shares().items()}

    @property
    def problem(self) -> str | None:
        return self.isolation.problem if self._policy.enforces else None

    def fences(self) -> Mapping[str, bool]:
        library = self._policy.enforces and self.isolation.problem is None
        driver = self._policy.enforces and self._driver.holds
        return {"driver": driver, "library": library, "sweep": self._publisher.sweeps}

    def follow_resizes(self, context: ModeContext, shares: SharedPair) -> None:
        """Beside that, resize containers where it is allowed."""
        super().follow_resizes(context, shares)
        if not context.core.settings.vgpu.resize:
            return
        if context.cluster is None:
            log.warning("resize_unavailable", problem="without the Kubernetes API nobody can ask for it")
            return
        pods = context.cluster.pods
        resizer = Resizer(self.isolation, GpuUnits(shares), self._publisher)
        context.tasks.start("resizes", resizer.run, pods.reflector.items, partial(_resize_annotations, pods))

    def document(self, namespace: str, pod: str, container: str, gpu: str) -> Mapping[str, Any] | None:
        return self._publisher.document((namespace, pod, container, gpu))


async def build_isolation(context: ModeContext) -> LimitParts:
    """Build the room, and find what containers that run have.

    Tasks start last, when nothing can fail any more: a failure leaves none behind for the next try.
    """
    core, tasks, cluster = context.core, context.tasks, context.cluster
    settings, snapshot = core.settings, core.inventory.snapshot
    pods = cluster.pods if cluster else None
    policy = Policy(settings.vgpu.enforcement)
    namespaces, labels = _namespaces(cluster)
    isolation = Isolation(
        LimitFolders(Path(settings.host.run)),
        Path(settings.vgpu.library or IMAGE_FILE),
        Path(settings.host.state),
        policy,
        core.holdings.cell,
        namespaces,
        compute=settings.vgpu.compute != "off",
        expected=partial(_expected_context, snapshot),
    )
    await isolation.start()
    compute = await build_compute(settings.vgpu, isolation, pods)
    publisher = Publisher(isolation, context.plugins.recorder, compute.shares if compute else None)
    ids = partial(_container_ids, pods)
    ends = settings.vgpu.above_cap == "end"
    watch = LimitWatch(isolation, publisher, Path(settings.host.proc), ends, ids)
    indices = partial(_vgpu_indices, snapshot, context.plugins.modes)
    driver = DriverFence(settings.host, snapshot, context.plugins.injector)
    await driver.start()
    avoidance = Avoidance(settings, pods)
    parts = LimitParts(isolation, publisher, policy, driver, avoidance, labels, computes=compute is not None)

    core.collectors.append(partial(limits_collector, publisher, context.grown, indices))
    if labels:
        tasks.start("namespace watch", labels.reflector.run)
    if compute:
        tasks.start("compute shares", compute.run)
    tasks.start("limits", isolation.run)
    tasks.start("limit sweep", _sweep, context.uses, watch, compute)
    tasks.start("limits published", publisher.follow, watch)
    tasks.start("driver fence", driver.run, context.plugins.injector.looked)
    if pods:
        calls, cgroups = (core.nvml, core.calls), Path(settings.host.cgroups)
        limits = DriverLimits(isolation, calls, cgroups, ids, publisher)
        tasks.start("driver limits", limits.run, pods.reflector.items)
    return parts


async def keep_limits(settings: Settings, held: Cell[PodList | None], tasks: Tasks) -> KeptLimits:
    """Have the folders of containers that were given limits before enforcement was switched off.

    The kubelet repeats their mounts after a reboot, and the library refuses memory without the files.
    They go with their containers, and the room is not built any more at the next start.
    """
    folders = LimitFolders(Path(settings.host.run))
    source = Path(settings.vgpu.library or IMAGE_FILE)
    isolation = Isolation(folders, source, Path(settings.host.state), Policy.OFF, held)
    await isolation.start()
    tasks.start("limits", isolation.run)
    return KeptLimits(isolation)


class VgpuFence:
    """Additions of a container's limits to the answer for its memory."""

    def __init__(
        self,
        isolation: Isolation,
        driver: DriverFence,
        avoidance: Avoidance,
        labels: "NamespaceLabels | None",
    ) -> None:
        """`labels`: those of namespaces; None: the API server is not used, so there are none."""
        self._labels = labels
        self._isolation = isolation
        self._driver = driver
        self._avoidance = avoidance

    async def __call__(self, member: PairMember, grant: Grant) -> Allocation:
        """See agent.plugins.shared_pair.Sharing. Whole GPUs need no fence: nobody else is on them."""
        if member is not PairMember.MEMORY or grant.demand.whole:
            return Allocation()
        if self._labels:
            await self._labels.known()
        ways: tuple[str, ...] = ()
        if self._isolation.policy(grant.pod.namespace).enforces:
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
            admission = await self._isolation.admit(request)
        except IsolationError as error:
            text = f"the memory of container {grant.container} cannot be capped: {error}"
            raise Refused(text, Reason.UNAVAILABLE) from error
        limit = (memory_limits.device(len(grant.ids)),) if admission.driver else ()
        return Allocation(mounts=admission.mounts, cdi_devices=limit)


def _expected_context(inventory: Cell[Snapshot], gpu: str) -> int:
    state = inventory.value.by_uuid.get(gpu)
    return context_bytes(state.gpu.product) if state else 0


def _vgpu_indices(inventory: Cell[Snapshot], assignment: Cell[Assignment]) -> Mapping[str, int]:
    """Indices of the GPUs that are in mode vGPU now, by UUID."""
    now = assignment.value
    return {each.uuid: each.gpu.index for each in inventory.value.gpus if now.of(each.uuid).mode is Mode.VGPU}


class GpuUnits:
    """Free units, as resizing needs them (`agent.isolation.resize.Units`)."""

    def __init__(self, shares: SharedPair) -> None:
        self._shares = shares

    async def take(
        self, gpu: str, member: PairMember, count: int, keep: Callable[[tuple[str, ...]], Awaitable[None]]
    ) -> None:
        """See agent.isolation.resize.Units. They leave the pool before another call is served."""

        async def kept(ids: tuple[str, ...]) -> None:
            try:
                await keep(ids)
            finally:
                self._shares.restock()

        try:
            await self._shares.pairing.set_aside(gpu, member, count, kept)
        except PairRefused as refusal:
            raise NoUnits(str(refusal)) from refusal

    def give_back(self) -> None:
        self._shares.restock()


async def _follow_growth(
    isolation: Isolation, shares: SharedPair, published: Cell[Mapping[str, Growth]]
) -> None:
    """Units come back when their container is gone, too; for ever."""
    async for _ in isolation.containers.values():
        shares.restock()
        grown = _growth(isolation)
        if grown != published.value:
            published.publish(grown)


def _growth(isolation: Isolation) -> Mapping[str, Growth]:
    found: dict[str, Growth] = {}
    for about in (each.about for each in isolation.containers.value.values()):
        if about.grown or about.grown_cores:
            before = found.get(about.gpu, Growth())
            found[about.gpu] = Growth(
                before.memory_bytes + len(about.grown) * VGPU.block_bytes,
                before.cores + len(about.grown_cores),
            )
    return found


def _container_ids(pods: "PodCache | None", about: About) -> list[str]:
    """The runtime's ID of a container, by its pod's status."""
    pod = pods.pods().get(about.uid) if pods else None
    return [each for each, name in pod.container_names.items() if name == about.container] if pod else []


def _resize_annotations(pods: "PodCache") -> Mapping[str, str]:
    found = {uid: pod.metadata.annotations.get(RESIZE) for uid, pod in pods.pods().items()}
    return {uid: text for uid, text in found.items() if text is not None}


async def _sweep(uses: Cell[Uses], watch: LimitWatch, compute: Compute | None) -> None:
    """Have each round of samples looked at, for ever."""
    async for now in uses.values():
        if compute:
            compute.measured(work_of(now))
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
        if share.mode is Mode.VGPU and each.use.memory_grade is Attribution.MEASURED
    ]


def _namespaces(
    cluster: ClusterAccess | None,
) -> tuple[Callable[[str], Policy | None], "NamespaceLabels | None"]:
    """Settings of namespaces, and the watch of them; without the API server none."""
    if cluster is None:
        return lambda _: None, None
    from agent.cluster.namespaces import LABEL, NamespaceLabels  # noqa: PLC0415  loads the client

    labels = NamespaceLabels(cluster.api)
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

    return of, labels
