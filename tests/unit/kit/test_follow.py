"""Looking again when a cell changes, and after a pause."""

import math

import anyio
import anyio.lowlevel
import pytest

from agent.kit.cell import Cell
from agent.kit.follow import keep_looking


async def test_each_change_of_any_cell_has_it_looked_again() -> None:
    one, other, looks = Cell(0), Cell(0), []

    async def look() -> None:
        looks.append((one.value, other.value))

    async with anyio.create_task_group() as group:
        group.start_soon(keep_looking, look, one, other)
        await anyio.wait_all_tasks_blocked()
        one.publish(1)
        await anyio.wait_all_tasks_blocked()
        other.publish(1)
        await anyio.wait_all_tasks_blocked()
        seen = list(dict.fromkeys(looks))
        group.cancel_scope.cancel()
    assert seen == [(0, 0), (1, 0), (1, 1)]


async def test_a_change_that_falls_into_a_look_is_looked_at_afterwards() -> None:
    cell, seen = Cell(0), []

    async def look() -> float:
        seen.append(cell.value)
        if len(seen) == 1:
            await anyio.sleep(0.01)  # it is followed by now
            cell.publish(7)
        return math.inf

    async with anyio.create_task_group() as group:
        group.start_soon(keep_looking, look, cell)
        with anyio.fail_after(10):
            while 7 not in seen:
                await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()


@pytest.mark.parametrize("pause", [0.0, 0.001])
async def test_without_a_change_the_pause_decides(pause: float) -> None:
    looks = 0

    async def look() -> float:
        nonlocal looks
        looks += 1
        return pause

    async with anyio.create_task_group() as group:
        group.start_soon(keep_looking, look, Cell(0))
        with anyio.fail_after(10):
            while looks < 5:
                await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert looks >= 5
