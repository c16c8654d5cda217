"""Events of limits for the owners of pods, each with its line in the log."""

from collections.abc import Mapping

import structlog

from agent.model.metadata import Metadata
from agent.model.pod import Pod
from agent.pairing.pod_access import Recorder
from agent.vgpu.differing import Difference
from agent.vgpu.folders import About, Place
from agent.vgpu.limits import ContainerLimits
from agent.vgpu.room import Isolation

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
