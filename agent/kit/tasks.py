"""Tasks that live long: the cells that wake them, what restarts them, and the pauses between their tries."""

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, TypeVarTuple

import anyio
import anyio.lowlevel
import structlog

# A cell holds the newest value: one writer, any number of readers, no lock, nothing queues up.

T = TypeVar("T")


class Cell(Generic[T]):
    """The newest value of something, with a version that grows at each `publish`.

    Slow readers skip values and always end on the newest. `publish` is synchronous, so that a
    writer can change its state and publish it without a point of cancellation in between.
    """

    def __init__(self, value: T) -> None:
        self._value = value
        self._version = 0
        self._changed = anyio.Event()

    @property
    def value(self) -> T:
        return self._value

    @property
    def version(self) -> int:
        """How often the cell was published."""
        return self._version

    def publish(self, value: T) -> None:
        """Replace the value and wake all readers. Only the owner of the cell calls this."""
        self._value = value
        self._version += 1
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def wait_change(self, seen: int) -> int:
        """Return the version as soon as it differs from `seen`; bound it with a cancel scope."""
        while self._version == seen:
            await self._changed.wait()
        return self._version

    async def wait_for(self, predicate: Callable[[T], bool]) -> T:
        """Return the first published value (the present one counts) that satisfies `predicate`."""
        while not predicate(self._value):
            await self._changed.wait()
        return self._value

    async def values(self) -> AsyncIterator[T]:
        """The present value, then each newest one; never ends. Holds no cancel scope: may be dropped."""
        seen = self._version
        yield self._value
        while True:
            seen = await self.wait_change(seen)
            yield self._value


# Tasks that live long: what wakes them, what restarts them, and the pauses between their tries.

# A bounded mailbox: many senders, one actor that reads.


class Mailbox(Generic[T]):
    """Messages for one actor, in order.

    `post` waits while the box is full: for what must not be lost. `offer` drops instead and counts
    the drop: for what the next reading will replace anyway. There is nothing to close (an anyio
    memory stream would warn when it is forgotten).
    """

    def __init__(self, size: int) -> None:
        self._messages: deque[T] = deque()
        self._places = anyio.Semaphore(size)
        self._arrived = anyio.Event()
        self.size = size
        self.dropped = 0

    @property
    def depth(self) -> int:
        return len(self._messages)

    async def post(self, message: T) -> None:
        """Put a message in the box, waiting for a place behind those who wait already."""
        await self._places.acquire()
        self._put(message)

    def offer(self, message: T) -> bool:
        """Put a message in the box if there is a place; answers whether there was."""
        try:
            self._places.acquire_nowait()
        except anyio.WouldBlock:
            self.dropped += 1
            return False
        self._put(message)
        return True

    async def __aiter__(self) -> AsyncIterator[T]:
        """The messages, for ever; for the one actor."""
        while True:
            while not self._messages:
                self._arrived = anyio.Event()
                await self._arrived.wait()
            message = self._messages.popleft()
            self._places.release()
            yield message

    def _put(self, message: T) -> None:
        self._messages.append(message)
        self._arrived.set()


# Doing something again when a cell changes.


async def follow(action: Callable[[], None], *cells: Cell[Any]) -> None:
    """Call `action` now and after each change of any of `cells`, for ever."""

    async def each(cell: Cell[Any]) -> None:
        async for _ in cell.values():
            action()

    async with anyio.create_task_group() as group:
        for cell in cells:
            group.start_soon(each, cell)


async def repeat(action: Callable[[], Awaitable[float | None]], *cells: Cell[Any]) -> None:
    """Call `action` now, after changes of any of `cells`, and after as many seconds as it answers, for ever.

    None waits for a change alone. Changes while it runs have it called once more.
    """
    changed = anyio.Event()

    def wake_up() -> None:
        changed.set()

    async with anyio.create_task_group() as group:
        group.start_soon(follow, wake_up, *cells)
        while True:
            changed = anyio.Event()
            with anyio.move_on_after(await action()):
                await changed.wait()


# Something else to be done where an answer takes long.


@asynccontextmanager
async def beside(seconds: float, action: Callable[[], Coroutine[Any, Any, Any]]) -> AsyncIterator[None]:
    """Call `action` once the block lasts that long, beside it and until its end at most.

    A block that ends before goes on in the same turn of the loop, which a group of tasks would give away.
    """
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[Any]] = []
    timer = loop.call_later(seconds, lambda: tasks.append(loop.create_task(action())))
    try:
        yield
    finally:
        timer.cancel()
        for task in tasks:
            if task.cancel():
                await asyncio.wait(tasks)
            else:
                task.result()  # what failed there fails here


# Standing back behind those who wait for an answer.

# A pair of resources takes a tenth of it.
BEHIND_SECONDS = 0.1
LOOK_SECONDS = 0.003


@dataclass(frozen=True, slots=True)
class Courtesy:
    """For work that nobody waits for: it takes the interpreter from calls that pods wait for.

    Also in a thread: the event loop gets the interpreter back a millisecond late each time that it has read
    or sent something. The slowest hundredth of all pairs stood beside a round of samples.
    """

    busy: Callable[[], bool] = lambda: False  # whether somebody waits now; from any thread

    async def calm(self) -> None:
        """Return as soon as nobody waits, or after a moment."""
        end = anyio.current_time() + BEHIND_SECONDS
        while self.busy() and anyio.current_time() < end:
            await anyio.sleep(LOOK_SECONDS)

    def in_pieces(self, pieces: Iterable[T]) -> Iterator[T]:
        """The pieces of some work in a thread, each as soon as nobody waits; a moment for all together."""
        left = round(BEHIND_SECONDS / LOOK_SECONDS)
        for piece in pieces:
            while left > 0 and self.busy():
                left -= 1
                time.sleep(LOOK_SECONDS)
            yield piece


# Growing pauses between tries, with jitter so that many nodes do not try in step.


@dataclass
class Backoff:
    """Pauses in seconds: `first`, then `factor` times as long each time, at most `longest`.

    Each is shortened at random by up to `jitter` of its length.
    """

    first: float
    longest: float
    factor: float = 2.0
    jitter: float = 0.2
    failures: int = 0

    def next(self) -> float:
        """The pause before the next try, in seconds."""
        pause = min(self.longest, self.first * self.factor**self.failures)
        if pause < self.longest:
            self.failures += 1
        return pause * (1 - self.jitter * random.random())  # noqa: S311  jitter, not a secret

    def reset(self) -> None:
        self.failures = 0


# Long-lived tasks: which may be restarted, which end the process, and how each is doing.

log = structlog.get_logger()

Ts = TypeVarTuple("Ts")

# A task that ran this long before it failed is taken to have been well: its back-off starts over.
HEALTHY_AFTER_SECONDS = 60.0


@dataclass
class TaskState:
    """How a supervised task is doing; read by probes and metrics."""

    name: str
    fatal: bool = False  # the process cannot go on without it
    running: bool = False
    restarts: int = 0
    last_error: str | None = None


@dataclass
class Supervisor:
    """Runs long-lived coroutines inside somebody's task group and remembers how they fare."""

    first_pause: float = 0.5
    longest_pause: float = 30.0
    states: dict[str, TaskState] = field(default_factory=dict)

    async def restarting(self, name: str, task: Callable[[*Ts], Awaitable[None]], *args: *Ts) -> None:
        """Run `task(*args)` for ever: when it fails or returns, start it again after a growing pause.

        `FatalError` and cancellation pass through.
        """
        state = self.states.setdefault(name, TaskState(name))
        backoff = Backoff(self.first_pause, self.longest_pause)
        while True:
            started = anyio.current_time()
            state.running = True
            try:
                await task(*args)
                problem = "it ended by itself"
            except FatalError:
                raise
            except anyio.get_cancelled_exc_class():
                # One that no scope asked for (a library cancelled the task by itself) would end the whole
                # group in silence.
                await anyio.lowlevel.checkpoint_if_cancelled()
                problem = "it was cancelled, and nobody had asked for that"
            except Exception as error:
                if _holds_fatal(error):
                    raise
                problem = describe(error)
            finally:
                state.running = False
            if anyio.current_time() - started >= HEALTHY_AFTER_SECONDS:
                backoff.reset()
            state.restarts += 1
            state.last_error = problem
            pause = backoff.next()
            log.error("task_failed", task=name, problem=problem, retry_in_seconds=round(pause, 2))
            await anyio.sleep(pause)

    async def fatal(self, name: str, task: Callable[[], Awaitable[None]]) -> None:
        """Run `task`; if it fails or returns, the process cannot go on."""
        state = self.states.setdefault(name, TaskState(name, fatal=True))
        state.running = True
        try:
            await task()
        except Exception as error:
            state.last_error = describe(error)
            foreseen = isinstance(error, FatalError)  # its text says all; a traceback would only hide it
            log.critical("fatal_task_failed", task=name, problem=state.last_error, exc_info=not foreseen)
            raise
        finally:
            state.running = False
        state.last_error = "it ended by itself"
        raise FatalError(f"task {name} ended by itself")


class FatalError(Exception):
    """The process cannot go on and must be restarted by the kubelet."""


def describe(error: BaseException) -> str:
    """An exception in one line; a group by its leaves."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(describe(leaf) for leaf in error.exceptions)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _holds_fatal(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_holds_fatal(leaf) for leaf in error.exceptions)
    return isinstance(error, FatalError)
