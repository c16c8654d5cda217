"""Supervision: restarts with growing pauses, fatal tasks, cancellation."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import anyio
import pytest

from agent.kit.tasks import FatalError, Supervisor, describe

Logs = list[MutableMapping[str, Any]]


def quick() -> Supervisor:
    return Supervisor(first_pause=0.001, longest_pause=0.01)


async def test_a_failing_task_is_started_again_and_counted(logs: Logs) -> None:
    supervisor = quick()
    tries = 0

    async def task() -> None:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise OSError("no luck")
        await anyio.sleep_forever()

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(supervisor.restarting, "task", task)
            while tries < 4:
                await anyio.sleep(0.001)
            state = supervisor.states["task"]
            assert (state.running, state.restarts, state.fatal) == (True, 3, False)
            group.cancel_scope.cancel()
    assert not state.running
    assert state.last_error == "OSError: no luck"
    told = [event["problem"] for event in logs if event["event"] == "task_failed"]
    assert told == ["OSError: no luck"] * 3


async def test_a_task_that_returns_is_started_again() -> None:
    supervisor = quick()
    runs = 0

    async def task() -> None:
        nonlocal runs
        runs += 1

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(supervisor.restarting, "task", task)
            while runs < 3:
                await anyio.sleep(0.001)
            group.cancel_scope.cancel()
    assert supervisor.states["task"].last_error == "it ended by itself"


async def test_the_pauses_grow_to_the_longest(logs: Logs) -> None:
    supervisor = Supervisor(first_pause=0.001, longest_pause=0.004)

    async def task() -> None:
        raise OSError

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(supervisor.restarting, "task", task)
            while supervisor.states.get("task") is None or supervisor.states["task"].restarts < 6:
                await anyio.sleep(0.001)
            group.cancel_scope.cancel()
    assert supervisor.states["task"].last_error == "OSError"


async def test_a_group_of_errors_is_told_by_its_leaves() -> None:
    supervisor = quick()

    async def fails() -> None:
        raise ValueError("leaf")

    async def task() -> None:
        async with anyio.create_task_group() as inner:
            inner.start_soon(fails)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(supervisor.restarting, "task", task)
            while not (supervisor.states.get("task") and supervisor.states["task"].last_error):
                await anyio.sleep(0.001)
            group.cancel_scope.cancel()
    assert supervisor.states["task"].last_error == "ValueError: leaf"


@pytest.mark.parametrize("wrapped", [False, True])
async def test_a_fatal_error_passes_through(wrapped: bool) -> None:
    error: Exception = FatalError("a new process must help")
    if wrapped:
        error = ExceptionGroup("", [ValueError("x"), ExceptionGroup("", [error])])

    async def task() -> None:
        raise error

    with anyio.fail_after(5), pytest.raises(type(error)):
        await quick().restarting("task", task)


async def test_cancellation_passes_through_also_in_the_pause() -> None:
    supervisor = Supervisor(first_pause=60)

    async def task() -> None:
        raise OSError

    with anyio.move_on_after(0.02) as scope:
        await supervisor.restarting("task", task)
    assert scope.cancelled_caught
    assert supervisor.states["task"].restarts == 1
    assert not supervisor.states["task"].running


async def test_a_fatal_task_ends_its_group_when_it_fails(logs: Logs) -> None:
    supervisor = quick()

    async def task() -> None:
        raise ValueError("gone")

    async def run() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(supervisor.fatal, "inventory", task)
            await anyio.sleep_forever()

    with anyio.fail_after(5), pytest.raises(ExceptionGroup) as caught:
        await run()
    assert caught.group_contains(ValueError, match="gone")
    state = supervisor.states["inventory"]
    assert (state.fatal, state.running, state.last_error) == (True, False, "ValueError: gone")
    assert [event["task"] for event in logs if event["event"] == "fatal_task_failed"] == ["inventory"]


async def test_a_fatal_task_must_not_return() -> None:
    async def task() -> None:
        return

    with pytest.raises(FatalError, match="task inventory ended by itself"):
        await quick().fatal("inventory", task)


async def test_a_cancelled_fatal_task_is_no_failure(logs: Logs) -> None:
    supervisor = quick()
    with anyio.move_on_after(0.01) as scope:
        await supervisor.fatal("inventory", anyio.sleep_forever)
    assert scope.cancelled_caught
    state = supervisor.states["inventory"]
    assert (state.running, state.last_error) == (False, None)
    assert logs == []


def test_exceptions_in_one_line() -> None:
    assert describe(ValueError()) == "ValueError"
    group = BaseExceptionGroup("", [ValueError("a"), BaseExceptionGroup("", [KeyError("b")])])
    assert describe(group) == "ValueError: a; KeyError: 'b'"


async def test_a_cancellation_that_nobody_asked_for_is_a_failure_like_others() -> None:
    supervisor = Supervisor(first_pause=0.001)
    lives = 0

    async def cancelled_by_a_library() -> None:
        nonlocal lives
        lives += 1
        if lives < 3:
            raise asyncio.CancelledError
        await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(supervisor.restarting, "odd", cancelled_by_a_library)
        with anyio.fail_after(5):
            while lives < 3:
                await anyio.sleep(0.001)
        # One that was asked for ends it, as ever.
        group.cancel_scope.cancel()
    assert supervisor.states["odd"].restarts == 2
    assert "nobody had asked" in (supervisor.states["odd"].last_error or "")
