"""The modes of the table, as the composition root builds them."""

from pathlib import Path

import anyio

from agent.app import build_vgpu
from agent.app.build_modes import build_modes
from agent.app.mode_parts import ModeContext, ModeModule
from agent.app.parts import Tasks
from agent.app.run import core_of
from agent.injection.inject import NodeSoftware
from agent.model.modes import OFFERED_MODES, Mode
from agent.settings import Cluster, Host, Kubelet, Settings
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from tests.wing_node import wing_node

# Loaded by the name of its mode: here the type checker sees what it is.
MODULES: tuple[ModeModule, ...] = (build_vgpu,)


async def test_each_mode_brings_its_resources_and_its_daemon_if_the_table_says_so(tmp_path: Path) -> None:
    settings = Settings(
        cluster=Cluster(access="off"),
        kubelet=Kubelet(root=str(tmp_path / "kubelet")),
        host=Host(state=str(tmp_path / "state"), run=str(tmp_path / "run"), cdi=str(tmp_path / "cdi")),
    )
    core = core_of(settings, SimulatedNvml(SimulatedMachine.create("dgx-h200")))
    async with anyio.create_task_group() as group:
        tasks = Tasks(core.supervisor, group)
        node = wing_node(settings, calls=core.calls)
        modes = await build_modes(ModeContext(core, tasks, node))
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
    node.injector.software = NodeSoftware("v1.34.0", "containerd://2.1.0")
    assert modes[Mode.MPS].enforced() == "yes"
