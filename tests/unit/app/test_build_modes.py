"""The modes of the table, as the composition root builds them."""

from pathlib import Path

import anyio

from agent.app import build_mps, build_vgpu
from agent.app.build_modes import build_modes
from agent.app.build_switching import build_request
from agent.app.mode_parts import ModeContext, ModeModule
from agent.app.parts import Tasks
from agent.app.run import core_of
from agent.kit.cell import Cell
from agent.model.modes import OFFERED_MODES, Assignment, Mode
from agent.plugins.context import PluginContext
from agent.plugins.inject import Injector, NodeSoftware
from agent.settings import ClusterSettings, HostSettings, Kubelet, Settings
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from agent.telemetry.container_use import Uses

# They are loaded by the names of their modes: here the type checker sees what they are.
MODULES: tuple[ModeModule, ...] = (build_mps, build_vgpu)


async def test_each_mode_brings_its_resources_and_its_daemon_if_the_table_says_so(tmp_path: Path) -> None:
    settings = Settings(
        cluster=ClusterSettings(access="off"),
        kubelet=Kubelet(root=str(tmp_path / "kubelet")),
        host=HostSettings(
            state=str(tmp_path / "state"), run=str(tmp_path / "run"), cdi=str(tmp_path / "cdi")
        ),
    )
    core = core_of(settings, SimulatedNvml(SimulatedMachine.create("dgx-h200")))
    async with anyio.create_task_group() as group:
        tasks = Tasks(core.supervisor, group)
        plugins = PluginContext(
            settings, core.inventory.snapshot, Cell(Assignment()), core.holdings, Injector(settings)
        )
        modes = await build_modes(
            ModeContext(
                core=core,
                tasks=tasks,
                cluster=None,
                plugins=plugins,
                desired=(await build_request(settings)).source,
                uses=Cell(Uses()),
                grown=Cell({}),
            )
        )
        group.cancel_scope.cancel()
    core.calls.close()
    assert tuple(modes) == OFFERED_MODES
    for mode, parts in modes.items():
        names = {plugin.resource for plugin in parts.plugins}
        assert names
        assert names <= set(mode.resources)
        if mode.row.pair:
            assert names == set(mode.resources)
        assert (parts.backend is not None) is mode.row.needs_daemon
        # Only modes of amounts say whether they are enforced.
        assert (parts.enforced() is not None) is (mode.row.pair is not None)
    assert modes[Mode.MPS].enforced() == "no"  # nobody knows the runtime
    plugins.injector.software = NodeSoftware("v1.34.0", "containerd://2.1.0")
    assert modes[Mode.MPS].enforced() == "yes"
