"""Holds containers to their shares of compute: allots them, and corrects what the library has learned.

What a container does shows in its usage region, of which a few bytes are read: who launches, or waits to. On
GPUs where somebody's share depends on that, they are read every `POLL_SECONDS`, so that a container promised
compute and comes back finds it free; elsewhere once a second. What a container writes there can make it look
busy or idle, and so cost or give its neighbours what is free, never what they were promised.

All of it is done in a thread, in turns, so that a stop waits for a fraction of a second.
"""

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import anyio
import anyio.to_thread
import structlog

from agent.cluster.pods import PodCache
from agent.kit.tasks import Cell
from agent.model.placement import BURST, PRIORITY
from agent.telemetry.container_use import Uses
from agent.vgpu.correction import Second, learned
from agent.vgpu.folders import PERCENT, About, Place
from agent.vgpu.isolation_errors import FolderUnusable, Problems
from agent.vgpu.limits import ContainerLimits
from agent.vgpu.room import Isolation

# How the compute of one GPU is shared out: promises first, then what is free, to those who may have it.
#
# A container was promised the cores that it asked for. One that works keeps all of its promise, however
# little it uses, since its need for the rest could not be seen in time. The rest, promises of idle ones among
# it, goes to containers that may burst, and what these leave to those of low priority. A container that asked
# for no cores has no promise, and runs like one of low priority.

WHOLE = 100.0


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim of a container to its GPU, in percent."""

    key: str
    cores: int  # asked for
    most: int  # up to which free compute may be used; cores where that is none
    low: bool = False

    @property
    def promised(self) -> int:
        """Its promise, which it gets whenever it works."""
        return 0 if self.low else self.cores


def claim(key: str, cores: int, burst: int | None, *, low: bool) -> Claim:
    """A container's claim, from what it and its annotations say."""
    idle_only = low or cores == 0
    most = burst if burst is not None else (100 if idle_only else cores)
    return Claim(key, cores, min(100, most if idle_only else max(cores, most)), idle_only)


def elastic(claims: Collection[Claim]) -> bool:
    """Whether anybody's share depends on what others do."""
    return any(each.most > each.promised for each in claims)


def allot(claims: Sequence[Claim], working: Collection[str]) -> Mapping[str, float]:
    """Percent of the GPU by key. One that idles may have its promise at any moment all the same."""
    found = {each.key: float(each.promised) for each in claims}
    free = WHOLE - sum(each.promised for each in claims if each.key in working)
    for low in (False, True):
        takers = [each for each in claims if each.low is low and each.most > each.promised]
        working_takers = [each for each in takers if each.key in working]
        # One that idles must be able to begin: it is offered what would be left for it.
        for each in takers:
            if each.key not in working:
                rest = [*working_takers, each]
                own = free - (0 if each.low else each.promised)
                found[each.key] += _poured(rest, own)[each.key]
        for key, extra in _poured(working_takers, free).items():
            found[key] += extra
            free -= extra
    return found


def _poured(takers: Sequence[Claim], free: float) -> dict[str, float]:
    """The rest in equal parts, to nobody more than it may have beyond its promise."""
    found = {each.key: 0.0 for each in takers}
    left = sorted(takers, key=lambda each: each.most - each.promised)
    free = max(0.0, free)
    while left:
        part = free / len(left)
        first = left.pop(0)
        found[first.key] = min(part, first.most - first.promised)
        free -= found[first.key]
    return found


log = structlog.get_logger()

Reader = Callable[[], tuple[int, int, int]]  # of `layout.read_share`

POLL_SECONDS = 0.01
# A pause ends by itself 30 s after the last beat: see `is_forgotten` in clib/shares.c.
BEAT_SECONDS = 5.0
TURN_SECONDS = 0.25
IDLE_SECONDS = 1.0
"""Who did nothing for so long leaves its promise to others until it comes back."""
LOOK_SECONDS = 1.0
SAMPLED_SECONDS = 2.0
"""The driver's figures of a second may be of the one before it."""
MOST_THREADS = 1024
"""Of a container, that can have waited at once: beyond that its word is not believed."""


@dataclass(frozen=True, slots=True)
class ComputeRequest:
    """The request of a pod's annotations."""

    burst: int | None = None  # percent of a GPU
    low: bool = False


@dataclass(frozen=True, slots=True)
class ComputeShare:
    """How a container stands. `used` is None where nobody measures it."""

    asked: int  # percent; 0: no claim
    allotted: float
    used: float | None
    throttled_seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredWork:
    """The work of one GPU in a second, as the driver measured it."""

    percent: float  # of all its processes together
    processes: Mapping[Place, int]  # of containers: those that it names
    others: bool = False  # it lists or names some of no container, or cannot list any
    listed: Collection[Place] = ()  # containers of which it lists processes, at work or not

    @property
    def present(self) -> AbstractSet[Place]:
        """The containers that have processes on the GPU."""
        return self.processes.keys() | self.listed


_UNKNOWN = MeasuredWork(0.0, {}, others=True)


@dataclass
class _Followed:
    """A container that is held to a share."""

    about: About
    claim: Claim
    share: int = -1  # in force, in 1/100 %; -1: not written yet
    factor: float = 1.0
    rivals: float | None = None  # other processes that its own meet on the GPU; None: not known
    written: tuple[int, float, float | None] | None = None
    seen: tuple[int, int, int] | None = None
    moved: float = float("-inf")  # when it last did something
    since: float = float("-inf")  # when its share was changed, or it began to work
    looked: float = float("-inf")
    beaten: float = float("-inf")
    held_back: bool = False  # whether launches waited since the last measurement
    throttled: float = 0.0  # seconds
    used: float | None = None


class Compute:
    """The shares of this node's containers."""

    def __init__(
        self,
        isolation: Isolation,
        request: Callable[[About], ComputeRequest],
        *,
        soft: bool,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`soft`: every container may use what is free."""
        self.shares: Cell[Mapping[str, ComputeShare]] = Cell(MappingProxyType({}))
        self._isolation = isolation
        self._request_of = request
        self._soft = soft
        self._clock = clock
        self._pause = pause
        self._followed: dict[str, _Followed] = {}
        self._unreadable = Problems()
        self._unwritten = Problems("share_not_written")
        self._measured: Mapping[str, MeasuredWork] = {}
        self._before: dict[str, MeasuredWork] = {}  # of the round before

    def measured(self, work: Mapping[str, MeasuredWork]) -> None:
        """Take in one round of what the driver measured, by GPU (UUID)."""
        self._measured = work

    async def run(self) -> None:
        """Allot and correct, for ever."""
        version = self._isolation.containers.version
        try:
            while True:
                containers, measured = self._isolation.containers.value, self._measured
                self._measured = {}
                again = await anyio.to_thread.run_sync(self.turn, containers, measured)
                self.shares.publish(self.standing())
                if again:
                    continue
                with anyio.move_on_after(LOOK_SECONDS):
                    version = await self._isolation.containers.wait_change(version)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self.settle)

    def turn(self, containers: Mapping[str, ContainerLimits], measured: Mapping[str, MeasuredWork]) -> bool:
        """One turn; whether the next is to follow at once. Blocks for up to `TURN_SECONDS`."""
        self._follow(containers)
        gpus = self._by_gpu()
        depends = any(len(group) > 1 and elastic([each.claim for each in group]) for group in gpus)
        with ExitStack() as opened:
            files = self._open(opened)
            end = self._clock() + TURN_SECONDS
            self._look(files)
            self._observe(measured)
            while True:
                for group in gpus:
                    self._allot(group)
                if not depends or self._clock() >= end:
                    return depends
                self._pause(POLL_SECONDS)
                self._look(files)

    def settle(self) -> None:
        """Leave what is right while nobody looks: as if all worked, and a little for everybody. Blocks."""
        for group in self._by_gpu():
            found = allot([each.claim for each in group], {each.claim.key for each in group})
            for each in group:
                each.share = max(PERCENT, int(found[each.claim.key] * PERCENT))
                each.rivals = None
                self._write(each)

    def _by_gpu(self) -> list[list[_Followed]]:
        gpus: dict[str, list[_Followed]] = {}
        for each in self._followed.values():
            gpus.setdefault(each.about.gpu, []).append(each)
        return list(gpus.values())

    def _follow(self, containers: Mapping[str, ContainerLimits]) -> None:
        held = {key: one.about for key, one in containers.items() if one.about.compute and one.about.build}
        for gone in self._followed.keys() - held.keys():
            del self._followed[gone]
        for key, about in held.items():
            request = self._request_of(about)
            burst = 100 if self._soft and request.burst is None else request.burst
            wanted = claim(key, about.cores_now, burst, low=request.low)
            known = self._followed.get(key)
            if known is None or known.about.uid != about.uid:
                self._followed[key] = _Followed(about, wanted, factor=self._factor(key))
            else:
                known.about, known.claim = about, wanted

    def _factor(self, key: str) -> float:
        """The findings of an earlier agent."""
        try:
            return self._isolation.folders.limits(key).correction
        except FolderUnusable:
            return 1.0

    def _open(self, opened: ExitStack) -> Mapping[str, Reader]:
        files: dict[str, Reader] = {}
        folders = self._isolation.folders
        self._unreadable.keep(self._followed)
        self._unwritten.keep(self._followed)
        for key in self._followed:
            try:
                file = folders.open_usage(key)
                opened.callback(os.close, file)
                files[key] = partial(folders.layout_of(key).read_share, file)
            except FolderUnusable as error:
                self._unreadable.met(key, error)
            else:
                self._unreadable.over(key)
        return files

    def _look(self, files: Mapping[str, Reader]) -> None:
        now = self._clock()
        for key, read in files.items():
            each = self._followed[key]
            try:
                seen = read()
            except OSError:
                continue
            before = each.seen
            if (before is not None and seen != before) or seen[0] / 1e9 > now:
                if not self._working(each):
                    each.since = now
                each.moved = now
            waited = (seen[2] - (before[2] if before else 0)) / 1e9
            if waited > 0:
                each.held_back = True
                if waited <= (now - each.looked) * MOST_THREADS:
                    each.throttled += waited
            each.seen, each.looked = seen, now

    def _working(self, each: _Followed) -> bool:
        return self._clock() - each.moved < IDLE_SECONDS

    def _observe(self, measured: Mapping[str, MeasuredWork]) -> None:
        now = self._clock()
        for group in self._by_gpu():
            gpu = group[0].about.gpu
            work = measured.get(gpu)
            if work is None:
                continue
            # Who was there at either end of the second may have worked in it.
            before = self._before.get(gpu, _UNKNOWN)
            self._before[gpu] = work
            present = work.present | before.present
            seconds = [self._second(each, work, present, now) for each in group]
            strangers = present - {each.about.place for each in group}
            others = work.others or before.others or bool(strangers)
            found = learned(seconds, work.percent, others=others)
            for number, each in enumerate(group):
                each.factor = found.factors[number]
                each.rivals, each.held_back = found.rivals[number], False
                each.used = found.used(number, work.percent, others=others)

    @staticmethod
    def _second(each: _Followed, work: MeasuredWork, present: AbstractSet[Place], now: float) -> Second:
        processes = work.processes.get(each.about.place, 0)
        return Second(
            each.factor,
            max(0, each.share) / PERCENT,
            working=processes > 0 or now - each.moved < SAMPLED_SECONDS,
            throttled=each.held_back,
            # What was measured belongs to the share that was in force all the while.
            steady=now - each.since > LOOK_SECONDS,
            processes=max(1, processes),
            listed=each.about.place in present,
        )

    def _allot(self, group: list[_Followed]) -> None:
        working = {each.claim.key for each in group if self._working(each)}
        found = allot([each.claim for each in group], working)
        # Containers that get less come first, so that no two have the same in between.
        for each in sorted(group, key=lambda one: found[one.claim.key] * PERCENT - one.share):
            share = int(found[each.claim.key] * PERCENT)
            if share != each.share:
                each.share, each.since = share, self._clock()
            self._write(each)

    def _write(self, each: _Followed) -> None:
        wanted = (each.share, each.factor, each.rivals)
        late = each.share == 0 and self._clock() - each.beaten >= BEAT_SECONDS
        if each.written == wanted and not late:
            return
        values = {"compute": True, "share": each.share, "correction": each.factor, "rivals": each.rivals}
        try:
            if late:
                self._isolation.folders.beat(each.claim.key)
                each.beaten = self._clock()
            if each.written != wanted:
                self._isolation.folders.change(each.claim.key, **values)
                each.written = wanted
        except FolderUnusable as error:
            self._unwritten.met(each.claim.key, error)
        else:
            self._unwritten.over(each.claim.key)

    def standing(self) -> Mapping[str, ComputeShare]:
        """How containers stand, by folder."""
        return MappingProxyType(
            {
                key: ComputeShare(each.about.cores, each.share / PERCENT, each.used, each.throttled)
                for key, each in self._followed.items()
            }
        )


def release(isolation: Isolation) -> None:
    """Hold nobody to a share any more that an earlier configuration had held. Blocks."""
    for key, limits in isolation.containers.value.items():
        if limits.about.compute:
            try:
                isolation.folders.change(key, compute=False)
            except FolderUnusable as error:
                log.warning("share_not_written", problem=str(error))


def work_of(uses: Uses) -> Mapping[str, MeasuredWork]:
    """The work of GPUs as the driver measured it, by UUID, as far as it is measured."""
    processes: dict[str, dict[Place, int]] = {gpu: {} for gpu in uses.work}
    listed: dict[str, set[Place]] = {gpu: set() for gpu in uses.work}
    for each in uses.containers:
        share = each.use.share
        if share.gpu not in processes:
            continue
        place = Place(share.namespace, share.pod, share.container, share.gpu)
        if each.use.working:
            processes[share.gpu][place] = each.use.working
        if each.use.processes:
            listed[share.gpu].add(place)
    return {
        gpu: MeasuredWork(work.ratio * 100, processes[gpu], work.others, frozenset(listed[gpu]))
        for gpu, work in uses.work.items()
    }


# Compute as pods request it by annotations: how far they may burst, and whether they come last.

LOW = "low"
_reported: dict[tuple[str, str], int] = {}  # a hash of the value, which may be of 256 KiB, by pod and name
_MOST_REPORTED = 1000


class ComputeRequests:
    """Those of this node's pods."""

    def __init__(self, pods: PodCache | None, *, may_burst: bool) -> None:
        """`may_burst`: a burst counts only where a policy says who may write the annotation."""
        self._pods = pods
        self._may_burst = may_burst

    def of(self, about: About) -> ComputeRequest:
        """The request of a container; none while its pod is not known."""
        pod = self._pods.pods().get(about.uid) if self._pods else None
        return compute_request_of(about, pod.metadata.annotations if pod else {}, may_burst=self._may_burst)


def compute_request_of(about: About, annotations: Mapping[str, str], *, may_burst: bool) -> ComputeRequest:
    """The request of a container's pod. A value that cannot be understood is left out, and logged once."""
    burst, priority = annotations.get(BURST), annotations.get(PRIORITY)
    percent = _percent(burst) if burst is not None and may_burst else None
    if burst is not None and may_burst and percent is None:
        _report(about, BURST, burst, "must be a whole number from 1 to 100: percent of a GPU")
    if priority is not None and priority != LOW:
        _report(about, PRIORITY, priority, f"must be {LOW}, or absent")
    return ComputeRequest(percent, priority == LOW)


def _percent(text: str) -> int | None:
    is_number = len(text) <= 3 and text.isascii() and text.isdigit()
    return int(text) if is_number and 1 <= int(text) <= 100 else None


def _report(about: About, annotation: str, value: str, problem: str) -> None:
    key = (about.uid, annotation)
    if _reported.get(key) == hash(value):
        return
    if len(_reported) >= _MOST_REPORTED:
        _reported.clear()
    _reported[key] = hash(value)
    log.warning(
        "annotation_ignored", pod=about.pod_key, annotation=annotation, value=value[:64], problem=problem
    )
