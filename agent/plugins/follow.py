"""What plugins follow: the record of who holds what, and doing something again when a cell changes."""

from collections.abc import Callable
from typing import Any, Protocol

import anyio

from agent.kit.cell import Cell
from agent.kubelet.podresources import PodList

LOOK_SECONDS = 1.0  # of the two seconds that an RPC may take


class Record(Protocol):
    """Who holds what (`agent.kubelet.holdings`)."""

    cell: Cell[PodList | None]

    async def look(self, deadline: float = LOOK_SECONDS) -> PodList:
        """By a reading of this moment. Raises PodResourcesUnavailable."""


async def follow(action: Callable[[], None], *cells: Cell[Any]) -> None:
    """Call `action` now and after each change of any of `cells`, for ever."""

    async def each(cell: Cell[Any]) -> None:
        async for _ in cell.values():
            action()

    async with anyio.create_task_group() as group:
        for cell in cells:
            group.start_soon(each, cell)
