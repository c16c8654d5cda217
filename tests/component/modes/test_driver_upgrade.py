"""The GPU operator exchanges the driver of a node: the agent lets go of it, and takes it up again."""

from collections.abc import Mapping
from contextlib import suppress
from urllib.error import URLError

import anyio
import anyio.to_thread

from agent.model.pod import MPS
from agent.mps import processes
from agent.mps.directories import Directories
from agent.node.driver_upgrade import STATE_LABEL
from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.component.test_status import command
from tests.scenarios.mode_node import ModeNode, mode_node
from tests.scenarios.modes import serving
from tests.scenarios.rig import GPU

PAUSED = "nvidia.com/gpu.deploy.dcgm"
RELEASED = "gpu_agent_nvml_released"


async def daemons(rig: EmbeddedRig, node: ModeNode) -> Mapping[str, int]:
    def look() -> dict[str, int]:
        found = {}
        for uuid in rig.gpu_uuids():
            for each in processes.daemons(Directories.of(node.folder, uuid).pipe):
                found[uuid] = each.pid
        return found

    return await anyio.to_thread.run_sync(look)


async def until_daemons(rig: EmbeddedRig, node: ModeNode, count: int) -> None:
    with anyio.fail_after(20):
        while len(await daemons(rig, node)) != count:
            await anyio.sleep(0.05)


async def until_metric(node: ModeNode, value: float) -> None:
    with anyio.fail_after(20):
        while True:
            with suppress(URLError):  # an agent that starts has no port yet
                if await node.metric(RELEASED) == value:
                    return
            await anyio.sleep(0.05)


async def test_driver_upgrade_finds_neither_nvml_nor_a_daemon() -> None:
    settings = {"health__kernelLog": None, "layouts": {"two-mps": [{"gpus": ["0-1"], "mode": "mps"}]}}
    async with embedded_rig() as rig, mode_node(rig, **settings) as node:
        await node.want("two-mps")
        await rig.wait_allocatable(200, MPS.core)
        (pod,) = await node.run("mps", "holder")
        await rig.set_labels({STATE_LABEL: "pod-deletion-required"})
        await rig.wait_allocatable(0, MPS.core)
        await until_daemons(rig, node, 1)  # the pod's
        assert await node.metric(RELEASED) == 0
        await node.end(pod)  # as the operator's drain does
        await until_daemons(rig, node, 0)
        with anyio.fail_after(20):  # it is given back after the daemon has ended
            while {gpu.compute_mode for gpu in rig.machine.mapping.state.gpus} != {0}:
                await anyio.sleep(0.02)

        await rig.set_labels({STATE_LABEL: "pod-restart-required"})
        await until_metric(node, 1)
        _, text = await command(rig, "status")
        assert "RELEASED for" in text
        assert f"{STATE_LABEL}=pod-restart-required" in text
        stages = [each["stage"] for each in await node.logged("driver_upgrade")]
        assert stages == ["drain", "release"]


async def test_driver_pod_that_starts_without_an_upgrade_controller() -> None:
    """k8s-driver-manager pauses the operands whenever the driver's pod starts."""
    async with embedded_rig() as rig, mode_node(rig, health__kernelLog=None, modes__mps=False) as node:
        await serving(node, "pgpu")
        (pod,) = await node.run("pgpu", "holder")
        held = await rig.held_ids(pod, "main", GPU)
        await rig.set_labels({PAUSED: "paused-for-driver-upgrade"})
        await until_metric(node, 1)
        await rig.wait_allocatable(0, GPU)
        code, text = await command(rig, "release", "--end")  # a person knows better
        assert code == 0, text
        await node.offers("pgpu")
        assert await node.metric(RELEASED) == 0
        assert await rig.held_ids(pod, "main", GPU) == held


async def test_driver_upgrades_are_left_alone_where_that_is_wanted() -> None:
    settings = {"driver__releaseForUpgrades": False, "modes__mps": False, "health__kernelLog": None}
    async with embedded_rig() as rig, mode_node(rig, **settings) as node:
        await serving(node, "pgpu")
        await rig.set_labels({STATE_LABEL: "pod-restart-required"})
        await node.want("vgpu")  # taken up after the label was seen
        await node.offers("vgpu")
        assert await node.metric(RELEASED) == 0
        assert not await node.logged("driver_upgrade")
