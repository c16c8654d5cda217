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


async def keep_looking(look: Callable[[], Awaitable[float | None]], *cells: Cell[Any]) -> None:
    """Look now, after each change of any of `cells`, and after as many seconds as `look` answers, for ever.

    None: after a change alone. One that falls into a look is looked at afterwards.
    """
    news = anyio.Event()

    async with anyio.create_task_group() as group:
        group.start_soon(follow, lambda: news.set(), *cells)  # noqa: PLW0108  each time the newest
        while True:
            news = anyio.Event()
            with anyio.move_on_after(await look()):
                await news.wait()
