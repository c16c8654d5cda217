"""Containers with limits by the driver's measure: those above their cap, and those without the library.

The third fence, and the check on the second: it needs neither the container's goodwill nor its files. It is
fed with each round of samples; what it reads of a process is bounded. Blocking work is done in a thread.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

import anyio.to_thread
import structlog

from agent.holdings.process_owners import ProcessUnreadable, container_of_process
from agent.kit import bounded
from agent.kit.tasks import Cell
from agent.model.cgroup import ContainerRef
from agent.model.modes import Mode
from agent.telemetry.container_use import Uses
from agent.telemetry.containers import Attribution
from agent.vgpu.events import Differences, LimitEvents
from agent.vgpu.folders import About, Place
from agent.vgpu.isolation_errors import FolderUnusable, IsolationError, Problems
from agent.vgpu.layout import CountedUsage, Entries
from agent.vgpu.limits import ContainerLimits, Enforcement
from agent.vgpu.room import Isolation

# Whether a process has the enforcement library: by its memory map, or by its entry in the usage region.
#
# The map is the kernel's word, but takes the right to trace the process, which an agent without privilege has
# not. The entry is the container's word, and so a hint: a container may forge it, one with another C library
# does not.

LONGEST_MAPS = 8 << 20
LONGEST_STATUS = 64 << 10
# Looks in a row without an entry: a process is on the GPU a moment before it has one.
LOOKS = 3


@dataclass(slots=True)
class Looks:
    """Findings on the processes of a container."""

    loaded: dict[int, bool] = field(default_factory=dict)
    without: dict[int, int] = field(default_factory=dict)  # looks in a row that found no entry

    def keep(self, pids: Collection[int]) -> None:
        """Forget other processes than these."""
        self.loaded = {pid: each for pid, each in self.loaded.items() if pid in pids}
        self.without = {pid: each for pid, each in self.without.items() if pid in pids}

    def entered(self, pid: int, entries: Entries | None, proc: Path) -> None:
        """Take in whether a process, whose map cannot be read, has an entry. Blocks."""
        process = process_of(pid, proc)
        if process is None or entries is None:
            return
        own, start = process
        if (own, start) in entries.processes or (own, 0) in entries.processes:  # 0: it did not see /proc
            self.loaded[pid] = True
        elif entries.whole:
            self.without[pid] = self.without.get(pid, 0) + 1
            if self.without[pid] >= LOOKS:
                self.loaded[pid] = False


def loads(pid: int, library: Path, proc: Path, seconds: float = bounded.SECONDS) -> bool | None:
    """Whether a process has loaded the library; None: nothing is said. Blocks.

    A file that is mapped as data is not loaded: its code has to be executable. It is known by its name and
    inode: what a container mounts or copies under that name has another.
    Raises OSError: its map cannot be read, though it is there, or not in so many seconds.
    """
    try:
        inode = str(library.stat().st_ino)
    except OSError:
        return None
    try:
        text = bounded.read(proc / str(pid), "maps", LONGEST_MAPS, seconds)
    except (FileNotFoundError, ProcessLookupError):
        return None
    name = os.fsencode(library.name)
    for line in text.split(b"\n"):
        # By proc(5) a line has six fields: the second one is its rights, the last two are inode and path.
        fields = line.split(None, 5)
        found = len(fields) == 6 and fields[4] == inode.encode() and fields[5].endswith(b"/" + name)
        if found and b"x" in fields[1]:
            return True
    # It may stand beyond what was read, and a process that is ending has no memory left: nothing is said.
    return None if not text or len(text) == LONGEST_MAPS else False


def process_of(pid: int, proc: Path) -> tuple[int, int] | None:
    """The PID of a process in its own namespace, and its start time; None: nothing is said. Blocks."""
    try:
        return bounded.call(("process", pid), partial(_process_of, pid, proc))
    except bounded.Late:
        return None


def _process_of(pid: int, proc: Path) -> tuple[int, int] | None:
    try:
        with (proc / str(pid) / "status").open("rb") as file:
            status = file.read(LONGEST_STATUS)
        with (proc / str(pid) / "stat").open("rb") as file:
            stat = file.read(LONGEST_STATUS)
    except OSError:
        return None
    numbers = next((line.split() for line in status.split(b"\n") if line.startswith(b"NSpid:")), [])
    # Field 22 of all, by proc(5); the second one is a name that may hold anything.
    fields = stat.rpartition(b")")[2].split()
    if len(numbers) < 2 or len(fields) < 20:
        return None
    return int(numbers[-1]), int(fields[19])


# Ends a container that keeps more memory of a GPU than it may, or the agent from its files: by option only.
#
# All of its processes get SIGKILL, the first one among them, so that the kubelet sees the container end and
# does with it what its pod's restartPolicy says. It takes the host's process IDs, and the right to signal
# processes of other users (CAP_KILL).

# A process may be forking when it is looked for.
MOST_PASSES = 5


class NotEnded(IsolationError):
    """Processes of a container cannot be ended."""


def end(pids: Collection[int], proc: Path) -> int:
    """End the containers that these processes are in; how many processes were ended. Blocks.

    Raises NotEnded. A process in no pod, or in one whose container is unknown, is left alone.
    """
    containers = {ref for pid in pids if (ref := _container(pid, proc)) and ref.container_id}
    ended: set[int] = set()
    for _ in range(MOST_PASSES if containers else 0):
        found = [pid for pid in _processes(proc) if pid not in ended and _container(pid, proc) in containers]
        if not found:
            break
        ended |= {pid for pid in found if _kill(pid, containers, proc)}
    return len(ended)


def processes_of(ids: Collection[str], proc: Path) -> list[int]:
    """Processes of containers that have these IDs at the runtime. Blocks. Raises NotEnded."""
    return [pid for pid in _processes(proc) if (ref := _container(pid, proc)) and ref.container_id in ids]


def _processes(proc: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(proc) if name.isdecimal()]  # noqa: PTH208  names alone
    except OSError as error:
        raise NotEnded(f"{proc} cannot be listed: {error.strerror}") from error


def _kill(pid: int, containers: Collection[ContainerRef], proc: Path) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError as error:
        raise NotEnded(f"process {pid} cannot be named to the kernel: {error.strerror}") from error
    try:
        # Looked at again: the descriptor stays that process's, even if the number is used again meanwhile.
        if _container(pid, proc) not in containers:
            return False
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
    except PermissionError as error:
        raise NotEnded(
            f"process {pid} cannot be ended: {error.strerror}; the agent needs the capability KILL, "
            "which the chart gives it with config.vgpu.aboveCap: end"
        ) from error
    finally:
        os.close(process)
    return True


def _container(pid: int, proc: Path) -> ContainerRef | None:
    try:
        return container_of_process(pid, proc)
    except ProcessUnreadable:
        return None


log = structlog.get_logger()

# Excess over its cap that a container may be measured with: contexts come before anybody can count them.
LEAST_TOLERANCE = 64 << 20
TOLERANCE_RATIO = 0.02
# Readings in a row, a second apart, before it is reported: memory of a process that just ended lingers.
READINGS = 2
# Before one is ended, by option: so many readings, and so much for the context of each of so many processes.
END_READINGS = 10
CONTEXT_BYTES = 600 << 20
MOST_CONTEXTS = 8
# The same for one that keeps the agent from its files: the kernel ends no lease before 45 s.
REFUSED_READINGS = 60
LOOK_SECONDS = 2.0  # for the maps of one container's processes
# Unseen memory is the least of so many readings, since they compare figures of two moments; written in steps.
STABLE_READINGS = 3
STEP = 2 << 20


@dataclass(frozen=True, slots=True)
class Measured:
    """A container on one GPU, by the driver's word for each of its processes."""

    place: Place
    cap_bytes: int  # what its units stand for
    memory_bytes: int
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SweepFigures:
    measured: Mapping[Place, int] = field(default_factory=lambda: MappingProxyType({}))  # bytes
    above: frozenset[Place] = frozenset()


class LimitWatch:
    """Follows the samples; publishes `seen`."""

    def __init__(
        self,
        isolation: Isolation,
        events: LimitEvents,
        proc: Path,
        ends: bool = False,
        containers_of: Callable[[About], Collection[str]] = lambda _: (),
    ) -> None:
        """`ends`: whether containers are ended that stay above their cap, or keep the agent from their files.

        `containers_of`: the IDs that a container has at the runtime, without its scheme.
        """
        self._ends = ends
        self._containers_of = containers_of
        self._refused: dict[str, int] = {}  # readings in a row without a container's files
        self._excess: dict[Place, int] = {}  # readings in a row so far above that a container may be ended
        self.seen: Cell[SweepFigures] = Cell(SweepFigures())
        self._isolation = isolation
        self._events = events
        self._proc = proc
        self._rounds: dict[Place, int] = {}  # readings above the cap in a row
        self._loaded: dict[str, Looks] = {}  # by folder
        self._unseen: dict[str, deque[int]] = {}
        self._unreadable = Problems()
        self.differences = Differences()
        # Bytes unseen, for a context, and forgiven, in the limit file.
        self._written: dict[str, tuple[int, int, int]] = {}

    async def look(self, round_: Sequence[Measured]) -> None:
        """Take in one round: all containers that were measured."""
        folders = {
            limits.about.place: (key, limits) for key, limits in self._isolation.containers.value.items()
        }
        caps = {place: limits.memory_bytes for place, (_, limits) in folders.items()}
        above = self._above(round_, caps)
        self.seen.publish(SweepFigures({each.place: each.memory_bytes for each in round_}, above))
        if self._ends:
            await self._end(round_, caps)
            await self._end_refusing()
        work = [(*folders[each.place], each) for each in round_ if each.place in folders]
        unmeasured = self._loaded.keys() - {key for key, _, _ in work}
        # What is forgiven was measured: it ends with the measure.
        if forgiven := [key for key in unmeasured if key in self._written and self._written[key][2]]:
            await anyio.to_thread.run_sync(self._forgive_no_more, forgiven, abandon_on_cancel=True)
        for gone in unmeasured:
            del self._loaded[gone]
            self._unseen.pop(gone, None)
            self._written.pop(gone, None)
            self.differences.drop(gone)
        self._isolation.contexts.keep(self._isolation.containers.value)
        self._unreadable.keep(self._isolation.containers.value)
        if work:
            loaded = await anyio.to_thread.run_sync(self._read, work, abandon_on_cancel=True)
            for key, limits, _ in work:
                if key in loaded:
                    if limits.injected is not False and not loaded[key]:
                        self._events.not_loaded(limits.about)
                    self._isolation.saw(key, loaded[key])

    def _above(self, round_: Sequence[Measured], caps: Mapping[Place, int]) -> frozenset[Place]:
        counted: dict[Place, int] = {}
        for each in round_:
            cap = caps.get(each.place, each.cap_bytes)
            off = self._isolation.policy(each.place.namespace) is Enforcement.OFF
            if not off and each.memory_bytes > cap + tolerance(cap):
                rounds = counted[each.place] = self._rounds.get(each.place, 0) + 1
                if rounds == READINGS:
                    self._events.exceeded(each.place, each.memory_bytes, cap)
        self._rounds = counted
        return frozenset(place for place, rounds in counted.items() if rounds >= READINGS)

    async def _end(self, round_: Sequence[Measured], caps: Mapping[Place, int]) -> None:
        counted: dict[Place, int] = {}
        for each in round_:
            cap = caps.get(each.place, each.cap_bytes)
            enforced = self._isolation.policy(each.place.namespace).enforces
            contexts = min(len(each.pids), MOST_CONTEXTS) * CONTEXT_BYTES
            if not enforced or each.memory_bytes <= cap + tolerance(cap) + contexts:
                continue
            counted[each.place] = self._excess.get(each.place, 0) + 1
            if counted[each.place] < END_READINGS:
                continue
            counted[each.place] = 0
            problem = await self._ended(partial(tuple, each.pids))
            self._events.ended(each.place, each.memory_bytes, cap, problem)
        self._excess = counted

    async def _end_refusing(self) -> None:
        known, refusing = self._isolation.containers.value, self._isolation.refusing
        self._refused = {key: self._refused.get(key, 0) + 1 for key in refusing if key in known}
        for key, readings in self._refused.items():
            about = known[key].about
            if readings < REFUSED_READINGS or not self._isolation.policy(about.namespace).enforces:
                continue
            self._refused[key] = 0
            problem = await self._ended(partial(processes_of, self._containers_of(about), self._proc))
            self._events.ended_refusing(about, refusing[key], problem)

    async def _ended(self, pids: Callable[[], Collection[int]]) -> str | None:
        """End the containers of these processes; why that could not be done, or None."""
        try:
            if not await anyio.to_thread.run_sync(lambda: end(pids(), self._proc)):
                return "none of its processes was found"
        except NotEnded as error:
            return str(error)
        return None

    def _read(self, work: Sequence[tuple[str, ContainerLimits, Measured]]) -> Mapping[str, bool]:
        """Whether all processes have the library, by folder; nothing of those without a process."""
        found: dict[str, bool] = {}
        for key, limits, measured in work:
            if not limits.about.build:
                continue  # it was given no library
            looks = self._loaded.setdefault(key, Looks())
            self._look_at(key, limits.about, measured.pids, looks)
            if looks.loaded:
                found[key] = all(looks.loaded.values())
            self._settle(key, limits, measured, loaded=found.get(key, False))
        return found

    def _look_at(self, key: str, about: About, pids: Sequence[int], looks: Looks) -> None:
        looks.keep(pids)
        library, entries = self._isolation.libraries.of(about).file, None
        # Processes that keep the reader of their maps waiting cost their own container its time.
        until = time.monotonic() + LOOK_SECONDS
        for pid in (each for each in pids if each not in looks.loaded):
            if (left := until - time.monotonic()) <= 0:
                break
            try:
                loaded = loads(pid, library, self._proc, left)
            except OSError:
                entries = entries or self._entries(key)
                looks.entered(pid, entries, self._proc)
            else:
                if loaded is not None:
                    looks.loaded[pid] = loaded

    def _entries(self, key: str) -> Entries | None:
        try:
            return self._isolation.folders.entries(key)
        except FolderUnusable:
            return None

    def _settle(self, key: str, limits: ContainerLimits, measured: Measured, *, loaded: bool) -> None:
        """Give the library the figures that it cannot count: contexts, code, calls past it."""
        folders, contexts = self._isolation.folders, self._isolation.contexts
        gpu, cap = limits.about.gpu, limits.memory_bytes
        written = self._written.get(key)
        try:
            if written is None:
                now = folders.limits(key)
                written = self._written[key] = (now.unseen_bytes, now.context_bytes, now.forgiven_bytes)
            unseen, forgiven = written[0], 0
            # Where nobody is nothing is to be read.
            if (measured.pids or unseen) and (usage := folders.usage(key)):
                readings = self._unseen.setdefault(key, deque(maxlen=STABLE_READINGS))
                readings.append(max(0, measured.memory_bytes - usage.total_bytes))
                if len(readings) == STABLE_READINGS:
                    unseen = min(readings) // STEP * STEP
                forgiven = self._forgiven(key, limits, measured, usage)
                alone = loaded and len(measured.pids) == 1
                sole = folders.sole_process(key, usage.total_bytes) if alone else None
                contexts.measured(key, (gpu, limits.about.namespace), measured.memory_bytes, sole, cap)
            fresh = (unseen, contexts.of(gpu, cap), forgiven)
            if fresh != written:
                folders.change(key, unseen_bytes=fresh[0], context_bytes=fresh[1], forgiven_bytes=fresh[2])
                self._written[key] = fresh
        except FolderUnusable as error:
            self._unreadable.met(key, error)
        else:
            self._unreadable.over(key)

    def _forgive_no_more(self, keys: Sequence[str]) -> None:
        for key in keys:
            with suppress(FolderUnusable):  # that of a container that has ended is gone
                self._isolation.folders.change(key, forgiven_bytes=0)

    def _forgiven(self, key: str, limits: ContainerLimits, measured: Measured, usage: CountedUsage) -> int:
        """Neither where the policy is strict nor where what is above its cap is ended."""
        if not measured.pids:
            self.differences.drop(key)
            return 0
        forgives = limits.about.policy != Enforcement.STRICT.value and not self._ends
        movable = partial(self._isolation.folders.movable_bytes, key) if forgives else None
        return self.differences.look(key, usage, measured.memory_bytes, limits.memory_bytes, movable)


def tolerance(cap_bytes: int) -> int:
    """How far above its cap a container may be measured without a report, in bytes."""
    return max(LEAST_TOLERANCE, int(cap_bytes * TOLERANCE_RATIO))


def round_of(uses: Uses) -> list[Measured]:
    """The vGPU containers which the driver measures process by process."""
    return [
        Measured(
            Place(share.namespace, share.pod, share.container, share.gpu),
            share.memory_limit,
            each.use.memory,
            each.use.pids,
        )
        for each in uses.containers
        for share in (each.use.share,)
        if share.mode is Mode.VGPU and each.use.memory_grade is Attribution.MEASURED
    ]
