"""Running the asynchronous part of a command: until an error ends it, or until a signal does."""

import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import anyio
import msgspec
import structlog

from agent.kit.tasks import FatalError, describe

if TYPE_CHECKING:
    from agent.cluster.api import KubeApi


# How many files and connections the process may have open.

log = structlog.get_logger()


def raise_limit() -> None:
    """Raise the soft limit to the hard one: where it is 1,024, it is so for programs that use select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("descriptor_limit_stays", limit=soft, wanted=hard, problem=str(error))


INTERRUPTED = 130  # the exit code


T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


def exit_code(failed: str, serve: Callable[[*Arguments], Awaitable[None]], *arguments: *Arguments) -> int:
    """Run `serve` to its end: an error is one line of the log, the event `failed`, and code 1."""
    raise_limit()
    try:
        anyio.run(serve, *arguments)
    except Exception as error:  # the last line of defence
        leaves = _leaves(error)
        foreseen = all(isinstance(leaf, FatalError) for leaf in leaves)
        problem = "; ".join(str(leaf) if foreseen else describe(leaf) for leaf in leaves)
        log.critical(failed, problem=problem, exc_info=None if foreseen else error)
        return 1
    return 0


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]


async def until_interrupted(act: Callable[[], Awaitable[T]]) -> T | None:
    """Run it until SIGTERM or SIGINT; None: it was interrupted, and has cleaned up.

    Process 1 of a container receives only the signals that it handles.
    """
    result: T | None = None
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as group:

            async def interrupt() -> None:
                async for _ in signals:
                    acting.cancel()

            group.start_soon(interrupt)
            with anyio.CancelScope() as acting:
                result = await act()
            group.cancel_scope.cancel()
    return result


def in_cluster(kubeconfig: Path | None, act: "Callable[[KubeApi], Awaitable[int]]", remedy: str = "") -> int:
    """Run it with a connection to the API server, until a signal; its exit code.

    1 after a line that says what failed; `remedy`: its end where there is no way to the API server.
    """
    from agent.cluster.api import ApiError, connect  # noqa: PLC0415  loads the API client
    from agent.cluster.lean import NoClusterAccess  # noqa: PLC0415

    async def connected() -> int:
        try:
            async with await connect(kubeconfig) as api:
                return await act(api)
        except NoClusterAccess as error:
            print(f"{error}{remedy}", file=sys.stderr)
        except (ApiError, msgspec.DecodeError) as error:
            print(error, file=sys.stderr)
        return 1

    code = anyio.run(until_interrupted, connected)
    return INTERRUPTED if code is None else code
