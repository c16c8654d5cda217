"""Running a long-lived role: an error that ends it is one line of the log and exit code 1."""

from collections.abc import Awaitable, Callable
from typing import TypeVarTuple

import anyio
import structlog

from agent.kit.descriptors import raise_limit
from agent.kit.supervise import FatalError, describe

log = structlog.get_logger()

Arguments = TypeVarTuple("Arguments")


def exit_code(failed: str, serve: Callable[[*Arguments], Awaitable[None]], *arguments: *Arguments) -> int:
    """Run `serve` to its end; `failed` is the log event where an error ends it."""
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
