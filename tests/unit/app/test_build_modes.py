"""The modes of the table, as the composition root builds them."""

from pathlib import Path

from agent.app.build_modes import build_wings
from agent.app.run import core_of
from agent.injection.inject import NodeSoftware
from agent.model.modes import OFFERED_MODES, Mode
from agent.settings import Cluster, Host, Kubelet, Settings
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from tests.wing_node import wing_node


async def test_each_mode_brings_its_resources_and_prepares_if_the_table_says_so(
    tmp_path: Path,
) -> None:
    settings = Settings(
        cluster=Cluster(access="off"),
        kubelet=Kubelet(root=str(tmp_path / "kubelet")),
        host=Host(state=str(tmp_path / "state"), run=str(tmp_path / "run"), cdi=str(tmp_path / "cdi")),
    )
    core = core_of(settings, SimulatedNvml(SimulatedMachine.create("dgx-h200")))
    node = wing_node(settings, calls=core.calls)
    wings = await build_wings(node)
    core.calls.close()
    assert tuple(wings) == OFFERED_MODES
    for mode, wing in wings.items():
        names = {plugin.resource for plugin in wing.plugins()}
        assert names
        assert names <= set(mode.resources)
        if mode.row.pair:
            assert names == set(mode.resources)
        assert wing.prepares is mode.row.needs_daemon
        # Only modes of amounts say whether they are enforced.
        assert (wing.enforced() is not None) is (mode.row.pair is not None)
    assert wings[Mode.MPS].enforced() == "no"  # nobody knows the runtime
    node.injector.software = NodeSoftware("v1.34.0", "containerd://2.1.0")
    assert wings[Mode.MPS].enforced() == "yes"
