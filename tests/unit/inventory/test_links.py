"""How the GPUs are connected, read while calls about one of them hang."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from agent.inventory.gpu_monitor import GpuMonitor
from agent.inventory.reducer import Connected
from agent.kit.tasks import Supervisor
from agent.model.gpu import Topology
from agent.nvml.event_watch import MOST_OF_ONE, WorkerThread
from agent.nvml.port import NvmlHung
from agent.settings import Settings
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from tests.pace import scaled


class Site:
    """A monitor of eight GPUs that only reads links, and what it read."""

    def __init__(self) -> None:
        self.machine = SimulatedMachine.create("dgx-h200")
        self.nvml = SimulatedNvml(self.machine)
        self.nvml.open()
        self.gpus = tuple(self.nvml.describe(index) for index in range(self.nvml.count()))
        self.calls = WorkerThread("calls", deadline=scaled(0.15))
        self.read: list[Topology] = []
        inventory: Any = SimpleNamespace(mailbox=self)
        self.monitor = GpuMonitor(Settings(), self.nvml, self.calls, inventory, Supervisor())

    async def post(self, message: Connected) -> None:
        self.read.append(message.topology)

    async def look(self) -> None:
        await self.monitor._read_links(self.gpus)

    def hang(self, call: str) -> None:
        self.machine.hang(call, 3)


@pytest.fixture
def site() -> Iterator[Site]:
    """Faults are released at the end, so that no thread outlives the test."""
    made = Site()
    yield made
    made.machine.clear_faults()
    made.calls.close()
    made.monitor.close()


@pytest.mark.parametrize("call", ["nvmlDeviceGetNvLinkState", "nvmlDeviceGetTopologyCommonAncestor"])
async def test_readings_that_hang_at_one_gpu_count_against_it_and_the_others_are_read(
    site: Site, call: str
) -> None:
    await site.look()
    whole = site.read.pop()
    site.hang(call)
    culprit = site.gpus[3].uuid
    for _ in range(MOST_OF_ONE):
        assert not site.calls.hangs(culprit)
        await site.look()
    assert not site.read
    assert site.calls.hangs(culprit)
    with pytest.raises(NvmlHung, match=f"about {culprit} hang"):
        await site.calls.run(threading.Event().wait, about=lambda: culprit)
    assert await site.calls.run(lambda: "others are asked", deadline=10) == "others are asked"
    await site.look()
    assert site.calls.stuck == MOST_OF_ONE, "no thread more"
    found = site.read.pop()
    others = [gpu.uuid for gpu in site.gpus if gpu.uuid != culprit]
    assert [found.pair(a, b) for a in others for b in others] == [
        whole.pair(a, b) for a in others for b in others
    ]
    assert found.gpus == whole.gpus, "it is left out of no list"
