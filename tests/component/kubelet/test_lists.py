"""The effect of list messages on the node's figures."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from agent.simulator.kubelet import EmbeddedKubelet, Timings
from tests.component.kubelet.conftest import FAST
from tests.component.kubelet.peer import GPU, V1BETA1, Plugin
from tests.component.kubelet.waiting import eventually

OVER_THE_LIMIT = 4 * 1024 * 1024 + 1


@dataclass
class Clock:
    """Time that tests move."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


async def test_each_message_replaces_the_whole_list(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices={"a": True, "b": True}).serving() as plugin:
            await eventually(lambda: kubelet.allocatable.get(GPU) == 2)
            plugin.publish({"c": True})
            await eventually(lambda: kubelet.capacity[GPU] == 1)


async def test_capacity_counts_all_and_allocatable_the_healthy(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        devices = {"a": True, "b": False, "c": True}
        with Plugin(root / "plugins_registry/p.sock", devices=devices).serving():
            await eventually(lambda: kubelet.capacity.get(GPU) == 3)
            assert kubelet.allocatable[GPU] == 2


async def test_health_other_than_healthy_is_unhealthy(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices={"a": True}).serving() as plugin:
            await eventually(lambda: kubelet.allocatable.get(GPU) == 1)
            message = V1BETA1.ListAndWatchResponse()
            message.devices.add(ID="a", health="healthy")
            plugin.publish_raw(message)
            await eventually(lambda: kubelet.allocatable.get(GPU) == 0)
            assert kubelet.capacity[GPU] == 1


async def test_empty_list_makes_a_key_with_zero(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock").serving():
            await eventually(lambda: GPU in kubelet.allocatable)
            assert (kubelet.allocatable[GPU], kubelet.capacity[GPU]) == (0, 0)


async def test_lists_reach_the_node_only_at_its_tick(root: Path) -> None:
    kubelet = EmbeddedKubelet(root, status_tick=3600, timings=replace(FAST, first_status=60.0))
    lists: list[int] = []
    (root / "plugins_registry").mkdir()
    with Plugin(root / "plugins_registry/p.sock", devices={"a": True}).serving() as plugin:
        async with kubelet.running():
            with kubelet.observing_lists(lambda _, devices: lists.append(len(devices))):
                await eventually(lambda: kubelet.allocatable.get(GPU) == 1)
                plugin.publish({"a": True, "b": True})
                await eventually(lambda: lists[-1:] == [2])
                assert kubelet.allocatable[GPU] == 1


async def test_stream_end_makes_all_unhealthy_and_five_minutes_later_none(root: Path) -> None:
    clock = Clock()
    kubelet = EmbeddedKubelet(root, status_tick=0.02, timings=Timings(registry_poll=0.02, clock=clock))
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices={"a": True, "b": True}).serving() as plugin:
            await eventually(lambda: kubelet.allocatable.get(GPU) == 2)
            plugin.end_streams()
            await eventually(lambda: kubelet.allocatable[GPU] == 0)
            assert kubelet.capacity[GPU] == 2
            clock.now = 299.0
            with pytest.raises(TimeoutError):
                await eventually(lambda: kubelet.capacity[GPU] != 2, within=0.2)
            clock.now = 301.0
            await eventually(lambda: kubelet.capacity[GPU] == 0)
            assert kubelet.allocatable[GPU] == 0  # the key stays


async def test_message_above_4_mib_ends_the_stream(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices={"a": True}).serving() as plugin:
            await eventually(lambda: kubelet.allocatable.get(GPU) == 1)
            message = V1BETA1.ListAndWatchResponse()
            message.devices.add(ID="x" * OVER_THE_LIMIT, health="Healthy")
            plugin.publish_raw(message)
            await eventually(lambda: plugin.streams == 0)
            await eventually(lambda: kubelet.allocatable[GPU] == 0)


async def test_message_just_below_4_mib_arrives(kubelet: EmbeddedKubelet, root: Path) -> None:
    async with kubelet.running():
        with Plugin(root / "plugins_registry/p.sock", devices={"a": True}).serving() as plugin:
            await eventually(lambda: kubelet.allocatable.get(GPU) == 1)
            message = V1BETA1.ListAndWatchResponse()
            message.devices.add(ID="x" * (OVER_THE_LIMIT - 64), health="Healthy")
            message.devices.add(ID="b", health="Healthy")
            assert message.ByteSize() < OVER_THE_LIMIT
            plugin.publish_raw(message)
            await eventually(lambda: kubelet.allocatable[GPU] == 2)


async def test_node_without_a_checkpoint_starts_from_zero(kubelet: EmbeddedKubelet, root: Path) -> None:
    kubelet.api.set_node_status({GPU: 8}, {GPU: 8})
    async with kubelet.running():
        assert kubelet.allocatable[GPU] == 0
