"""Where the limits of containers differ from what is in force, and events for the owners of pods."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from agent.model.pod import Metadata, Pod
from agent.pairing.pairing import Recorder
from agent.vgpu.folders import About, Place
from agent.vgpu.layout import CountedUsage
from agent.vgpu.limits import ContainerLimits
from agent.vgpu.room import Isolation

# Containers whose memory by the library's count and by the driver's measure differ for a minute.
#
# Too much charged would have allocations refused that have room: so much is then forgiven, until both agree.

# Of the larger figure, and no less than this: contexts and code come in such sizes.
RATIO = 0.1
LEAST = 64 << 20
READINGS = 60  # in a row, a second apart
STEP = 2 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    charged_bytes: int
    measured_bytes: int
    forgiven_bytes: int

    @property
    def excess_bytes(self) -> int:
        """Bytes that are charged too much; below zero: too little."""
        return self.charged_bytes - self.measured_bytes


@dataclass(slots=True)
class _Episode:
    refused: int  # as it began
    readings: deque[int] = field(default_factory=lambda: deque(maxlen=READINGS))


class Differences:
    def __init__(self) -> None:
        self._open: dict[str, _Episode] = {}
        # Those that have lasted, by folder.
        self.lasting: dict[str, Difference] = {}

    def look(
        self,
        key: str,
        usage: CountedUsage,
        measured_bytes: int,
        cap_bytes: int,
        movable: Callable[[], int] | None,
    ) -> int:
        """Take in a reading; how many bytes of the charge do not count against the cap.

        Nothing is forgiven before something was refused, nor ever more than the cap: a container can write
        any count. Nor is what the driver may bring back from the host, `movable`; None: nothing at all is.
        """
        excess = usage.total_bytes - measured_bytes
        if abs(excess) <= max(LEAST, RATIO * max(usage.total_bytes, measured_bytes)):
            self.drop(key)
            return 0
        episode = self._open.get(key)
        if episode is None or (episode.readings[-1] > 0) is not (excess > 0):
            self.drop(key)
            episode = self._open[key] = _Episode(usage.refused)
        episode.readings.append(excess)
        if len(episode.readings) < READINGS:
            return 0
        forgiven = 0
        if movable is not None and excess > 0 and usage.refused > episode.refused:
            forgiven = max(0, min(cap_bytes, min(episode.readings) - movable())) // STEP * STEP
        self.lasting[key] = Difference(usage.total_bytes, measured_bytes, forgiven)
        return forgiven

    def drop(self, key: str) -> None:
        """Both figures of a container agree, or nobody is there."""
        self._open.pop(key, None)
        self.lasting.pop(key, None)


# Events of limits for the owners of pods, each with its line in the log.

log = structlog.get_logger()

MIB = 1 << 20


class LimitEvents:
    """Reports what happens to containers with limits; never waits."""

    def __init__(self, isolation: Isolation, owners: Recorder) -> None:
        self._isolation = isolation
        self._owners = owners
        self.ends = {"ended": 0, "failed": 0}  # containers above their caps that were to be ended

    def annotate(self, about: About, annotations: Mapping[str, str]) -> None:
        """The pod of a container is to have these annotations."""
        self._owners.annotate(about.owner, annotations)

    def applied(self, limits: ContainerLimits, fences: str) -> None:
        """`fences`: those that hold, in words."""
        about = limits.about
        text = (
            f"container {about.container} may use {limits.memory_bytes // MIB} MiB of GPU {about.gpu}, "
            f"enforced by: {fences}"
        )
        self._owners.event(about.owner, "LimitsApplied", text, warning=False)
        if about.avoidable:
            ways = "; ".join(about.avoidable)
            log.warning("limits_avoidable", pod=about.pod_key, container=about.container, ways=ways)
            text = f"container {about.container} is not kept to its memory against its will: {ways}"
            self._owners.event(about.owner, "LimitsAvoidable", text)

    def access_refused(self, about: About, problem: str) -> None:
        """A container keeps the agent from the files of its limits."""
        text = (
            f"container {about.container} keeps the agent from the files of its limits, so that these cannot "
            f"be changed: {problem}; end the pod if that lasts for more than a minute"
        )
        log.warning("limits_access_refused", pod=about.pod_key, container=about.container, problem=problem)
        self._owners.event(about.owner, "LimitsAccessRefused", text)

    def bypassed(self, about: About, name: str) -> None:
        """A container uses an entry point of this name that the library cannot count; empty: not known."""
        text = (
            f"container {about.container} uses {name or 'an entry point of the driver'}, which is newer than "
            "the enforcement library: what it does is not counted; bring the agent up to date and the pod up "
            "again, or set vgpu.enforcement to strict, which refuses such entry points"
        )
        log.warning("limits_bypassed", pod=about.pod_key, container=about.container, entry_point=name)
        self._owners.event(about.owner, "LimitsBypassed", text)

    def differs(self, about: About, difference: Difference) -> None:
        """Charged and measured memory of a container have differed for a minute."""
        charged, measured = difference.charged_bytes // MIB, difference.measured_bytes // MIB
        if difference.forgiven_bytes:
            result = "what is charged too much does not count against its cap until both agree"
        elif difference.excess_bytes > 0:
            result = "it may be refused memory that it has room for"
        else:
            result = "what the enforcement library does not count is taken from its cap as measured"
        text = (
            f"container {about.container} is charged {charged} MiB of GPU {about.gpu}, and measured with "
            f"{measured} MiB, for a minute: {result}"
        )
        log.warning(
            "limits_differ",
            pod=about.pod_key,
            container=about.container,
            charged_bytes=difference.charged_bytes,
            measured_bytes=difference.measured_bytes,
            forgiven_bytes=difference.forgiven_bytes,
        )
        self._owners.event(about.owner, "LimitsDiffer", text)

    def unmeasured(self, about: About) -> None:
        """A process of a container cannot measure its launches."""
        text = (
            f"a process of container {about.container} cannot measure its launches on GPU {about.gpu}, since "
            "the driver refuses it events: launches of unknown cost are not held to its share of compute"
        )
        log.warning("share_unmeasured", pod=about.pod_key, container=about.container)
        self._owners.event(about.owner, "ShareUnmeasured", text)

    def resized(self, about: About, memory_bytes: int) -> None:
        """A container has another cap than `about` says."""
        text = (
            f"container {about.container} may use {memory_bytes // MIB} MiB of GPU {about.gpu} from now on, "
            f"{about.memory_bytes // MIB} MiB before; it was admitted with {len(about.ids)} units"
        )
        log.info("limits_resized", pod=about.pod_key, container=about.container, memory_bytes=memory_bytes)
        self._owners.event(about.owner, "LimitsResized", text, warning=False)

    def cores_resized(self, about: About, cores: int) -> None:
        """A container is promised other cores, in percent, than `about` says."""
        text = (
            f"container {about.container} is held to {cores} % of GPU {about.gpu} from now on, "
            f"{about.cores_now} % before; it was admitted with {about.cores}"
        )
        log.info("cores_resized", pod=about.pod_key, container=about.container, cores=cores)
        self._owners.event(about.owner, "LimitsResized", text, warning=False)

    def not_resized(self, about: About, problem: str) -> None:
        log.info("resize_refused", pod=about.pod_key, problem=problem)
        self._owners.event(about.owner, "ResizeRefused", problem)

    def exceeded(self, place: Place, memory_bytes: int, cap_bytes: int) -> None:
        """A container uses more memory than it may."""
        text = (
            f"container {place.container} uses {memory_bytes // MIB} MiB of GPU {place.gpu}, and may use "
            f"{cap_bytes // MIB} MiB: others of the GPU may run out of memory; restart the pod with more "
            "tencent.com/vcuda-memory, or without what allocates past the enforcement library"
        )
        pod = self._pod(place)
        log.warning(
            "memory_cap_exceeded", pod=f"{pod.namespace}/{pod.name}", container=place.container, gpu=place.gpu
        )
        self._owners.event(pod, "MemoryCapExceeded", text)

    def ended(self, place: Place, memory_bytes: int, cap_bytes: int, problem: str | None) -> None:
        """A container above its cap was ended; `problem`: it could not be."""
        used = f"uses {memory_bytes // MIB} MiB of GPU {place.gpu}, and may use {cap_bytes // MIB} MiB"
        self._ended("container_above_cap_ended", self._pod(place), place.container, used, problem)

    def ended_refusing(self, about: About, refusal: str, problem: str | None) -> None:
        """A container that keeps the agent from its files was ended; `problem`: it could not be."""
        kept = f"keeps the agent from the files of its limits ({refusal})"
        self._ended("container_refusing_ended", about.owner, about.container, kept, problem)

    def _ended(self, event: str, pod: Pod, container: str, cause: str, problem: str | None) -> None:
        self.ends["failed" if problem else "ended"] += 1
        outcome = f"it could not be ended: {problem}" if problem else "it was ended (vgpu.aboveCap)"
        log.warning(event, pod=f"{pod.namespace}/{pod.name}", container=container, problem=problem)
        reason = "ContainerNotEnded" if problem else "ContainerEnded"
        self._owners.event(pod, reason, f"container {container} {cause}: {outcome}")

    def not_loaded(self, about: About) -> None:
        """A process of a container uses the GPU without the enforcement library."""
        text = (
            f"a process of container {about.container} uses GPU {about.gpu} without the enforcement library: "
            "it is a static program, has another C library than glibc, or a loader of its own"
        )
        log.warning("library_not_loaded", pod=about.pod_key, container=about.container)
        self._owners.event(about.owner, "LimitsNotLoaded", text)

    def not_limited(self, about: About, problem: str) -> None:
        """The driver does not hold a container to its memory, though it should."""
        text = f"the driver does not hold container {about.container} to its memory: {problem}"
        log.warning("driver_limit_missing", pod=about.pod_key, problem=problem)
        self._owners.event(about.owner, "DriverLimitMissing", text)

    def _pod(self, place: Place) -> Pod:
        limits = self._isolation.at(place)
        return Pod(Metadata(place.pod, place.namespace, limits.about.uid if limits else ""))
