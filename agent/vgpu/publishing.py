"""Which fences hold for each container: published as annotation and events of its pod, and in `status`."""

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from agent.kit.tasks import Cell
from agent.model.pod import VGPU
from agent.telemetry import definitions as d
from agent.telemetry.series import Series
from agent.vgpu.compute import ComputeShare
from agent.vgpu.events import LimitEvents
from agent.vgpu.folders import Place, key_of
from agent.vgpu.limits import ContainerLimits, Enforcement
from agent.vgpu.room import Isolation
from agent.vgpu.watch import LimitWatch

ANNOTATION = "gpu-node-agent.io/limits"
# Until the kubelet's record shows a container nobody measures it; after so long it is published without.
PATIENCE_SECONDS = 10.0
UNVERIFIED = "the library is given; whether processes load it is seen once they use the GPU"


class Fence(Enum):
    DRIVER = "driver"  # it refuses what is above the cap
    LIBRARY = "library"  # so does the library in the container, for every call that it knows
    SWEEP = "sweep"  # containers above their cap are reported


class Publisher:
    """Publishes which fences hold for containers, and answers it."""

    def __init__(
        self,
        isolation: Isolation,
        events: LimitEvents,
        watch: LimitWatch,
        shares: Cell[Mapping[str, ComputeShare]] | None = None,
    ) -> None:
        """`shares`: how containers stand that are held to compute."""
        self._isolation = isolation
        self._events = events
        self._watch = watch
        self._shares = shares
        self._written: dict[str, str] = {}  # by UID of the pod
        self._refusing: set[str] = set()  # folders whose containers keep the agent from them
        self._bypassed: set[str] = set()  # folders whose containers have what the library cannot count
        self._differing: dict[str, bool] = {}  # folders with an event, and whether something is forgiven
        self._unmeasured: dict[str, int] = {}  # processes with an event, by folder
        self._announced: set[str] = set()  # folders with an event already

    def take_up(self) -> None:
        """Containers of an earlier agent have their event already."""
        self._announced = set(self._isolation.containers.value)

    async def run(self) -> None:
        """Publish after each round of the watch, for ever."""
        async for _ in self._watch.seen.values():
            self.publish()

    def publish(self) -> None:
        pods: dict[str, dict[str, Any]] = {}
        known = self._isolation.containers.value
        for key, limits in known.items():
            fences = self._fences(limits.about.place, limits)
            if Fence.SWEEP not in fences and not self._is_due(key, limits):
                continue
            entry = {"memoryBytes": limits.memory_bytes, "fences": [each.value for each in fences]}
            pods.setdefault(limits.about.uid, {})[limits.about.container] = entry
            if key not in self._announced:
                self._announced.add(key)
                self._announce(limits, fences)
        self._announced &= known.keys()
        for key in self._isolation.refusing.keys() - self._refusing:
            if key in known:
                self._events.access_refused(known[key].about, self._isolation.refusing[key])
        self._refusing = set(self._isolation.refusing)
        self._tell_of_counts(known)
        abouts = {limits.about.uid: limits.about for limits in known.values()}
        for uid, entries in pods.items():
            text = json.dumps(entries, sort_keys=True, separators=(",", ":"))
            if self._written.get(uid) != text:
                self._written[uid] = text
                self._events.annotate(abouts[uid], {ANNOTATION: text})
        self._written = {uid: text for uid, text in self._written.items() if uid in abouts}

    def _is_due(self, key: str, limits: ContainerLimits) -> bool:
        """Whether a container that nobody measures is to be published.

        Where its pod has come and gone meanwhile nobody reads of it: thirty such were sixty writes at once.
        """
        if self._isolation.age(key) < PATIENCE_SECONDS:
            return False
        return key in self._announced or self._isolation.may_live(limits.about)

    def _tell_of_counts(self, known: Mapping[str, ContainerLimits]) -> None:
        """Events for what the library's counts show; each once."""
        self._bypassed &= known.keys()
        for key, usage in self._isolation.counted.items():
            if usage.newer and key in known and key not in self._bypassed and not _is_strict(known[key]):
                self._bypassed.add(key)
                self._events.bypassed(known[key].about, usage.newer_name)
        for key, usage in self._isolation.counted.items():
            if usage.unmeasured > self._unmeasured.get(key, 0) and key in known:
                self._unmeasured[key] = usage.unmeasured
                self._events.unmeasured(known[key].about)
        self._unmeasured = {key: count for key, count in self._unmeasured.items() if key in known}
        lasting = self._watch.differences.lasting
        for key, difference in lasting.items():
            forgiven = difference.forgiven_bytes > 0
            if key in known and self._differing.get(key) is not forgiven:
                self._events.differs(known[key].about, difference)
        self._differing = {key: each.forgiven_bytes > 0 for key, each in lasting.items()}

    @property
    def sweeps(self) -> bool:
        """Whether the driver reports containers process by process; nobody knows while there are none."""
        return bool(self._watch.seen.value.measured)

    def metrics(self) -> Iterator[Series]:
        """The metrics of limits."""
        known, seen = self._isolation.containers.value, self._watch.seen.value
        for fence, count in self.by_fence().items():
            yield d.LIMITED_CONTAINERS, count, (fence,)
        for namespace, size in self._grown().items():
            yield d.NAMESPACE_GROWN_MEMORY, size, (namespace,)
        yield d.CONTAINERS_ABOVE_CAP, len(seen.above), ()
        yield d.CONTAINERS_WITHOUT_LIBRARY, sum(each.injected is False for each in known.values()), ()
        yield d.CONTAINERS_REFUSING, len(self._isolation.refusing), ()
        yield d.CONTAINERS_AVOIDING, sum(bool(each.about.avoidable) for each in known.values()), ()
        for key, usage in self._isolation.counted.items():
            if key in known:
                place = known[key].about.place
                yield d.CONTAINER_REFUSED, usage.refused, place
                yield d.CONTAINER_PEAK, usage.peak_bytes, place
                yield d.CONTAINER_REPAIRED, usage.repaired, place
                yield d.CONTAINER_NEWER, usage.newer, place
                yield d.CONTAINER_UNMEASURED, usage.unmeasured, place
                differs = self._watch.differences.lasting.get(key)
                yield d.CONTAINER_DIFFERENCE, differs.excess_bytes if differs else 0, place
        for place, share in self.shares().items():
            yield d.CONTAINER_THROTTLED, share.throttled_seconds, place
            yield d.CONTAINER_ALLOTTED, share.allotted / 100, place
        for result, count in self._events.ends.items():
            yield d.CONTAINERS_ENDED, count, (result,)

    def by_fence(self) -> Mapping[str, int]:
        """Containers by the fences that hold for them."""
        known = self._isolation.containers.value.values()
        driver = sum(Fence.DRIVER in self._fences(each.about.place, each) for each in known)
        # Given alone does not count: a process has been seen with it, and none without.
        library = sum(each.injected is True for each in known)
        sweep = len(self._watch.seen.value.measured)
        return {Fence.DRIVER.value: driver, Fence.LIBRARY.value: library, Fence.SWEEP.value: sweep}

    def _grown(self) -> Mapping[str, int]:
        """Bytes that containers were resized to beyond what their pods asked for, by namespace."""
        found: dict[str, int] = {}
        for about in (each.about for each in self._isolation.containers.value.values()):
            if about.grown:
                size = len(about.grown) * VGPU.block_bytes
                found[about.namespace] = found.get(about.namespace, 0) + size
        return found

    def document(self, place: Place) -> dict[str, Any] | None:
        """The limits of a container for `status`; None: it has none, and nobody measures it."""
        limits = self._isolation.at(place)
        fences = self._fences(place, limits)
        if limits is None and not fences:
            return None
        found = {
            "memoryBytes": limits.memory_bytes if limits else None,
            "admittedBytes": len(limits.about.ids) * VGPU.block_bytes if limits else None,
            "fences": [each.value for each in fences],
            "injected": limits.injected if limits else None,
            "avoidable": list(limits.about.avoidable) if limits else [],
            "uncounted": self._uncounted(limits, fences) if limits else [],
            "aboveCap": place in self._watch.seen.value.above,
        }
        compute = self._compute(limits) if limits else None
        return {**found, "compute": compute} if compute else found

    def _uncounted(self, limits: ContainerLimits, fences: tuple[Fence, ...]) -> list[str]:
        """Memory that does not count against the cap of a container, in words."""
        if Fence.DRIVER in fences:  # it counts all that the library may miss
            return [] if Fence.LIBRARY in fences else ["managed memory"]
        if not limits.about.build:
            return ["all memory: the container has no enforcement library"]
        found = []
        if limits.injected is False:
            found.append("memory of processes without the enforcement library")
        key = key_of(limits.about.ids)
        if (usage := self._isolation.counted.get(key)) and usage.newer and not _is_strict(limits):
            found.append(f"what {usage.newer_name or 'an entry point of the driver'} allocates: too new")
        if Fence.SWEEP not in fences:
            found.append("what only a measurement shows, as static variables: nobody measures the container")
            if not self._isolation.contexts.of(limits.about.gpu, limits.memory_bytes):
                found.append("contexts: what one takes on this GPU is not known")
        differs = self._watch.differences.lasting.get(key)
        if differs and differs.forgiven_bytes:
            found.append(f"{differs.forgiven_bytes} bytes that are charged and not measured")
        return found

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

    def shares(self) -> Mapping[Place, ComputeShare]:
        """How containers stand that are held to compute."""
        known = self._isolation.containers.value
        shares = self._shares.value if self._shares else {}
        return {known[key].about.place: share for key, share in shares.items() if key in known}

    def _announce(self, limits: ContainerLimits, fences: tuple[Fence, ...]) -> None:
        text = ", ".join(each.value for each in fences)
        if Fence.LIBRARY in fences and limits.injected is None:
            text += f" ({UNVERIFIED})"
        self._events.applied(limits, text)

    def _fences(self, place: Place, limits: ContainerLimits | None) -> tuple[Fence, ...]:
        found = []
        if limits and limits.about.driver and limits.limited is not False:
            found.append(Fence.DRIVER)
        if limits and limits.about.build and limits.injected is not False:
            found.append(Fence.LIBRARY)
        if place in self._watch.seen.value.measured:
            found.append(Fence.SWEEP)
        return tuple(found)


def _is_strict(limits: ContainerLimits) -> bool:
    return limits.about.policy == Enforcement.STRICT.value
