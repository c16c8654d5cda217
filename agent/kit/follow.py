"""Doing something again when a cell changes."""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from agent.kit.cell import Cell


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
