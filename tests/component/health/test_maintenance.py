"""NVML released for maintenance, and a driver that was replaced meanwhile."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.to_thread
import pytest

from agent.inventory.snapshot import boot_seconds
from agent.kit.tasks import FatalError, describe
from agent.model.gpu import Driver
from agent.model.health import HealthState
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from agent.status.commands import Commands
from agent.status.report import StatusSources
from agent.web import control
from agent.web.control import ControlServer
from tests.component.health.bench import watching
from tests.pace import scaled


class Counted(SimulatedNvml):
    """Knows whether NVML is open."""

    def __init__(self, machine: SimulatedMachine) -> None:
        super().__init__(machine)
        self.machine = machine
        self.opened = 0

    def is_open(self) -> bool:
        return self.opened > 0

    def open(self) -> Driver:
        driver = super().open()
        self.opened += 1
        return driver

    def close(self) -> None:
        super().close()
        self.opened = 0


async def test_a_release_closes_nvml_after_the_lists_and_ends_by_itself() -> None:
    machine = SimulatedMachine.create("dgx-h200")
    nvml = Counted(machine)
    async with watching(machine, nvml=nvml) as watched:
        machine.xid(1, 119)
        await watched.until(1, HealthState.UNHEALTHY)
        watched.gpu_monitor.release(min(scaled(1.5), 6.0))
        with anyio.fail_after(4):
            await watched.settled(lambda now: now.released_until is not None)
            assert all(not state.healthy for state in watched.snapshot.gpus)
            await watched.listed(0, healthy=False)
            while nvml.is_open():
                await anyio.sleep(0.01)
        assert len(watched.lists[-1]) == 8
        await watched.settled(lambda now: now.problem is None)
        assert nvml.is_open()
        await watched.listed(0, healthy=True)
        assert not watched.state(1).healthy  # its own verdict stands


async def test_a_release_can_be_ended_and_lasts_over_a_restart(tmp_path: Path) -> None:
    machine = SimulatedMachine.create("l40s-2")
    async with watching(machine, state=tmp_path) as watched:
        watched.gpu_monitor.release(600)
        await watched.settled(lambda now: now.released_until is not None)
        file = tmp_path / "verdicts.json"
        with anyio.fail_after(30):
            while not file.exists() or 'released_until": null' in file.read_text():
                await anyio.sleep(0.01)
    nvml = Counted(machine)
    async with watching(machine, nvml=nvml, state=tmp_path, ready=False) as watched:
        await watched.settled(lambda now: (now.released_until or 0) > boot_seconds() + 500)
        await watched.listed(0, healthy=False)
        await watched.listed(1, healthy=False)
        assert {entry[machine.uuid(1)] for entry in watched.lists if entry} == {False}
        await anyio.sleep(0.3)
        assert not nvml.is_open()
        watched.gpu_monitor.end_release()
        await watched.settled(lambda now: now.problem is None)
        assert all(state.healthy for state in watched.snapshot.gpus)


@asynccontextmanager
async def commanded(nvml: Counted, folder: Path) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """A watched machine and the agent's socket; yields what sends a command and answers its result."""
    async with watching(nvml.machine, nvml=nvml) as watched:
        server = ControlServer(folder / "agent.sock")
        sources = SimpleNamespace(inventory=watched.inventory, gpu_monitor=watched.gpu_monitor)
        Commands(cast("StatusSources", sources)).add_to(server)

        async def ask(command: str, **arguments: object) -> Any:
            call = partial(control.ask, server.path, command, deadline=control.RELEASE_SECONDS, **arguments)
            return await anyio.to_thread.run_sync(call)

        async with anyio.create_task_group() as group:
            group.start_soon(server.serve)
            while not server.path.exists():
                await anyio.sleep(0.01)
            yield ask
            group.cancel_scope.cancel()


async def test_release_answers_after_the_close(tmp_path: Path) -> None:
    machine = SimulatedMachine.create("t4-4")
    nvml = Counted(machine)
    async with commanded(nvml, tmp_path) as ask:
        machine.slow("nvmlShutdown", 600)
        assert await ask("release", seconds=60) == {"releasedForSeconds": 60}
        assert not nvml.is_open()
        await ask("release", end=True)
        assert nvml.is_open()
        machine.clear_faults()
        hang = machine.hang("nvmlShutdown")
        with pytest.raises(control.AgentRefused, match=r"NVML cannot be closed: NVML close did not answer"):
            await ask("release", seconds=60)
        assert nvml.is_open()
        hang.release()  # the call comes back: the next call learns that NVML is closed
        with anyio.fail_after(10):
            while nvml.is_open():
                await anyio.sleep(0.05)
        assert await ask("release", seconds=60) == {"releasedForSeconds": 60}


async def test_a_driver_that_does_not_fit_ends_the_agent_in_words() -> None:
    machine = SimulatedMachine.create("l40s-2")
    caught: BaseException | None = None
    try:
        async with watching(machine) as watched:
            watched.gpu_monitor.release(0.3)
            await watched.settled(lambda now: now.released_until is not None)
            machine.driver_mismatch()
            await anyio.sleep(10)
    except BaseExceptionGroup as group:
        caught = group
    assert isinstance(caught, BaseExceptionGroup)
    fatal = caught.subgroup(FatalError)
    assert fatal is not None
    assert "version mismatch" in str(describe(fatal))
