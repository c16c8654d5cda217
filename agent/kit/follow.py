"""Doing something again when a cell changes."""

from collections.abc import Callable
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
