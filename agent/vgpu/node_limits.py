"""The limits of this node's vGPU containers as one, and how a pod could get around them.

Until then nothing of them is on the host, and no task runs. Where containers were given limits before the
agent started they are begun at once: units that containers have grown by must be on no list. With
enforcement switched off they begin for these alone: no container gets new ones, but the kubelet repeats the
mounts of the old ones after a reboot, and the library refuses memory without the files. They go with their
containers.
"""

from collections.abc import Collection, Iterator
from posixpath import normpath
from typing import TYPE_CHECKING

from agent.kubelet.wire import Reason, Refused
from agent.model.demand import VGPU
from agent.model.pod import Pod, SecurityContext
from agent.settings import Settings
from agent.vgpu.library import IN_CONTAINER, PRELOAD_IN_CONTAINER

if TYPE_CHECKING:
    from agent.cluster.pods import PodCache


from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import structlog

from agent.cluster.reach import ClusterAccess
from agent.kubelet.wire import Allocation
from agent.lists.shared_pair import SharedPair
from agent.model.holding import PairMember
from agent.modes.wing import Node, Task
from agent.pairing.pair_rules import Grant
from agent.vgpu.compute import Compute, ComputeRequests, release, work_of
from agent.vgpu.contexts import context_bytes
from agent.vgpu.driver import DriverFence, DriverLimits
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
    from agent.cluster.pods import NamespaceLabels, PodCache


# How a pod could get around limits that stand in files which the agent mounts into its containers.
#
# Judged by its specification alone, as an admission policy would; reported, or refused by option. What root
# in an unprivileged container can do to itself is not among it (docs/vgpu.md): that cannot be seen from here.

# Each of them is enough to unmount, or to reach the host.
CAPABILITIES = frozenset({"ALL", "SYS_ADMIN", "SYS_MODULE", "SYS_RAWIO"})
MOST_NAMED = 4
LONGEST_NAME = 120
FILES = (PRELOAD_IN_CONTAINER, IN_CONTAINER)
# Beside the agent's own: from each of these a container can be made, or found, that no limit reaches.
FOLDERS = (
    "/etc/cdi",
    "/etc/containerd",
    "/etc/crio",
    "/etc/kubernetes",
    "/proc",
    "/run/containerd",
    "/run/crio",
    "/run/docker.sock",
    "/sys/fs/cgroup",
    "/var/lib/containerd",
    "/var/lib/containers",
)
UNKNOWN = "its specification cannot be read"


class Avoidance:
    """Looks at the pods of this node."""

    def __init__(self, settings: Settings, pods: "PodCache | None") -> None:
        """`pods`: those of the node; None: there is no way to the Kubernetes API."""
        self._pods = pods
        self._refuses = settings.vgpu.avoidable_limits == "refuse"
        host = settings.host
        kubelet = (settings.kubelet.root, settings.device_plugins_folder)
        self._folders = (*FOLDERS, host.state, host.run, host.cdi, *map(str, kubelet))

    async def ways(self, pod: Pod, container: str) -> tuple[str, ...]:
        """How a pod could get around its limits, each in words. Raises Refused where none may."""
        found = await self._found(pod)
        if found and self._refuses:
            raise Refused(
                f"container {container} could get around the limit of its memory ({'; '.join(found)}), which "
                "vgpu.avoidableLimits refuses: leave that out, or ask for whole GPUs",
                Reason.INVALID,
            )
        return found

    async def _found(self, pod: Pod) -> tuple[str, ...]:
        if self._pods is None:
            return (UNKNOWN,)
        from agent.cluster.api import ApiError  # noqa: PLC0415  loads the client, which is there by now

        try:
            found = await self._pods.get(pod.namespace, pod.name)
        except ApiError:
            found = None
        if found is None or found.metadata.uid != pod.uid:
            return (UNKNOWN,)
        return ways_around(found, VGPU.memory, FILES, self._folders)


def ways_around(pod: Pod, resource: str, files: Collection[str], folders: Collection[str]) -> tuple[str, ...]:
    """Each in words; empty: none is seen.

    `files` are where containers that ask for `resource` have their limits mounted, `folders` those of the
    host that nobody else may change. For the host any container of the pod counts: it is one tenant's.
    """
    found: list[str] = ["the pod has hostPID"] if pod.spec.host_pid else []
    containers = (*pod.spec.init_containers, *pod.spec.containers)
    for each in containers:
        found += [f"container {each.name} {why}" for why in _rights(each.security_context)]
    used = {mount.name for each in containers for mount in each.volume_mounts}
    for volume in pod.spec.volumes:
        if volume.host_path and volume.name in used and _meets(volume.host_path.path, folders):
            found.append(f"the pod mounts {volume.host_path.path[:LONGEST_NAME]} of the host")
    # A volume above a file is enough: another holder of it removes the file there, and the mount with it.
    found += [
        f"container {each.name} mounts a volume at {mount.mount_path[:LONGEST_NAME]}"
        for each in containers
        if resource in each.resources.limits
        for mount in each.volume_mounts
        if _meets(mount.mount_path, files)
    ]
    more = [f"and {len(found) - MOST_NAMED} more"] if len(found) > MOST_NAMED else []
    return tuple(found[:MOST_NAMED] + more)


def _rights(context: SecurityContext | None) -> Iterator[str]:
    if context is None:
        return
    if context.privileged:
        yield "is privileged"
    added = context.capabilities.add if context.capabilities else []
    # Runtimes take both spellings.
    for name in sorted({each.upper().removeprefix("CAP_") for each in added} & CAPABILITIES):
        yield f"has the capability {name}"


def _meets(path: str, others: Collection[str]) -> bool:
    """Whether a path is one of `others`, lies below one, or one below it."""
    mine = _plain(path)
    return any(
        mine in ("/", other) or mine.startswith(f"{other}/") or other.startswith(f"{mine}/")
        for other in map(_plain, others)
    )


def _plain(path: str) -> str:
    """Without dots and double slashes; /var/run is /run on the nodes of today."""
    plain = "/" + normpath(path).lstrip("/")
    return plain.removeprefix("/var") if plain == "/var/run" or plain.startswith("/var/run/") else plain


# The limits of this node's vGPU containers as one: begun when the first GPU is offered as vGPU.

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
    from agent.cluster.pods import NamespaceLabels  # noqa: PLC0415  loads the client

    return NamespaceLabels(cluster.api)


def _resize_annotations(pods: "PodCache") -> Mapping[str, str]:
    found = {uid: pod.metadata.annotations.get(RESIZE) for uid, pod in pods.pods().items()}
    return {uid: text for uid, text in found.items() if text is not None}


def _given_before(state: Path, run: Path) -> bool:
    return any((state / "limits").glob("*.json")) or any(any(each.glob("*")) for each in roots(run).values())
