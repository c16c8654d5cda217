"""EXCLUSIVE_PROCESS of a GPU: held while its daemon serves, given back after, whatever comes between."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from agent.kit.tasks import Cell
from agent.model.gpu import Gpu
from agent.model.modes import Assignment, GpuMode, Mode
from agent.mps import daemon_manager, processes
from agent.mps.binary import Program
from agent.mps.compute_mode import RECORD
from agent.mps.daemon_manager import DaemonManager
from agent.mps.daemon_parts import EventReason
from agent.mps.directories import Directories
from agent.nvml.port import ComputeMode
from tests.component.mps.keeping import OPTIONS, Modes, Reports
from tests.component.mps.test_daemon_manager import daemons, gpu, running

ONE = gpu(0)
EXCLUSIVE, DEFAULT = ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.DEFAULT


class Node:
    """A node whose agent comes and goes."""

    def __init__(self, run: Path, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(daemon_manager, "LEFTOVER_SECONDS", 0.1)
        self.run, self.program = run, program
        self.modes, self.reports = Modes(), Reports()
        self.folders = Directories.of(run, ONE.uuid)

    def agent(self, exclusive: bool = True) -> DaemonManager:
        options = replace(OPTIONS, exclusive=exclusive)
        return DaemonManager(
            self.run, lambda: self.program, self.modes, self.reports, options, set_up_seconds=20.0
        )

    @property
    def mode(self) -> ComputeMode:
        return self.modes.modes.get(ONE.uuid, DEFAULT)

    async def left_by_an_agent(self, manager: DaemonManager, each: Gpu = ONE) -> None:
        async with running(manager):
            await manager.set_up(each)
        assert self.modes.modes[each.uuid] is EXCLUSIVE

    async def until(self, true: Callable[[], bool]) -> None:
        with anyio.fail_after(20):
            while not true():
                await anyio.sleep(0.02)


@pytest.fixture
def node(run_folder: Path, newest: Program, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(run_folder, newest, monkeypatch)


def offered_as(mode: Mode) -> Cell[Assignment]:
    return Cell(Assignment({ONE.uuid: GpuMode(mode)}))


@pytest.mark.parametrize(
    ("restarted", "mode"), [(False, Mode.PGPU), (True, Mode.PGPU), (True, Mode.OFF)], ids=str
)
async def test_exclusive_mode_is_given_back(node: Node, restarted: bool, mode: Mode) -> None:
    """NVML says nothing while the daemon is stopped; the next look, or the next agent, puts it right.

    Off is what GPUs of a node in mode mps are once MPS was switched off by the chart's values.
    """
    manager = node.agent()
    await node.left_by_an_agent(manager)
    if restarted:
        manager = node.agent()
    async with running(manager, offered_as(mode)):
        node.modes.away = True
        await manager.tear_down(ONE)
        assert await daemons(node.run, ONE.uuid) == []
        assert node.mode is EXCLUSIVE
        assert [kind for kind, *_ in node.reports.told] == [EventReason.LEFT]
        assert "NVML did not answer" in manager.leftovers[ONE.uuid]
        node.modes.away = False
        await node.until(lambda: node.mode is DEFAULT)
        await node.until(lambda: not manager.leftovers)
    assert len(node.reports.told) == 1  # once, however often it was tried


async def test_a_lost_gpu_is_given_up_until_it_comes_back(node: Node) -> None:
    await node.left_by_an_agent(manager := node.agent())
    node.modes.lost.add(ONE.uuid)
    async with running(manager, offered_as(Mode.PGPU)):
        await manager.tear_down(ONE)
        assert not await anyio.Path(node.folders.pipe).exists()
        assert not node.reports.told
        node.modes.lost.clear()
        await node.until(lambda: node.mode is DEFAULT)


async def test_a_daemon_that_cannot_be_ended_keeps_its_mode_and_is_told_of(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPS was switched off by the chart's values: the agent is in a PID namespace of its own from then on."""
    await node.left_by_an_agent(node.agent())
    manager = node.agent()
    with monkeypatch.context() as patch:
        patch.setattr(processes, "_own", lambda *_, **__: False)
        async with running(manager, offered_as(Mode.PGPU)):
            await node.until(lambda: ONE.uuid in manager.leftovers)
            await anyio.sleep(0.5)
    assert [kind for kind, *_ in node.reports.told] == [EventReason.LEFT]
    assert "by hand: echo quit | CUDA_MPS_PIPE_DIRECTORY=" in node.reports.told[0][2]
    assert node.mode is EXCLUSIVE
    assert len(await daemons(node.run, ONE.uuid)) == 1
    assert await anyio.Path(node.folders.pipe).exists()
    async with running(manager, offered_as(Mode.OFF)):
        await node.until(lambda: node.mode is DEFAULT and ONE.uuid not in manager.leftovers)
    assert not await anyio.Path(node.folders.pipe).exists()


async def test_an_administrators_own_mode_is_told_of_and_left(node: Node) -> None:
    manager = node.agent()
    node.modes.modes[ONE.uuid] = EXCLUSIVE
    async with running(manager, offered_as(Mode.PGPU)) as assignment:
        await node.until(lambda: bool(node.reports.told))
        assert [kind for kind, *_ in node.reports.told] == [EventReason.OTHERS_MODE]
        # It is as it was after the GPU has been in mode mps.
        await manager.set_up(ONE)
        assignment.publish(Assignment({ONE.uuid: GpuMode(Mode.MPS)}))
        await manager.tear_down(ONE)
        assignment.publish(Assignment({ONE.uuid: GpuMode(Mode.PGPU)}))
        await node.until(lambda: len(node.reports.told) == 2)
        assert node.mode is EXCLUSIVE
        # Once they have put it right, nothing is reported any more.
        node.modes.modes[ONE.uuid] = DEFAULT
        await node.until(lambda: not manager.leftovers)


async def test_daemons_of_agents_that_kept_no_record_are_given_back(node: Node) -> None:
    await node.left_by_an_agent(node.agent())
    await anyio.to_thread.run_sync((node.folders.root / RECORD).unlink)
    async with running(manager := node.agent()):
        await manager.set_up(ONE)
        await manager.tear_down(ONE)
    assert node.mode is DEFAULT


async def test_it_is_given_back_though_the_configuration_wants_none_any_more(node: Node) -> None:
    await node.left_by_an_agent(node.agent())
    async with running(manager := node.agent(exclusive=False)):
        await manager.set_up(ONE)
        await manager.tear_down(ONE)
        assert node.mode is DEFAULT
        await manager.set_up(ONE)
        assert node.mode is DEFAULT
        await manager.tear_down(ONE)
