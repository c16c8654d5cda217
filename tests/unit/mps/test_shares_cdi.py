"""The agent's own CDI specification."""

import json
from pathlib import Path
from typing import cast

import anyio
import pytest

from agent.inventory.snapshot import Snapshot
from agent.kit.tasks import Cell
from agent.kubelet.wire import Mount
from agent.model.holding import PairMember
from agent.modes.desired import catalog_of
from agent.mps import shares_cdi
from agent.mps.daemon_manager import DaemonManager
from agent.settings import load
from tests.unit.mps.test_plugin import FakeDaemons
from tests.unit.pairing.kubelet_model import machine
from tests.wing_node import wing_node

UUID = "GPU-5fd4f087-86f3-7a43-b711-4771313afc50"
MOUNTS = {
    UUID: (Mount("/run/gpu-node-agent/mps", "/host/pipe", read_only=False), Mount("/dev/shm", "/host/shm"))
}


def test_each_half_names_devices_of_its_own_that_exist() -> None:
    content = shares_cdi.specification(MOUNTS, most_memory=139)
    devices: list[dict[str, object]] = content["devices"]  # type: ignore[assignment]
    names = {f"{content['kind']}={device['name']}" for device in devices}
    assert len(names) == len(devices) == 1 + 100 + 139 + 1
    core, memory = (set(shares_cdi.devices(member, UUID, 100)) for member in PairMember)
    assert core | memory <= names
    assert not core & memory
    assert set(shares_cdi.devices(PairMember.MEMORY, UUID, 139)) <= names


def test_edits_carry_the_caps_and_the_daemons_folders() -> None:
    content = shares_cdi.specification(MOUNTS, most_memory=2)
    edits = {device["name"]: device["containerEdits"] for device in content["devices"]}  # type: ignore[attr-defined]
    assert edits["mps-core-15"] == {"env": ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=15"]}
    assert edits["mps-memory-2"] == {"env": ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2G"]}
    daemon = edits[f"mps-{UUID}"]
    assert daemon["env"] == ["CUDA_MPS_PIPE_DIRECTORY=/run/gpu-node-agent/mps"]
    assert [(each["hostPath"], each["containerPath"], each["options"][0]) for each in daemon["mounts"]] == [
        ("/host/pipe", "/run/gpu-node-agent/mps", "rw"),
        ("/host/shm", "/dev/shm", "ro"),
    ]


def test_file_is_replaced_in_one_step_and_readable_by_all(tmp_path: Path) -> None:
    folder = tmp_path / "cdi"
    shares_cdi.write(folder, {"kind": "one"})
    shares_cdi.write(folder, {"kind": "two"})
    assert [each.name for each in folder.iterdir()] == ["gpu-node-agent.json"]
    assert json.loads((folder / "gpu-node-agent.json").read_text()) == {"kind": "two"}
    assert (folder / "gpu-node-agent.json").stat().st_mode & 0o777 == 0o644
    with pytest.raises(TypeError):
        shares_cdi.write(folder, {"kind": object()})
    assert [each.name for each in folder.iterdir()] == ["gpu-node-agent.json"]


class Daemons(FakeDaemons):
    """Daemons with the shared memory of all pods below one folder."""

    folder = "/host/shm"

    def shared_memory(self, uuid: str) -> str:
        return f"{self.folder}/{uuid}"


async def test_keeper_follows_the_gpus_and_never_empties_the_file(tmp_path: Path) -> None:
    inventory: Cell[Snapshot] = Cell(Snapshot())
    daemons = Daemons()
    node = wing_node(load(None, {}, [f"host.cdi={tmp_path}"]), snapshot=inventory)
    keeper = shares_cdi.ShareSpecificationKeeper(node, cast("DaemonManager", daemons))
    path = anyio.Path(tmp_path / "gpu-node-agent.json")
    await path.write_text("what the agent before wrote")

    async def holding(text: str) -> str:
        with anyio.fail_after(5):
            while text not in (found := await path.read_text()):
                await anyio.sleep(0.01)
        return found

    async with anyio.create_task_group() as group:
        group.start_soon(keeper.run)
        await anyio.sleep(0.05)
        assert await path.read_text() == "what the agent before wrote"
        inventory.publish(machine(gpus=2, blocks=40))
        found = await holding("mps-core-1")
        assert all(f"mps-{state.uuid}" in found for state in inventory.value.gpus)
        assert "mps-memory-9" in found  # 10 GiB, one of them for the server
        assert "mps-memory-10" not in found
        daemons.folder = "/elsewhere"
        daemons.set("a daemon without a namespace of its own")
        assert "/host/shm" not in await holding("/elsewhere")
        group.cancel_scope.cancel()


async def test_without_shares_the_folder_is_left_alone(tmp_path: Path) -> None:
    """As the chart mounts it without MPS: read-only."""
    inventory: Cell[Snapshot] = Cell(machine(gpus=2, blocks=40))
    folder = tmp_path / "cdi"
    settings = load(None, {}, [f"host.cdi={folder}", "modes.mps=false"])
    node = wing_node(settings, snapshot=inventory)
    keeper = shares_cdi.ShareSpecificationKeeper(node, cast("DaemonManager", FakeDaemons()))
    await keeper.keep()
    assert not folder.exists()
    node.desired.use(catalog_of(load(None, {}, ["host.run=/run/gna"])))  # by a changed configuration
    await keeper.keep()
    assert (folder / "gpu-node-agent.json").exists()
