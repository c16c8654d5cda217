"""The limits of this node's vGPU containers as one: begun when the first GPU is offered as vGPU.

Until then nothing of them is on the host, and no task runs. Where containers were given limits before the
agent started they are begun at once: units that containers have grown by must be on no list. With
enforcement switched off they begin for these alone: no container gets new ones, but the kubelet repeats the
mounts of the old ones after a reboot, and the library refuses memory without the files. They go with their
containers.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import structlog

from agent.cluster.reach import ClusterAccess
from agent.kubelet.plugin_types import Allocation, Reason, Refused
from agent.lists.shared_pair import SharedPair
from agent.model.demand import VGPU
from agent.model.ledger import PairMember
from agent.modes.wing import Node, Task
from agent.pairing.pair_rules import Grant
from agent.vgpu.avoiding import Avoidance
from agent.vgpu.compute import Compute, release, work_of
from agent.vgpu.compute_request import ComputeRequests
from agent.vgpu.contexts import context_bytes
from agent.vgpu.driver import DriverLimits
from agent.vgpu.driver_fence import DriverFence
from agent.vgpu.events import LimitEvents
from agent.vgpu.folders import About, LimitFolders, roots
from agent.vgpu.isolation_errors import IsolationError
from agent.vgpu.library import IMAGE_FILE
from agent.vgpu.limits import Enforcement, NamespaceEnforcement
from agent.vgpu.publishing import Publisher
from agent.vgpu.resize import ANNOTATION as RESIZE
from agent.vgpu.resize import FreeUnits, Resizer
from agent.vgpu.room import Isolation
from agent.vgpu.watch import LimitWatch, round_of

if TYPE_CHECKING:
    from agent.cluster.namespaces import NamespaceLabels
    from agent.cluster.pods import PodCache

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
        self._labels = _labels_of(node.cluster) if node.cluster else None
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


def _labels_of(cluster: ClusterAccess) -> "NamespaceLabels":
    from agent.cluster.namespaces import NamespaceLabels  # noqa: PLC0415  loads the client

    return NamespaceLabels(cluster.api)


def _resize_annotations(pods: "PodCache") -> Mapping[str, str]:
    found = {uid: pod.metadata.annotations.get(RESIZE) for uid, pod in pods.pods().items()}
    return {uid: text for uid, text in found.items() if text is not None}


def _given_before(state: Path, run: Path) -> bool:
    return any((state / "limits").glob("*.json")) or any(any(each.glob("*")) for each in roots(run).values())
