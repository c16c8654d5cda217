"""Long-lived tasks: which may be restarted, which end the process, and how each is doing."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVarTuple

import anyio
import anyio.lowlevel
import structlog

from agent.kit.backoff import Backoff

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
