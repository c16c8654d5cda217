"""When the kubelet wrote the checkpoint that a reading has seen: what was granted later is not in it."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent.holdings import holdings
from agent.holdings.record import FILE_NAME, UNREAD
from agent.kit.tasks import Cell
from agent.kubelet import service as service_module
from agent.kubelet.service import DevicePluginService
from tests.unit.holdings.record_node import GPU, Node

A, B = "GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b"


class Clocked(Node):
    """Readings, and a write of the kubelet, at seconds that a test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(holdings, "monotonic", lambda: self.now)
        monkeypatch.setattr(holdings, "time_ns", lambda: self.wall(self.now))
        super().__init__(folder)

    def wall(self, at: float) -> int:
        return int((1_700_000_000 + at) * 1e9)

    def write(self, at: float, device: str = A) -> None:
        self.kubelet.records(("u", "main", device))
        os.utime(self.kubelet.folder / FILE_NAME, ns=(self.wall(at), self.wall(at)))

    async def written(self, now: float) -> float:
        """By a reading that begins at `now`."""
        self.now = now
        await self.watch.refresh()
        assert self.watch.newest.began == now
        return self.watch.newest.written


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clocked:
    return Clocked(tmp_path, monkeypatch)


async def test_it_was_written_after_the_last_reading_that_saw_another(node: Clocked) -> None:
    node.write(5.0)
    assert await node.written(10.0) < 0  # it may be of any age
    assert await node.written(20.0) < 0
    node.write(20.0, B)  # in the same tick
    assert await node.written(30.0) == 20.0
    assert await node.written(40.0) == 20.0
    node.write(41.0, B)  # the same, once more
    assert await node.written(50.0) == 40.0


async def test_a_file_that_comes_late_is_as_old_as_its_content(node: Clocked) -> None:
    """The kubelet writes it, waits for the disk, and puts it in place."""
    node.write(5.0)
    await node.written(10.0)
    node.write(9.0, B)
    assert await node.written(13.0) < 0
    node.write(14.0)
    assert await node.written(15.0) == 13.0


async def test_where_there_is_none_each_reading_stands_for_itself(node: Clocked) -> None:
    assert await node.written(10.0) == 10.0
    assert await node.written(20.0) == 20.0
    node.write(21.0)
    await node.written(25.0)
    node.write(26.0)
    assert await node.written(30.0) == 25.0


async def test_one_that_is_torn_for_a_moment_grows_no_younger(node: Clocked) -> None:
    """A plain init container's grant stands in no file that could be read."""
    node.write(5.0)
    await node.written(10.0)
    node.write(11.0, B)
    assert await node.written(12.0) == 10.0
    node.kubelet.tear()
    assert await node.written(20.0) == 10.0
    node.write(21.0)
    assert await node.written(25.0) == 12.0


async def test_what_two_readings_find_at_once_is_not_mixed_up(
    node: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has read what the kubelet wrote before; another has seen meanwhile what it wrote since."""
    node.write(5.0)
    await node.written(10.0)
    before = node.watch._checkpoint.entries  # type: ignore[union-attr]
    node.write(11.0, B)
    assert await node.written(12.0) == 10.0
    assert node.watch._written_after(before, 11.5, time.time_ns()) < 0
    file = node.watch._checkpoint
    assert file
    file.stamp = UNREAD  # a third cannot read it
    assert node.watch._written_after(file.entries, 13.0, time.time_ns()) == 10.0


@pytest.mark.parametrize("held", [False, True])
async def test_a_grant_counts_until_the_kubelet_has_written_who_got_it(
    node: Clocked, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """A file that it was writing as the grant was made comes into place later, and says nothing of that."""
    clock = SimpleNamespace(monotonic=lambda: node.now)
    monkeypatch.setattr(service_module, "time", clock)
    plugin = SimpleNamespace(resource=GPU, lists=Cell(b""))
    service = DevicePluginService(plugin, read=lambda: node.watch.newest)
    node.know("u", "train-0")
    node.know("v", "train-1", hides=True)
    node.write(5.0)
    await node.written(99.0)
    node.now = 100.0
    service._touch([[B]])
    node.write(100.1)
    for now in (100.5, 102.5, 103.0):
        await node.written(now)
        assert service.granted_lately() == {B}
    assert plugin.lists.version == 1  # sent again, by which the kubelet writes
    node.kubelet.records(("u", "main", A), *[("v", "prepare", B)] * held)
    os.utime(node.kubelet.folder / FILE_NAME, ns=(node.wall(103.1), node.wall(103.1)))
    await node.written(103.5)
    assert service.granted_lately() == frozenset()
    assert any(B in each.ids for each in node.watch.newest.holdings) is held
