"""Waiting for what another thread or process brings about."""

from collections.abc import Callable

import anyio


async def eventually(condition: Callable[[], bool], within: float = 10.0) -> None:
    """Return as soon as the condition holds. Raises TimeoutError."""
    with anyio.fail_after(within):
        while not condition():
            await anyio.sleep(0.005)
