"""Whatever fails, and wherever it is cut off: no taint stays, and no figure without a list."""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from agent.cluster.api import ApiRefused, ApiUnavailable
from agent.node import taint as taint_module
from tests.unit.node.memory_api import Act, MemoryApi
from tests.unit.node.world import CORE, GPU, NOTHING, PGPU, VGPU, Kubelet, World, world
from tests.virtual_time import in_virtual_time

GRACE_SECONDS = 10.0  # the chart's


async def refused(act: Act) -> bytes:
    raise ApiRefused(503, "the server is away")


async def forbidden(act: Act) -> bytes:
    raise ApiRefused(403, "nodes is forbidden")


async def lost(act: Act) -> bytes:
    raise ApiUnavailable("the connection broke before the request had left")


async def answer_lost(act: Act) -> bytes:
    act()
    raise ApiUnavailable("the connection broke before the answer came")


async def never_answered(act: Act) -> bytes:
    act()
    await anyio.sleep_forever()
    raise AssertionError


FAILURES = (refused, forbidden, lost, answer_lost, never_answered)


async def switch(node: World) -> None:
    await node.switch(VGPU)


async def stop(node: World) -> None:
    await node.stop()


@pytest.mark.parametrize("act", [switch, stop])
@pytest.mark.parametrize("failure", FAILURES)
@in_virtual_time
async def test_one_write_that_fails_leaves_no_taint(
    failure: Callable[[Act], Awaitable[bytes]], act: Callable[[World], Awaitable[None]]
) -> None:
    at = 0
    while True:
        async with world() as node:

            async def fail_one(number: int, carry_out: Act, at: int = at) -> bytes:
                return await failure(carry_out) if number == at else carry_out()

            node.api.interfere = fail_one
            await act(node)
            if act is stop:
                assert (node.api.tainted, node.api.allocatable) == (False, {})
            await node.settled()
            assert len(node.published) == 1
            if len(node.api.writes) <= at:
                break
        at += 1
    assert at >= 3


class _CutOff:
    """Awaits a coroutine and cancels a scope around it when it waits for the k-th time."""

    def __init__(self, inner: Coroutine[Any, Any, None], at: int, scope: anyio.CancelScope) -> None:
        self._inner, self._at, self._scope = inner, at, scope
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, None]:
        inner = self._inner.__await__()
        try:
            waited_for = next(inner)
            while True:
                self.waits += 1
                if self.waits == self._at:
                    self._scope.cancel()
                try:
                    sent = yield waited_for
                except BaseException as error:  # noqa: BLE001  handed on, as an await does
                    waited_for = inner.throw(error)
                else:
                    waited_for = inner.send(sent)
        except StopIteration:
            return


@pytest.mark.parametrize("act", [switch, stop])
@in_virtual_time
async def test_a_cancellation_at_any_await_leaves_no_taint(act: Callable[[World], Any]) -> None:
    at, waits = 0, 0
    while at <= waits:
        at += 1
        async with world() as node:
            with anyio.CancelScope() as scope:
                cut = _CutOff(act(node), at, scope)
                await cut
            await node.settled()
            waits = cut.waits
    assert at > 8  # it has that many awaits


@in_virtual_time
async def test_a_switch_in_good_weather() -> None:
    async with world() as node:
        began = anyio.current_time()
        await node.switch(VGPU)
        await node.settled()
        # What comes is offered after the taint has gone: a pod that is tried under it goes into its back-off.
        assert [one.what for one in node.api.writes] == ["taint", "status", "untaint", "status"]
        assert anyio.current_time() - began < 0.3


@in_virtual_time
async def test_what_is_written_need_not_be_seen() -> None:
    """The watch open but silent while writes succeed: once 62 patches in a minute, and the taint for ever."""
    async with world() as node:
        node.api.silent = True
        await node.switch(VGPU)
        await node.settled(10)
        await anyio.sleep(60)
        assert [one.what for one in node.api.writes] == ["taint", "status", "untaint", "status"]


@pytest.mark.parametrize("status", [429, 403])
@in_virtual_time
async def test_a_watch_that_is_refused_is_not_needed(status: int) -> None:
    async with world() as node:
        node.api.refuse_watch = status
        await node.switch(VGPU)
        await node.settled(10)
        await anyio.sleep(60)
        assert [one.what for one in node.api.writes] == ["taint", "status", "untaint", "status"]


@in_virtual_time
async def test_without_an_api_server_a_switch_goes_on() -> None:
    async with world() as node:

        async def away(number: int, act: Act) -> bytes:
            raise ApiUnavailable("no route to host")

        node.api.interfere = away
        node.api.refuse_watch = 503
        began = anyio.current_time()
        await node.switch(VGPU)
        assert anyio.current_time() - began < 15
        node.api.interfere, node.api.refuse_watch = None, 0
        await node.settled()


@in_virtual_time
async def test_a_slow_kubelet_gets_through_all_pods_and_a_stuck_one_holds_nothing_up() -> None:
    async with world() as node:
        pods = [f"pod-{number}" for number in range(5)]
        node.kubelet.unserved.update(pods)

        async def serve() -> None:
            for pod in pods:
                await anyio.sleep(15)
                node.kubelet.unserved.discard(pod)

        began = anyio.current_time()
        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            await node.switch(VGPU)
        assert 75 < node.published[0] - began < 76
        node.kubelet.unserved.add("stuck")
        began = anyio.current_time()
        await node.switch(PGPU)
        assert 20 <= anyio.current_time() - began < 22
        await node.settled()


@in_virtual_time
async def test_figures_follow_the_kubelet_and_not_the_list() -> None:
    """A tick that knows the old list finds nothing to write while the figures are not ahead of it."""
    async with world() as node:
        node.kubelet.mute = True
        async with anyio.create_task_group() as group:
            group.start_soon(node.switch, VGPU)
            await anyio.sleep(3)
            assert node.published
            assert (node.api.tainted, node.api.allocatable) == (True, {GPU: 8})
            node.kubelet.mute = False
        await node.settled()


# Of an agent that stops


@asynccontextmanager
async def slow(seconds: float) -> AsyncIterator[World]:
    """Every write is carried out and answered so late, whether or not somebody still waits for it."""
    async with world() as node:

        async def late(number: int, act: Act) -> bytes:
            return await node.api.carry_out_later(seconds, act)

        node.api.interfere = late
        yield node


@pytest.mark.parametrize("seconds", [0.1, 1, 2])
@in_virtual_time
async def test_a_stop_with_a_slow_api_server_leaves_neither_taint_nor_figures(seconds: float) -> None:
    async with slow(seconds) as node:
        began = anyio.current_time()
        await node.stop()
        assert (node.api.tainted, node.api.allocatable) == (False, {})
        assert anyio.current_time() - began < GRACE_SECONDS - 1


@pytest.mark.parametrize("seconds", [20, 1e9], ids=["20", "never"])
@in_virtual_time
async def test_a_stop_without_an_answer_ends_and_the_next_agent_undoes_it(seconds: float) -> None:
    async with slow(seconds) as node:
        began = anyio.current_time()
        await node.stop()
        ended = anyio.current_time()
        assert node.published[0] - began < 0.1
        assert ended - began < GRACE_SECONDS - 1
        (taint,) = node.api.of("taint")
        assert ended - taint.at >= 2 * taint_module.WRITE_SECONDS  # it could have been taken back
    api, kubelet = node.api, Kubelet()
    if seconds > 1000:
        return
    api.interfere, api.writes = None, []
    async with World(api, kubelet).running() as after:
        while not api.tainted:
            await anyio.sleep(0.01)
        came = anyio.current_time()
        await after.settled()
        assert anyio.current_time() - came < 1
        await anyio.sleep(60)
        await after.settled()


@in_virtual_time
async def test_a_stop_waits_for_a_pod_that_is_not_served_no_longer_than_its_share() -> None:
    async with world() as node:
        node.kubelet.unserved.add("stuck")
        began = anyio.current_time()
        await node.stop()
        assert 3 <= node.published[0] - began < 3.3
        assert (node.api.tainted, node.api.allocatable) == (False, {})
        assert anyio.current_time() - began < 4


@in_virtual_time
async def test_a_stop_in_the_middle_of_a_switch() -> None:
    async with world() as node, anyio.create_task_group() as group:
        node.kubelet.unserved.add("stuck")
        group.start_soon(node.switch, VGPU)
        await anyio.sleep(1)
        assert node.api.tainted
        began = anyio.current_time()
        await node.stop()
        assert anyio.current_time() - began < 4
        assert (node.api.tainted, node.api.allocatable) == (False, {})
        assert [one.what for one in node.api.writes] == ["taint", "status", "untaint"]
        group.cancel_scope.cancel()


@in_virtual_time
async def test_a_mute_kubelet_does_not_keep_a_stop_from_its_end() -> None:
    async with world() as node:
        node.kubelet.mute = True
        await node.stop()
        assert (node.api.tainted, node.api.allocatable) == (False, {})


@in_virtual_time
async def test_a_tick_of_the_kubelet_that_comes_after_the_figures_is_seen() -> None:
    async with world() as node:

        async def tick() -> None:
            await node.api.versions.wait_for(lambda _: not node.api.allocatable)
            await anyio.sleep(0.02)
            node.api.change(lambda now: now["status"]["allocatable"].update({GPU: "8"}))

        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            await node.stop()
        assert (node.api.tainted, node.api.allocatable) == (False, {})


@in_virtual_time
async def test_a_stop_of_an_agent_that_still_puts_right_what_another_left() -> None:
    """In its first seconds: the figures of before are not right yet, and so their taint is left alone."""
    api, kubelet = MemoryApi(), Kubelet({GPU: 8, CORE: 800}, reads=False)
    api.node["status"] = {"capacity": {CORE: "800"}, "allocatable": {CORE: "800"}}
    api.node["spec"]["taints"] = [{"key": "gpu-node-agent.io/switching", "effect": "NoSchedule"}]
    registered = {GPU: (8, 8)}
    async with World(api, kubelet, offered=lambda _: registered).running() as node:
        await anyio.sleep(2)
        seen = [api.tainted]
        registered[GPU] = (8, 0)
        await node.stop()
        seen.append(api.tainted)
        await anyio.sleep(20)
        assert [*seen, api.tainted] == [True, False, False]


@in_virtual_time
async def test_a_stop_with_lists_that_do_not_leave_and_a_kubelet_that_is_mute() -> None:
    """A stream that takes nothing: the time left is enough for the taint to go."""
    async with world() as node:
        node.kubelet.mute = True
        node.kubelet.unserved.add("stuck")

        async def publish() -> None:
            node.assignment.publish(NOTHING)
            await anyio.sleep(2)

        began = anyio.current_time()
        await node.parts.withdrawals.stop(publish)
        assert (node.api.tainted, node.api.allocatable) == (False, {})
        assert anyio.current_time() - began < GRACE_SECONDS


@in_virtual_time
async def test_a_stop_after_the_agents_own_tasks_have_ended() -> None:
    """A fatal task failed: all tasks are cancelled before the agent says that it ends."""
    async with world() as node:
        pass
    await node.stop()
    assert (node.api.tainted, node.api.allocatable) == (False, {})


@in_virtual_time
async def test_a_taint_that_comes_late_goes_at_once_and_not_in_a_storm() -> None:
    async with world() as node:

        def put_back(now: dict[str, Any]) -> None:
            now["spec"]["taints"] = [{"key": "gpu-node-agent.io/switching", "effect": "NoSchedule"}]

        for _ in range(100):
            node.api.change(put_back)
            await anyio.sleep(1)
        await node.settled()
        # Somebody who insists on it is met at ever longer intervals.
        assert 3 < len(node.api.of("untaint")) < 20
