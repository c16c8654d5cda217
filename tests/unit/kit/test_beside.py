"""An action beside a block begins where the block takes long, ends with it, and hides no failure."""

import anyio
import pytest

from agent.kit.tasks import beside
from tests.virtual_time import in_virtual_time


class Action:
    """Takes so many seconds, and may fail then."""

    def __init__(self, seconds: float, *, fails: bool = False) -> None:
        self.seconds, self.fails, self.began, self.ended = seconds, fails, -1.0, ""

    async def __call__(self) -> None:
        self.began = anyio.current_time()
        try:
            await anyio.sleep(self.seconds)
        except BaseException:
            self.ended = "cancelled"
            raise
        if self.fails:
            raise ValueError("failed")
        self.ended = "done"


@pytest.mark.parametrize(("lasts", "ended"), [(0.4, ""), (1.0, "cancelled"), (2.0, "done")])
@in_virtual_time
async def test_it_begins_late_and_is_over_with_the_block(lasts: float, ended: str) -> None:
    action, before = Action(1.0), anyio.current_time()
    async with beside(0.5, action):
        await anyio.sleep(lasts)
    assert anyio.current_time() - before == pytest.approx(lasts)
    assert action.ended == ended
    await anyio.sleep(5)
    assert action.ended == ended
    assert (action.began >= 0) is bool(ended)


@in_virtual_time
async def test_its_failure_is_that_of_the_block() -> None:
    with pytest.raises(ValueError, match="failed"):
        async with beside(0.5, Action(0.1, fails=True)):
            await anyio.sleep(1)


@in_virtual_time
async def test_block_that_is_cancelled_ends_it() -> None:
    action = Action(10.0)
    with anyio.move_on_after(1):
        async with beside(0.5, action):
            await anyio.sleep(20)
    assert action.ended == "cancelled"


@in_virtual_time
async def test_block_that_ends_at_once_goes_on_in_its_turn() -> None:
    turns: list[str] = []
    woken = anyio.Event()

    async def waits() -> None:
        await woken.wait()
        turns.append("woken")

    async with anyio.create_task_group() as group:
        group.start_soon(waits)
        await anyio.sleep(0.1)
        async with beside(0.5, Action(1.0)):
            woken.set()
        turns.append("block")
    assert turns == ["block", "woken"]
