"""An agent that stops: within its grace period, with neither taint nor figures left."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from agent.node import capacity as taint_module
from tests.unit.node.memory_api import Act, MemoryApi
from tests.unit.node.world import CORE, GPU, NOTHING, VGPU, Kubelet, World, world
from tests.virtual_time import in_virtual_time

GRACE_SECONDS = 10.0  # the chart's


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
async def test_a_stop_waits_for_the_other_half_of_what_a_container_is_being_given() -> None:
    """Its GPU stays on the second resource's list until then, and a tick of the kubelet writes that."""
    api, kubelet = MemoryApi(), Kubelet({GPU: 8, CORE: 800}, reads=False)
    api.node["status"] = {name: {GPU: "8", CORE: "800"} for name in ("capacity", "allocatable")}
    listed = {GPU: (8, 8), CORE: (800, 800)}

    async def admitting(node: World) -> None:
        await node.assignment.wait_for(lambda now: now is NOTHING)
        listed.update({GPU: (8, 1), CORE: (800, 0)})
        kubelet.known = {GPU: 1, CORE: 0}
        await anyio.sleep(0.5)
        listed[GPU] = (8, 0)
        kubelet.known = {GPU: 0, CORE: 0}

    async with (
        World(api, kubelet, offered=lambda _: dict(listed)).running() as node,
        anyio.create_task_group() as group,
    ):
        await anyio.sleep(2)
        group.start_soon(admitting, node)
        await node.stop()
        # A tick before the lists end with the agent.
        said = {name: str(count) for name, count in kubelet.known.items()}
        api.change(lambda now: now["status"]["allocatable"].update(said))
        assert (node.api.tainted, node.api.allocatable) == (False, {})
        group.cancel_scope.cancel()


@in_virtual_time
async def test_a_half_that_nobody_comes_for_does_not_keep_a_stop_from_its_end() -> None:
    api, kubelet = MemoryApi(), Kubelet({GPU: 1}, reads=False)
    api.node["status"] = {name: {GPU: "8"} for name in ("capacity", "allocatable")}
    async with World(api, kubelet, offered=lambda _: {GPU: (8, 1)}).running() as node:
        await anyio.sleep(2)
        began = anyio.current_time()
        await node.stop()
        assert anyio.current_time() - began < 3
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
        await node.withdrawals.stop(publish)
        assert (node.api.tainted, node.api.allocatable) == (False, {})
        assert anyio.current_time() - began < GRACE_SECONDS


@in_virtual_time
async def test_a_stop_after_the_agents_own_tasks_have_ended() -> None:
    """A fatal task failed: all tasks are cancelled before the agent says that it ends."""
    async with world() as node:
        pass
    await node.stop()
    assert (node.api.tainted, node.api.allocatable) == (False, {})
