"""NVML off the event loop: worker threads that make one call at a time, and the wait for events in one.

One event set holds all GPUs, each registered once. A wait that fails is tried again after growing
pauses with a set made again, so that neither a sick driver nor a lost GPU in the set can make the loop
spin; until then, and for GPUs without events, probing alone watches. Transitions are logged, tries are not.
"""

import asyncio
import math
import queue
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, TypeVarTuple

import anyio
import pynvml
import structlog

from agent.kit.tasks import Backoff
from agent.nvml.port import (
    NvmlCode,
    NvmlError,
    NvmlEvent,
    NvmlGpuLost,
    NvmlHung,
    NvmlNotSupported,
    NvmlPort,
    error_for,
)

# NVML off the event loop: worker threads that make one call at a time, each with a deadline.
#
# The agent has two workers: one waits for events, one does everything else, so that neither can hold up the
# other. A call that never returns keeps its operating-system thread for good; the worker abandons it and goes
# on with a fresh one. Python cannot end such a thread; they are daemon threads, so they do not keep the
# process from ending either.

# Calls into nvidia-ml-py, its errors as ours.

Opaque: TypeAlias = Any  # nvidia-ml-py has no types; what comes from it is checked here, by use


def call(name: str, *args: Opaque) -> Opaque:
    """Call a function of pynvml. Raises NvmlError."""
    try:
        return getattr(pynvml, name)(*args)
    except pynvml.NVMLError as error:
        raise error_for(
            error.value, name.removesuffix("_v1").removesuffix("_v2").removesuffix("_v3")
        ) from error


def offered(name: str, *args: Opaque) -> Opaque:
    """The answer of a function; None where the GPU, the driver or the library has no such thing."""
    try:
        return call(name, *args)
    except NvmlNotSupported:
        return None


def first_offered(names: Iterable[str], *args: Opaque) -> Opaque:
    """The answer of the first of these functions that there is; None: there is none."""
    return next((found for name in names if (found := offered(name, *args)) is not None), None)


log = structlog.get_logger()

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

# Calls about more things than this hang: the driver as a whole is sick, and more threads would not help.
MOST_STUCK = 8
MOST_OF_ONE = 4  # about one GPU, by UUID or index; it is asked nothing more, and the others are


class WorkerThread:
    """Runs blocking calls one after the other off the event loop."""

    def __init__(self, name: str, deadline: float = 2.0) -> None:
        self.name = name
        self._deadline = deadline
        self._turn = anyio.Lock(fast_acquire=True)  # one turn of the loop less in each of some trips a second
        self._worker: _Worker | None = None
        self._given_up: list[_GivenUp] = []
        self._end = math.inf  # when no call is waited for any more
        self._waiting: anyio.CancelScope | None = None

    @property
    def stuck(self) -> int:
        """How many threads hang in a call that was given up."""
        self._given_up = [given_up for given_up in self._given_up if given_up.worker.is_alive()]
        return len(self._given_up)

    async def run(
        self,
        call: Callable[[*Ts], R],
        *args: *Ts,
        deadline: float | None = None,
        progress: Callable[[], float] | None = None,
        about: Callable[[], object] | None = None,
    ) -> R:
        """Run a blocking call and return its result; raises what it raises.

        `deadline` is in seconds and counts from when the call begins, or, for one that makes many calls
        into NVML, from when it last got on: `progress` answers that on `time.monotonic()`'s clock.
        Past it NvmlHung is raised, and raised again at once for the same call with the same arguments
        until it comes back: a sick GPU that is asked at every tick must not use up a thread each time.
        `about` answers which GPU the call is about, now and while it hangs; its answer None: not known yet.
        Without it that is the GPU that the first argument names, or else the call is a subject of its own.
        Cancellation is held back until the call is over, so that NVML is never closed under a call; see
        `end_within`.
        """
        seconds = self._deadline if deadline is None else deadline
        what = getattr(call, "__name__", str(call))
        hung = f"NVML {what} did not answer within {seconds:g} s"
        async with self._turn:
            stuck = self.stuck
            if any(given_up.call == call and given_up.arguments == args for given_up in self._given_up):
                raise NvmlHung(NvmlCode.TIMEOUT, what, hung)
            if anyio.current_time() >= self._end or (stuck and self._end < math.inf):
                raise NvmlHung(NvmlCode.TIMEOUT, what, f"NVML {what} is not called: the agent ends")
            about = about or partial(_named, call, args)
            if (subject := about()) is not None and self.hangs(subject):
                text = f"{MOST_OF_ONE} NVML calls about {subject} hang in thread {self.name}"
                raise NvmlHung(NvmlCode.TIMEOUT, what, text)
            if len({given_up.about() for given_up in self._given_up}) >= MOST_STUCK:
                raise NvmlHung(
                    NvmlCode.TIMEOUT,
                    self.name,
                    f"{stuck} NVML calls hang in thread {self.name}; the driver needs attention "
                    "(see the kernel log), then restart the agent",
                )
            worker = self._worker = self._worker or _Worker(self.name)
            outcome: list[R] = []
            job = _Job(lambda: outcome.append(call(*args)))
            worker.jobs.put(job)
            await self._finish(job, seconds, progress)
            if not job.done.is_set():
                self._give_up(_GivenUp(worker, call, args, about))
                log.error("nvml_call_hangs", call=what, thread=self.name, deadline_seconds=seconds)
                raise NvmlHung(NvmlCode.TIMEOUT, what, hung)
        # A cancellation that was held back is delivered here, after the call.
        await anyio.lowlevel.checkpoint_if_cancelled()
        if job.error is not None:
            raise job.error
        return outcome[0]

    def hangs(self, subject: object) -> bool:
        """Whether so many calls about one GPU hang that it is asked nothing more."""
        if self.stuck < MOST_OF_ONE:
            return False
        return sum(each.about() == subject for each in self._given_up) >= MOST_OF_ONE

    def close(self) -> None:
        """Let the thread end after the call under way."""
        if self._worker is not None:
            self._worker.jobs.put(None)
            self._worker = None

    def end_within(self, seconds: float) -> None:
        """Wait at most `seconds` more for calls, then make none: the process is about to end.

        The call under way is given up then like one that is past its deadline. Nothing is called while
        another call hangs, so that NVML is closed by the end of the process where one does.
        """
        self._end = min(self._end, anyio.current_time() + seconds)
        if self._waiting is not None:
            self._waiting.deadline = min(self._waiting.deadline, self._end)

    def _give_up(self, given_up: "_GivenUp") -> None:
        given_up.worker.jobs.put(None)  # should it ever come back, it ends
        self._given_up.append(given_up)
        self._worker = None

    async def _finish(self, job: "_Job", seconds: float, progress: Callable[[], float] | None) -> None:
        """Wait until the job is done or late; not to be cancelled."""
        end = anyio.current_time() + seconds
        with anyio.CancelScope(shield=True):
            while not job.done.is_set() and anyio.current_time() < min(end, self._end):
                with anyio.CancelScope(deadline=min(end, self._end)) as self._waiting:
                    await job.done.wait()
                if progress is not None:
                    end = max(end, progress() + seconds)


def _named(call: object, args: tuple[object, ...]) -> object:
    return args[0] if args and isinstance(args[0], str | int) else call


class _Job:
    """One call on its way through the thread and back."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work
        self.done = anyio.Event()
        self.loop = asyncio.get_running_loop()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:  # noqa: BLE001  carried to the caller whatever it is
            self.error = error
        try:
            self.loop.call_soon_threadsafe(self.done.set)
        except RuntimeError:
            return  # the loop is gone: nobody waits any more


class _Worker(threading.Thread):
    def __init__(self, name: str) -> None:
        super().__init__(name=f"nvml-{name}", daemon=True)
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job.run()


@dataclass(frozen=True, slots=True)
class _GivenUp:
    """A thread that hangs, and in what."""

    worker: _Worker
    call: Callable[..., object]
    arguments: tuple[object, ...]
    about: Callable[[], object]


# Waits for NVML's events in a thread of its own and hands them on at once.

# A slice bounds how long stopping takes; longer ones save little (0.07 % of a core at this length).
SLICE_SECONDS: Final = 1.0
GRACE_SECONDS: Final = 2.0  # how much longer than asked for a wait may take before it counts as hung
RETRY_SECONDS: Final = 10.0  # between tries to register a GPU that refused
FINE_AFTER_SECONDS: Final = 10.0  # a set that waited this long without a failure is taken to be well


class EventWatch:
    """The event loop. `targets` answers the UUIDs that should be watched now, `changed` awaits others."""

    def __init__(
        self,
        nvml: NvmlPort,
        thread: WorkerThread,
        targets: Callable[[], frozenset[str]],
        changed: Callable[[], Awaitable[object]],
        deliver: Callable[[NvmlEvent], Awaitable[None]],
    ) -> None:
        self._nvml = nvml
        self._thread = thread
        self._targets = targets
        self._changed = changed
        self._deliver = deliver
        self._registered: set[str] = set()
        self._stale: set[str] = set()  # registered, but gone since: their registration is worth nothing
        self._unsupported: set[str] = set()
        self._refused: dict[str, tuple[float, str]] = {}  # UUID -> when to try again, what it said
        self._backoff = Backoff(first=0.1, longest=30.0)
        self._failing_since: float | None = None
        self._fine_since: float | None = None
        self._mute = False  # a wait hangs
        self._deaf = False  # the newest wait failed
        self.problem: str | None = None
        self.failures = 0

    @property
    def watched(self) -> frozenset[str]:
        """GPUs whose events arrive; all others are watched by probing alone."""
        return frozenset() if self._deaf else frozenset(self._registered - self._stale)

    async def run(self) -> None:
        """Wait for events until cancelled, then let go of the event set. NVML must be open meanwhile."""
        self._forget()
        try:
            while True:
                try:
                    await self._keep_registered()
                    if not self._registered:
                        with anyio.move_on_after(RETRY_SECONDS):
                            await self._changed()
                        continue
                    event = await self._wait()
                except NvmlHung as error:
                    self._mute = True
                    self._failed(error)
                    # The worker refuses to wait again until the call that hangs came back.
                    await anyio.sleep(self._backoff.next())
                    continue
                except NvmlError as error:
                    self._failed(error)
                    await self._drop_set()
                    await anyio.sleep(self._backoff.next())
                    continue
                self._went_well()
                if event is not None:
                    await self._deliver(event)
        finally:
            with anyio.CancelScope(shield=True):
                await self._drop_set()

    async def _wait(self) -> NvmlEvent | None:
        return await self._thread.run(
            self._nvml.wait, round(SLICE_SECONDS * 1000), deadline=SLICE_SECONDS + GRACE_SECONDS
        )

    async def _keep_registered(self) -> None:
        targets = self._targets()
        self._stale |= self._registered - targets
        if self._stale & targets and not self._mute:  # gone and back: only a new set hears of them again
            await self._drain()
            await self._drop_set()
        now = anyio.current_time()
        for uuid in sorted(targets - self._registered - self._unsupported):
            if self._refused.get(uuid, (0.0, ""))[0] <= now:
                await self._register(uuid, now)

    async def _register(self, uuid: str, now: float) -> None:
        try:
            kinds = await self._thread.run(self._nvml.watch, uuid)
        except NvmlNotSupported as error:
            self._unsupported.add(uuid)
            log.info("gpu_events_unsupported", gpu=uuid, problem=str(error), instead="probing alone")
        except NvmlError as error:
            said = str(error)
            if self._refused.get(uuid, (0.0, ""))[1] != said and not isinstance(error, NvmlGpuLost):
                log.warning("gpu_events_refused", gpu=uuid, problem=said, instead="probing alone")
            self._refused[uuid] = (now + RETRY_SECONDS, said)
        else:
            self._registered.add(uuid)
            self._refused.pop(uuid, None)
            log.debug("gpu_events_watched", gpu=uuid, kinds=sorted(kind.value for kind in kinds))

    async def _drain(self) -> None:
        """Hand on what already waits in the set that is about to go."""
        while event := await self._thread.run(self._nvml.wait, 0):
            await self._deliver(event)

    async def _drop_set(self) -> None:
        if self._mute:
            return  # freeing a set in which a thread waits is undefined
        self._forget()
        try:
            await self._thread.run(self._nvml.unwatch_all)
        except NvmlError as error:
            log.debug("event_set_not_freed", problem=str(error))

    def _forget(self) -> None:
        self._registered.clear()
        self._stale.clear()

    def _failed(self, error: NvmlError) -> None:
        self.failures += 1
        self._deaf = True
        self._fine_since = None
        if self.problem is None:
            self._failing_since = anyio.current_time()
            log.error("event_wait_failing", problem=str(error), instead="probing alone")
        self.problem = str(error)

    def _went_well(self) -> None:
        self._mute = self._deaf = False
        if self.problem is None:
            return
        now = anyio.current_time()
        self._fine_since = self._fine_since or now
        # A set that fails every other time must neither flood the log nor reset the pauses.
        if now - self._fine_since >= FINE_AFTER_SECONDS:
            since = self._failing_since or now
            log.info("event_wait_recovered", after_seconds=round(now - since, 1))
            self.problem = self._fine_since = self._failing_since = None
            self._backoff.reset()
