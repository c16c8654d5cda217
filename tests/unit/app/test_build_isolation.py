"""Limits that fail half-way while they are built: the next try finds nothing that was started already."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.app.build_isolation import build_isolation
from agent.app.driver_fence import DriverFence
from agent.app.run import core_of
from agent.kit.cell import Cell
from agent.model.modes import Assignment
from agent.plugins.inject import Injector
from agent.settings import HostSettings, Settings, Vgpu
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from agent.telemetry.container_use import Uses


class Started(Counter[str]):
    """Tasks by name, as often as they were started."""

    def start(self, name: str, *_task: object) -> None:
        self[name] += 1


async def test_a_failure_half_way_starts_no_task_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HostSettings(state=str(tmp_path / "state"), run=str(tmp_path / "run"), cdi=str(tmp_path / "cdi"))
    settings = Settings(host=host, vgpu=Vgpu(enforcement="library", compute="hard"))
    core, tasks = core_of(settings, SimulatedNvml(SimulatedMachine.create("dgx-h200"))), Started()
    plugins = SimpleNamespace(modes=Cell(Assignment()), injector=Injector(settings), recorder=None)
    context: Any = SimpleNamespace(
        core=core, tasks=tasks, cluster=None, plugins=plugins, uses=Cell(Uses()), grown=Cell({})
    )

    async def failing(_: DriverFence) -> None:
        raise OSError("the cgroups are not there")

    with monkeypatch.context() as patched:
        patched.setattr(DriverFence, "start", failing)
        with pytest.raises(OSError, match="the cgroups are not there"):
            await build_isolation(context)
    assert (tasks, core.collectors) == ({}, [])

    await build_isolation(context)
    assert tasks == dict.fromkeys(
        ("compute shares", "limits", "limit sweep", "limits published", "driver fence"), 1
    )
    assert len(core.collectors) == 1
    core.calls.close()
