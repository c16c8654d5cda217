"""Cells: newest value wins, no wake-up is lost, readers may be dropped."""

import anyio
import pytest

from agent.kit.tasks import Cell


async def test_readers_poll_the_newest_value() -> None:
    cell = Cell("a")
    assert (cell.value, cell.version) == ("a", 0)
    cell.publish("b")
    cell.publish("c")
    assert (cell.value, cell.version) == ("c", 2)


def test_a_cell_can_be_made_and_published_before_the_loop_runs() -> None:
    cell = Cell(0)
    cell.publish(1)

    async def read() -> int:
        with anyio.fail_after(30):
            return await cell.wait_for(lambda value: value == 1)

    assert anyio.run(read) == 1


async def test_a_change_before_the_wait_is_not_missed() -> None:
    cell = Cell(0)
    seen = cell.version
    cell.publish(1)
    with anyio.fail_after(30):
        assert await cell.wait_change(seen) == 1


async def test_every_waiting_reader_wakes() -> None:
    cell = Cell(0)
    woken = []

    async def read(name: str) -> None:
        await cell.wait_change(0)
        woken.append((name, cell.value))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            for name in "abc":
                group.start_soon(read, name)
            await anyio.wait_all_tasks_blocked()
            cell.publish(7)
    assert sorted(woken) == [("a", 7), ("b", 7), ("c", 7)]


async def test_a_slow_reader_skips_values_and_ends_on_the_newest() -> None:
    cell = Cell(0)
    seen: list[int] = []

    async def read() -> None:
        async for value in cell.values():
            seen.append(value)
            if value == 100:
                return
            await anyio.sleep(0.001)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            for value in range(1, 101):
                cell.publish(value)
    assert seen[0] == 0
    assert seen[-1] == 100
    assert len(seen) < 100


async def test_wait_for_takes_the_present_value() -> None:
    with anyio.fail_after(30):
        assert await Cell(5).wait_for(lambda value: value > 3) == 5


async def test_a_cancelled_reader_leaves_nothing_behind() -> None:
    cell = Cell(0)
    with anyio.move_on_after(0.01) as scope:
        await cell.wait_change(0)
    assert scope.cancelled_caught
    cell.publish(1)
    with anyio.fail_after(30):
        assert await cell.wait_change(0) == 1


async def test_a_failing_predicate_reaches_the_reader() -> None:
    with pytest.raises(ZeroDivisionError):
        await Cell(0).wait_for(lambda value: 1 / value > 0)
