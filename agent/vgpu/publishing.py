"""Which fences hold for each container: published as annotation and events of its pod, and in `status`."""

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, Protocol

import structlog

from agent.kit.cell import Cell
from agent.model.demand import VGPU, Pod
from agent.vgpu.compute import Share
from agent.vgpu.folders import About, key_of
from agent.vgpu.layout import Usage
from agent.vgpu.limits import ContainerLimits, Policy
from agent.vgpu.room import Isolation
from agent.vgpu.watch import LimitWatch, Place, place_of

log = structlog.get_logger()

ANNOTATION = "gpu-node-agent.io/limits"
# Until the kubelet's record shows a container nobody measures it; after so long it is published without.
PATIENCE_SECONDS = 10.0
MIB = 1 << 20
UNVERIFIED = "the library is given; whether processes load it is seen once they use the GPU"


class Fence(Enum):
    DRIVER = "driver"  # it refuses what is above the cap
    LIBRARY = "library"  # so does the library in the container, for every call that it knows
    SWEEP = "sweep"  # containers above their cap are reported


class Owners(Protocol):
    """The owners of pods; nothing here waits."""

    def annotate(self, pod: Pod, annotations: Mapping[str, str]) -> None:
        """Annotations of the pod are to be these."""

    def event(self, pod: Pod, reason: str, message: str, *, warning: bool) -> None:
        """Something happened to the pod."""


class Publisher:
    """Publishes to owners, and answers what holds for a container."""

    def __init__(
        self, isolation: Isolation, owners: Owners, shares: Cell[Mapping[str, Share]] | None = None
    ) -> None:
        """`shares`: how containers stand that are held to compute."""
        self._isolation = isolation
        self._shares = shares
        self._owners = owners
        self._watch: LimitWatch | None = None
        self._written: dict[str, str] = {}  # by UID of the pod
        self.ends = {"ended": 0, "failed": 0}  # containers above their caps that were to be ended
        self._refusing: set[str] = set()  # folders whose containers keep the agent from them
        self._bypassed: set[str] = set()  # folders whose containers have what the library cannot count
        # Folders with an event already; those of an earlier agent have one.
        self._announced = set(isolation.containers.value)

    async def follow(self, watch: LimitWatch) -> None:
        """Publish after each round, for ever."""
        self._watch = watch
        async for _ in watch.seen.values():
            self.publish()

    def publish(self) -> None:
        pods: dict[str, dict[str, Any]] = {}
        known = self._isolation.containers.value
        for key, limits in known.items():
            fences = self._fences(place_of(limits.about), limits)
            if Fence.SWEEP not in fences and self._isolation.age(key) < PATIENCE_SECONDS:
                continue
            entry = {"memoryBytes": limits.memory_bytes, "fences": [each.value for each in fences]}
            pods.setdefault(limits.about.uid, {})[limits.about.container] = entry
            if key not in self._announced:
                self._announced.add(key)
                self._announce(limits, fences)
        self._announced &= known.keys()
        for key in self._isolation.refusing.keys() - self._refusing:
            self._refused(known.get(key), self._isolation.refusing[key])
        self._refusing = set(self._isolation.refusing)
        self._bypassed &= known.keys()
        for key, usage in self._isolation.counted.items():
            if usage.newer and key in known and key not in self._bypassed and not _is_strict(known[key]):
                self._bypassed.add(key)
                self._newer(known[key].about, usage.newer_name)
        abouts = {limits.about.uid: limits.about for limits in known.values()}
        for uid, entries in pods.items():
            text = json.dumps(entries, sort_keys=True, separators=(",", ":"))
            if self._written.get(uid) != text:
                self._written[uid] = text
                self._owners.annotate(_pod(abouts[uid]), {ANNOTATION: text})
        self._written = {uid: text for uid, text in self._written.items() if uid in abouts}

    @property
    def sweeps(self) -> bool:
        """Whether the driver reports containers process by process; nobody knows while there are none."""
        return bool(self._watch and self._watch.seen.value.measured)

    # As agent.vgpu.limit_metrics.Limits

    def by_fence(self) -> Mapping[str, int]:
        """Containers by the fences that hold for them."""
        measured = self._watch.seen.value.measured if self._watch else {}
        known = self._isolation.containers.value.values()
        holding = [self._fences(place_of(each.about), each) for each in known]
        driver = sum(Fence.DRIVER in each for each in holding)
        # Given alone does not count: a process has been seen with it, and none without.
        library = sum(each.injected is True for each in known)
        return {Fence.DRIVER.value: driver, Fence.LIBRARY.value: library, Fence.SWEEP.value: len(measured)}

    def above_cap(self) -> int:
        """Containers that use more than they may."""
        return len(self._watch.seen.value.above) if self._watch else 0

    def without_library(self) -> int:
        """Containers of which a process uses the GPU without the library that they were given."""
        return sum(each.injected is False for each in self._isolation.containers.value.values())

    def counted(self) -> Mapping[Place, Usage]:
        """The library's counts by container, which can write there itself."""
        known, counted = self._isolation.containers.value, self._isolation.counted
        return {place_of(known[key].about): usage for key, usage in counted.items() if key in known}

    def refusing(self) -> int:
        """Containers that keep the agent from the files of their limits."""
        return len(self._isolation.refusing)

    def grown(self) -> Mapping[str, int]:
        """Bytes that containers were resized to beyond what their pods asked for, by namespace."""
        found: dict[str, int] = {}
        for about in (each.about for each in self._isolation.containers.value.values()):
            if about.grown:
                size = len(about.grown) * VGPU.block_bytes
                found[about.namespace] = found.get(about.namespace, 0) + size
        return found

    def avoidable(self) -> int:
        """Containers whose pods could get around their limits, by their specifications."""
        return sum(bool(each.about.avoidable) for each in self._isolation.containers.value.values())

    def document(self, place: Place) -> dict[str, Any] | None:
        """The limits of a container for `status`; None: it has none, and nobody measures it."""
        limits = self._of(place)
        fences = self._fences(place, limits)
        if limits is None and not fences:
            return None
        seen = self._watch.seen.value if self._watch else None
        found = {
            "memoryBytes": limits.memory_bytes if limits else None,
            "admittedBytes": len(limits.about.ids) * VGPU.block_bytes if limits else None,
            "fences": [each.value for each in fences],
            "injected": limits.injected if limits else None,
            "avoidable": list(limits.about.avoidable) if limits else [],
            "aboveCap": bool(seen and place in seen.above),
        }
        compute = self._compute(limits) if limits else None
        return {**found, "compute": compute} if compute else found

    def _compute(self, limits: ContainerLimits) -> dict[str, Any] | None:
        share = self._shares.value.get(key_of(limits.about.ids)) if self._shares else None
        if share is None:
            return None
        return {
            "askedPercent": share.asked,
            "allottedPercent": share.allotted,
            "usedPercent": None if share.used is None else round(share.used, 1),
            "throttledSeconds": round(share.throttled_seconds, 3),
        }

    def shares(self) -> Mapping[Place, Share]:
        """How containers stand that are held to compute."""
        known = self._isolation.containers.value
        shares = self._shares.value if self._shares else {}
        return {place_of(known[key].about): share for key, share in shares.items() if key in known}

    def measured(self, place: Place) -> int:
        """The GPU memory of a container by the driver's word, in bytes; 0: not known."""
        return self._watch.seen.value.measured.get(place, 0) if self._watch else 0

    def resized(self, about: About, memory_bytes: int) -> None:
        """An event and a line in the log: a container has another cap than `about` says."""
        text = (
            f"container {about.container} may use {memory_bytes // MIB} MiB of GPU {about.gpu} from now on, "
            f"{about.memory_bytes // MIB} MiB before; it was admitted with {len(about.ids)} units"
        )
        pod = f"{about.namespace}/{about.pod}"
        log.info("limits_resized", pod=pod, container=about.container, memory_bytes=memory_bytes)
        self._owners.event(_pod(about), "LimitsResized", text, warning=False)

    def cores_resized(self, about: About, cores: int) -> None:
        """An event and a line in the log: a container is promised other cores than `about` says."""
        text = (
            f"container {about.container} is held to {cores} % of GPU {about.gpu} from now on, "
            f"{about.cores_now} % before; it was admitted with {about.cores}"
        )
        log.info(
            "cores_resized", pod=f"{about.namespace}/{about.pod}", container=about.container, cores=cores
        )
        self._owners.event(_pod(about), "LimitsResized", text, warning=False)

    def not_resized(self, about: About, problem: str) -> None:
        log.info("resize_refused", pod=f"{about.namespace}/{about.pod}", problem=problem)
        self._owners.event(_pod(about), "ResizeRefused", problem, warning=True)

    # As agent.vgpu.watch.Report

    def exceeded(self, place: Place, memory_bytes: int, cap_bytes: int) -> None:
        namespace, name, container, gpu = place
        text = (
            f"container {container} uses {memory_bytes // MIB} MiB of GPU {gpu}, and may use "
            f"{cap_bytes // MIB} MiB: others of the GPU may run out of memory; restart the pod with more "
            "tencent.com/vcuda-memory, or without what allocates past the enforcement library"
        )
        log.warning("memory_cap_exceeded", pod=f"{namespace}/{name}", container=container, gpu=gpu)
        limits = self._of(place)
        pod = Pod(namespace, name, (), limits.about.uid if limits else "")
        self._owners.event(pod, "MemoryCapExceeded", text, warning=True)

    def ended(self, place: Place, memory_bytes: int, cap_bytes: int, problem: str | None) -> None:
        namespace, name, container, gpu = place
        used = f"uses {memory_bytes // MIB} MiB of GPU {gpu}, and may use {cap_bytes // MIB} MiB"
        pod = Pod(namespace, name, (), limits.about.uid if (limits := self._of(place)) else "")
        self._ended("container_above_cap_ended", pod, container, used, problem)

    def ended_refusing(self, about: About, refusal: str, problem: str | None) -> None:
        kept = f"keeps the agent from the files of its limits ({refusal})"
        self._ended("container_refusing_ended", _pod(about), about.container, kept, problem)

    def _ended(self, event: str, pod: Pod, container: str, cause: str, problem: str | None) -> None:
        self.ends["failed" if problem else "ended"] += 1
        outcome = f"it could not be ended: {problem}" if problem else "it was ended (vgpu.aboveCap)"
        log.warning(event, pod=f"{pod.namespace}/{pod.name}", container=container, problem=problem)
        reason = "ContainerNotEnded" if problem else "ContainerEnded"
        self._owners.event(pod, reason, f"container {container} {cause}: {outcome}", warning=True)

    def not_loaded(self, about: About) -> None:
        text = (
            f"a process of container {about.container} uses GPU {about.gpu} without the enforcement library: "
            "it is a static program, has another C library than glibc, or a loader of its own"
        )
        log.warning("library_not_loaded", pod=f"{about.namespace}/{about.pod}", container=about.container)
        self._owners.event(_pod(about), "LimitsNotLoaded", text, warning=True)

    # As agent.vgpu.driver.Report

    def not_limited(self, about: About, problem: str) -> None:
        text = f"the driver does not hold container {about.container} to its memory: {problem}"
        log.warning("driver_limit_missing", pod=f"{about.namespace}/{about.pod}", problem=problem)
        self._owners.event(_pod(about), "DriverLimitMissing", text, warning=True)

    def _announce(self, limits: ContainerLimits, fences: tuple[Fence, ...]) -> None:
        about = limits.about
        names = ", ".join(each.value for each in fences)
        text = (
            f"container {about.container} may use {limits.memory_bytes // MIB} MiB of GPU {about.gpu}, "
            f"enforced by: {names}"
        )
        if Fence.LIBRARY in fences and limits.injected is None:
            text += f" ({UNVERIFIED})"
        self._owners.event(_pod(about), "LimitsApplied", text, warning=False)
        if about.avoidable:
            pod, ways = f"{about.namespace}/{about.pod}", "; ".join(about.avoidable)
            log.warning("limits_avoidable", pod=pod, container=about.container, ways=ways)
            text = f"container {about.container} is not kept to its memory against its will: {ways}"
            self._owners.event(_pod(about), "LimitsAvoidable", text, warning=True)

    def _refused(self, limits: ContainerLimits | None, problem: str) -> None:
        if limits is None:
            return
        about = limits.about
        text = (
            f"container {about.container} keeps the agent from the files of its limits, so that these cannot "
            f"be changed: {problem}; end the pod if that lasts for more than a minute"
        )
        pod = f"{about.namespace}/{about.pod}"
        log.warning("limits_access_refused", pod=pod, container=about.container, problem=problem)
        self._owners.event(_pod(about), "LimitsAccessRefused", text, warning=True)

    def _newer(self, about: About, name: str) -> None:
        text = (
            f"container {about.container} uses {name or 'an entry point of the driver'}, which is newer than "
            "the enforcement library: what it does is not counted; bring the agent up to date and the pod up "
            "again, or set vgpu.enforcement to strict, which refuses such entry points"
        )
        pod = f"{about.namespace}/{about.pod}"
        log.warning("limits_bypassed", pod=pod, container=about.container, entry_point=name)
        self._owners.event(_pod(about), "LimitsBypassed", text, warning=True)

    def _of(self, place: Place) -> ContainerLimits | None:
        known = self._isolation.containers.value.values()
        return next((each for each in known if place_of(each.about) == place), None)

    def _fences(self, place: Place, limits: ContainerLimits | None) -> tuple[Fence, ...]:
        found = []
        if limits and limits.about.driver and limits.limited is not False:
            found.append(Fence.DRIVER)
        if limits and limits.about.build and limits.injected is not False:
            found.append(Fence.LIBRARY)
        if self._watch and place in self._watch.seen.value.measured:
            found.append(Fence.SWEEP)
        return tuple(found)


def _is_strict(limits: ContainerLimits) -> bool:
    return limits.about.policy == Policy.STRICT.value


def _pod(about: About) -> Pod:
    return Pod(about.namespace, about.pod, (), about.uid)
