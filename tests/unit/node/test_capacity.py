"""node.status follows the lists once the kubelet has taken them in."""

from itertools import pairwise
from typing import Any

import anyio
import pytest

from agent.cluster.api import ApiRefused
from agent.node.capacity import ARRIVE_SECONDS, GONE_SECONDS
from tests.unit.node.memory_api import Act, MemoryApi
from tests.unit.node.world import CORE, GPU, NOTHING, PGPU, VGPU, Kubelet, World, world
from tests.virtual_time import in_virtual_time


def _tick(amounts: dict[str, str]) -> Any:
    return lambda node: node["status"]["allocatable"].update(amounts)


@in_virtual_time
async def test_a_bigger_list_is_patched_at_once_and_again_when_a_tick_writes_the_old_figure() -> None:
    async with world() as node:
        for _ in range(2):
            before = anyio.current_time()
            node.api.change(_tick({GPU: "0"}))
            await node.settled()
            assert anyio.current_time() - before < 0.1
        assert [one.what for one in node.api.writes] == ["status"] * 2


@in_virtual_time
async def test_patches_keep_a_distance_but_for_a_short_burst() -> None:
    async with world() as node:
        for _ in range(300):
            node.api.change(_tick({GPU: "0"}))
            await anyio.sleep(0.1)
        assert 25 < len(node.api.writes) < 36


@in_virtual_time
async def test_what_the_kubelet_does_not_know_of_is_not_offered() -> None:
    async with world() as node:
        # It has dropped us, for one: pods would find nothing.
        node.kubelet.known, node.kubelet.reads = {GPU: 0, CORE: 0}, False
        node.api.change(_tick({GPU: "0", CORE: "800"}))
        await anyio.sleep(60)
        assert node.api.allocatable == {}
        node.kubelet.reads = True
        await node.settled(15)


@in_virtual_time
async def test_a_resource_that_the_kubelet_takes_for_gone_is_registered_anew() -> None:
    """Another agent of the same name has left after we registered: the kubelet goes by the name."""
    async with world() as node:
        kubelet = node.kubelet
        kubelet.known, kubelet.reads = {GPU: 0, CORE: 0}, False
        node.api.change(_tick({GPU: "0"}))
        await anyio.sleep(9)
        assert kubelet.registered_again == []  # it may be busy
        await anyio.sleep(6)
        assert len(kubelet.registered_again) == 1
        # One that stays deaf is not kept busy with it.
        await anyio.sleep(3600)
        assert 5 < len(kubelet.registered_again) < 12
        kubelet.reads = True
        await node.settled(20)


@in_virtual_time
async def test_a_kubelet_that_is_only_slow_is_let_read() -> None:
    async with world() as node:
        kubelet = node.kubelet
        kubelet.known, kubelet.reads = {GPU: 3}, False  # of eight
        node.api.change(_tick({GPU: "3"}))
        await anyio.sleep(300)
        assert kubelet.registered_again == []


@in_virtual_time
async def test_a_mute_kubelet_is_offered_nothing_until_it_answers() -> None:
    async with world() as node:
        node.kubelet.mute = True
        node.api.change(_tick({GPU: "0"}))
        await anyio.sleep(60)
        assert node.api.writes == []
        node.kubelet.mute = False
        await node.settled(15)
        assert node.kubelet.registered_again == []


@in_virtual_time
async def test_a_gpu_that_fails_is_not_offered_while_the_kubelet_is_mute() -> None:
    async with world() as node:
        node.kubelet.mute = True
        node.assignment.publish(NOTHING)
        node.capacity.wake()
        await node.settled(1)


@in_virtual_time
async def test_lists_that_change_again_before_the_kubelet_has_them_hold_nothing_up() -> None:
    async with world() as node:
        node.kubelet.mute = True
        async with anyio.create_task_group() as group:
            group.start_soon(node.switch, VGPU)
            await anyio.sleep(1)
            await node.publish(PGPU)
            node.kubelet.mute = False
        await node.publish(PGPU)
        node.capacity.wake()
        await node.settled()


@in_virtual_time
async def test_a_kubelet_that_answers_slowly_is_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    async with world() as node:

        async def slow() -> frozenset[str]:
            asked.append(anyio.current_time())
            await anyio.sleep(0.2)
            return frozenset({"a"}) if len(asked) < 3 else frozenset()

        monkeypatch.setattr(node.withdrawals, "_unserved", slow)
        await node.switch(VGPU)
    # Twice the time of an answer between two questions.
    assert min(after - before for before, after in pairwise(asked[:3])) >= 0.59


@in_virtual_time
async def test_a_status_that_cannot_be_patched_is_tried_at_ever_longer_intervals() -> None:
    async with world() as node:

        async def forbidden(number: int, act: Act) -> bytes:
            raise ApiRefused(403, "nodes/status is forbidden")

        node.api.interfere = forbidden
        node.api.change(_tick({GPU: "0"}))
        await anyio.sleep(120)
        assert 5 < len(node.api.writes) < 20
        assert node.capacity.problem == "nodes/status is forbidden"
        node.api.interfere = None
        await node.settled(15)
        assert node.capacity.problem is None


# What an agent before this one left


@in_virtual_time
async def test_what_a_killed_agent_left_is_taken_back_before_its_taint_goes() -> None:
    """Killed on its way from vGPU to pGPU: figures and taint stand, and the kubelet has none of it."""
    api, kubelet = MemoryApi(), Kubelet({GPU: 8, CORE: 0})
    api.node["status"] = {"capacity": {GPU: "8", CORE: "800"}, "allocatable": {GPU: "0", CORE: "800"}}
    api.node["spec"]["taints"] = [{"key": "gpu-node-agent.io/switching", "effect": "NoSchedule"}]
    registered: dict[str, tuple[int, int]] = {}
    async with World(api, kubelet, offered=lambda _: registered).running() as node:
        await anyio.sleep(1)
        # Nothing is offered yet: pods that come now would find the next agent half registered.
        assert (api.tainted, api.allocatable) == (True, {})
        registered[GPU] = (8, 8)
        node.capacity.wake()
        with anyio.fail_after(5):
            while api.tainted or api.allocatable != {GPU: 8}:
                await anyio.sleep(0.01)
        assert api.writes[0].what == "status"


@in_virtual_time
async def test_no_tick_brings_back_what_neither_kubelet_nor_agent_has() -> None:
    """A kubelet without its checkpoint, and an agent that may offer nothing: storm 1000153."""
    api, kubelet = MemoryApi(), Kubelet()
    api.node["status"] = {"capacity": {CORE: "800"}, "allocatable": {CORE: "800"}}

    def tick(node: dict[str, Any]) -> None:
        node["status"]["allocatable"] = dict(node["status"]["capacity"])

    async with World(api, kubelet, offered=lambda _: {}).running():
        await anyio.sleep(8)
        for _ in range(3):
            api.change(tick)
            await anyio.sleep(10)
            assert api.allocatable == {}
    assert len(api.of("status")) == 1


@in_virtual_time
async def test_what_another_agent_offers_is_left_alone() -> None:
    api, kubelet = MemoryApi(), Kubelet({GPU: 8})
    api.node["status"] = {"capacity": {GPU: "8"}, "allocatable": {GPU: "8"}}
    async with World(api, kubelet, offered=lambda _: {}).running():
        await anyio.sleep(15)
        asked = kubelet.asked
        await anyio.sleep(60)
        # Once the agent has settled, it does not ask for ever.
        assert kubelet.asked == asked > 0
    assert api.writes == []


@in_virtual_time
async def test_a_taint_of_before_goes_in_the_end_though_the_status_cannot_be_patched() -> None:
    api, kubelet = MemoryApi(), Kubelet({GPU: 0})
    api.node["status"] = {"capacity": {GPU: "8"}, "allocatable": {GPU: "8"}}
    api.node["spec"]["taints"] = [{"key": "gpu-node-agent.io/switching", "effect": "NoSchedule"}]

    async def no_status(number: int, act: Act) -> bytes:
        if api.writes[number].what == "status":
            raise ApiRefused(403, "nodes/status is forbidden")
        return act()

    api.interfere = no_status
    async with World(api, kubelet, offered=lambda _: {}).running():
        await anyio.sleep(9)
        assert api.tainted
        await anyio.sleep(2)
        assert not api.tainted


@in_virtual_time
async def test_growth_waits_for_the_end_of_a_withdrawal() -> None:
    async with world() as node:
        async with anyio.create_task_group() as group:
            node.kubelet.unserved = {"bound a moment ago"}
            group.start_soon(node.switch, VGPU)
            await anyio.sleep(1)
            node.api.change(_tick({GPU: "4"}))  # a tick of the kubelet that had read an older list
            await anyio.sleep(GONE_SECONDS + ARRIVE_SECONDS + 1)
            assert [one.what for one in node.api.writes].count("status") == 0
            assert node.api.allocatable == {GPU: 4}
            node.kubelet.unserved.clear()
        await node.settled()
        assert node.api.allocatable == {CORE: 800}
