"""Work that a signal ends in order."""

import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

T = TypeVar("T")


async def until_interrupted(act: Callable[[], Awaitable[T]]) -> T | None:
    """Run it until SIGTERM or SIGINT; None: it was interrupted, and has cleaned up.

    Process 1 of a container receives only the signals that it handles.
    """
    result: T | None = None
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as group:

            async def obey() -> None:
                async for _ in signals:
                    acting.cancel()

            group.start_soon(obey)
            with anyio.CancelScope() as acting:
                result = await act()
            group.cancel_scope.cancel()
    return result
