"""Mode MPS by the interface of the wings."""

from pathlib import Path

import anyio.to_thread
import pytest

from agent.cluster.node import NodeInfo
from agent.kit.tasks import Cell
from agent.model.modes import Assignment, GpuMode, Mode
from agent.modes.wing import NotLeft
from agent.mps import leaving
from agent.mps.mps_errors import MpsError
from agent.mps.wing import MpsWing
from agent.settings import Settings, load
from agent.simulator.machine import SimulatedMachine
from agent.simulator.nvml import SimulatedNvml
from tests.unit.pairing.kubelet_model import machine
from tests.wing_node import wing_node

NVML = SimulatedNvml(SimulatedMachine.create("dgx-h200"))


def configured(folder: Path, *more: str) -> Settings:
    return load(None, {}, [f"host.cdi={folder}/cdi", "host.run=/nonexistent", "cluster.access=off", *more])


async def test_a_gpu_without_a_daemon_has_its_obstacle_and_its_ceiling(tmp_path: Path) -> None:
    """There is no control program on this machine: the configuration names one that is not there."""
    settings = configured(tmp_path, f"mps.controlProgram={tmp_path}/none", "mps.mostClients=5")
    inventory = Cell(machine(gpus=1, blocks=40))
    (state,) = inventory.value.gpus
    assignment = Cell(Assignment({state.uuid: GpuMode(Mode.MPS)}))
    node = wing_node(settings, snapshot=inventory, assignment=assignment)
    wing = await MpsWing.build(node)
    assert f"{tmp_path}/none, which is no program" in wing.obstacle(state)
    assert wing._conditions.most_holders(state.gpu) == 5
    assert wing.gpu_facts(state.uuid) == {"mps": None}
    assert wing.enforced() == "no"  # the runtime is not known
    node.injector.software = NodeInfo("v1.36.3", "containerd://2.4.2")
    assert wing.enforced() == "yes"
    assert not wing.remarks()
    assert {each.resource for each in wing.plugins()} == set(Mode.MPS.resources)


async def test_leaving_takes_the_shares_file_away_and_again_is_nothing(tmp_path: Path) -> None:
    file = tmp_path / "cdi" / "gpu-node-agent.json"
    file.parent.mkdir()
    other = file.with_name("nvidia.yaml")
    for each in (file, other):
        each.touch()
    for _ in range(2):
        await MpsWing.leave(configured(tmp_path), NVML)
        assert not await anyio.to_thread.run_sync(file.exists)
    assert await anyio.to_thread.run_sync(other.exists)


async def test_what_cannot_be_left_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stop(*_: object) -> None:
        raise MpsError("MPS daemons cannot be stopped: it hangs")

    with monkeypatch.context() as patch:
        patch.setattr(leaving, "stop_daemons", stop)
        with pytest.raises(NotLeft, match="it hangs"):
            await MpsWing.leave(configured(tmp_path), NVML)
    (tmp_path / "cdi" / "gpu-node-agent.json").mkdir(parents=True)
    with pytest.raises(NotLeft, match=r"gpu-node-agent\.json: cannot be removed"):
        await MpsWing.leave(configured(tmp_path), NVML)
