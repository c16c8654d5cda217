"""An action that is repeated: after changes, and after the time that it asks for."""

import anyio

from agent.kit.tasks import Cell, repeat


async def test_an_action_is_repeated_after_changes_and_when_it_asks_for_it() -> None:
    one, other = Cell(0), Cell(0)
    seen: list[tuple[int, int]] = []
    pause: float | None = None
    called = anyio.Event()

    async def action() -> float | None:
        seen.append((one.value, other.value))
        if one.value == 1:
            other.publish(1)  # while it runs: it is called once more
            one.publish(2)
        called.set()
        return pause

    async def again() -> None:
        nonlocal called
        called = anyio.Event()
        with anyio.fail_after(10):
            await called.wait()

    async with anyio.create_task_group() as group:
        group.start_soon(repeat, action, one, other)
        await again()
        one.publish(1)
        with anyio.fail_after(10):
            while seen[-1] != (2, 1):
                await again()
        pause = 0.001
        one.publish(3)
        await again()
        count = len(seen)
        await again()
        await again()
        assert len(seen) > count
        assert set(seen[count:]) == {(3, 1)}
        group.cancel_scope.cancel()
