"""When an extender's process looks for garbage: never in what a complete ledger is made of."""

import gc
from collections.abc import Iterator

import anyio
import pytest

from agent.cli import extender
from agent.kit.tasks import Cell


@pytest.fixture(autouse=True)
def heap() -> Iterator[None]:
    gc.unfreeze()  # of whatever ran before
    yield
    gc.unfreeze()
    gc.enable()


async def test_a_complete_ledger_is_left_out_of_collections_until_it_is_dropped() -> None:
    complete = Cell(False)
    async with anyio.create_task_group() as group:
        group.start_soon(extender.keep_heap, complete)
        await anyio.wait_all_tasks_blocked()
        assert not gc.isenabled()  # while the lists come
        ledger = [{"node": [number]} for number in range(1000)]
        complete.publish(True)
        await anyio.wait_all_tasks_blocked()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 2 * len(ledger)
        assert not any(each is ledger for each in gc.get_objects())
        complete.publish(False)  # a watch is dead: the ledger is still there
        await anyio.wait_all_tasks_blocked()
        assert gc.get_freeze_count()
        group.cancel_scope.cancel()
    assert gc.get_freeze_count() == 0  # else it would stay in memory beside the next one


async def test_lists_that_do_not_come_do_not_keep_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extender, "LISTS_SECONDS", 0.01)
    async with anyio.create_task_group() as group:
        group.start_soon(extender.keep_heap, Cell(False))
        with anyio.fail_after(5):
            await anyio.sleep(0.02)
            while not gc.isenabled():
                await anyio.sleep(0.01)
        assert gc.get_freeze_count() == 0
        group.cancel_scope.cancel()
