"""Processes of static pods without mirrors, whose UIDs nobody says: which of them have ended."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import anyio
import pytest

from agent.holdings import holdings
from agent.holdings.record import LAG_SECONDS
from agent.model.cgroup import ContainerRef
from agent.modes.withholding import Departed, Lingering
from tests.unit.holdings.record_node import Node

A = "GPU-00000000-0000-0000-0000-00000000000a"
MONITOR, LATER = "monitor-node1", "proxy-node1"
UID = "a" * 32


class Host(Node):
    """With a process on its GPU, of a pod that is known by its cgroup alone."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.now = 0.0
        self.kubelet.records()
        self.lingering = Lingering(
            self.watch.gpus_by_pod,
            self._processes,
            lambda pids: {pid: ContainerRef(UID, "") for pid in pids},
            self.watch.holders,
            Departed(
                lambda: (A,),
                self._pods,
                self.watch.known_pods,
                self.watch.take_vanished,
                self.watch.may_be_static,
            ),
        )

    async def _processes(self, gpus: Collection[str]) -> Mapping[str, Collection[int]]:
        await anyio.lowlevel.checkpoint()
        return dict.fromkeys(gpus, (7,))

    def _pods(self, pids: Iterable[int]) -> Mapping[int, str]:
        return dict.fromkeys(pids, UID)

    async def withheld(self, *pods: str) -> bool:
        """Whether the GPU is, long after the kubelet listed these for the first time."""
        self.kubelet.pods = {pod: {"main": ""} for pod in pods}
        for _ in range(2):
            await self.held()
            await self.lingering.look()
            self.now += LAG_SECONDS + 1
            self.heard = self.now
            await self.lingering.look()
        return bool(self.lingering.found)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host(tmp_path)
    monkeypatch.setattr(holdings, "monotonic", lambda: host.now)
    return host


async def test_one_that_ended_before_is_none_that_comes_later(host: Host) -> None:
    assert await host.withheld()
    assert await host.withheld(LATER)
    host.kubelet.restart()
    assert await host.withheld()
    assert await host.withheld(LATER)


@pytest.mark.parametrize("while_away", [False, True])
async def test_one_that_a_kubelet_lists_again_once_it_has_started_keeps_no_gpu(
    host: Host, *, while_away: bool
) -> None:
    """It lists one pod after the other; who comes in the meantime is none of before."""
    assert not await host.withheld(MONITOR)
    for _ in range(2):
        host.kubelet.restart()
        assert await host.withheld()
    if while_away:
        # Others hide it, as before.
        assert await host.withheld(LATER)
    assert not await host.withheld(MONITOR, *[LATER] * while_away)
    assert not host.lingering.unsettled
    assert await host.withheld()


@pytest.mark.parametrize("named", [False, True])
async def test_one_that_ended_is_none_of_its_name_that_comes_later(host: Host, *, named: bool) -> None:
    """Its kubelet listed it no more, or its mirror said another UID."""
    assert not await host.withheld(MONITOR)
    if named:
        host.know("b" * 32, MONITOR)
        assert await host.withheld(MONITOR)
        host.pods.clear()
    else:
        assert await host.withheld()
    assert await host.withheld(MONITOR)
    host.kubelet.restart()
    assert await host.withheld()
    assert await host.withheld(MONITOR)
