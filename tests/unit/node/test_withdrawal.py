"""Whatever fails, and wherever it is cut off: no taint stays, and no figure without a list."""

from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import anyio
import pytest

from agent.cluster.api import ApiRefused, ApiUnavailable
from tests.unit.node.memory_api import Act
from tests.unit.node.world import GPU, NOTHING, PGPU, VGPU, World, world
from tests.virtual_time import in_virtual_time


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


@in_virtual_time
async def test_figures_that_are_refused_are_written_ever_less_often() -> None:
    async with world() as node:

        async def refuse(number: int, carry_out: Act) -> bytes:
            del number
            return await refused(carry_out)

        node.api.interfere = refuse
        await node.withdrawals.withdraw(NOTHING, lambda: node.publish(NOTHING))
        assert 5 <= len(node.api.of("status")) <= 9  # in the 5 s of `SWITCH.patched`


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
