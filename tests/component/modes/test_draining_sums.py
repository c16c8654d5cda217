"""GPUs that drain and the scheduler's sums, on the embedded kubelet with the real process."""

from typing import Any

import anyio

from agent.model.pod import VGPU
from agent.node.conditions import CONDITION
from agent.simulator.kubelet.pod_specs import Phase
from tests.component.embedded_rig import EmbeddedRig, embedded_rig
from tests.component.test_status import command
from tests.scenarios.mode_node import GPUS, ModeNode, mode_node
from tests.scenarios.modes import serving
from tests.scenarios.rig import GPU
from tests.scenarios.skeleton import unschedulable
from tests.scenarios.vgpu import share_pod

HALVES = {"halves": [{"gpus": ["0-3"], "mode": "pgpu"}, {"gpus": ["rest"], "mode": "vgpu"}]}
CORES, BLOCKS = 60, 40  # no two of them on one GPU
QUIET: dict[str, Any] = {"health__kernelLog": None, "modes__mps": False, "layouts": HALVES}


async def told(rig: EmbeddedRig, text: str) -> str:
    """The condition's message, once it says so."""
    message = ""
    with anyio.fail_after(20):
        while text not in message:
            message = (await rig.node()).conditions.get(CONDITION, ("", "", ""))[2]
            await anyio.sleep(0.05)
    return message


async def halves_drain(rig: EmbeddedRig, node: ModeNode) -> list[str]:
    """Half of the GPUs of a full vGPU node drain to pgpu, the others are empty; the pods that drain."""
    await serving(node, "vgpu")
    pods = {f"full-{number}": share_pod(f"full-{number}", CORES, BLOCKS) for number in range(GPUS)}
    for pod in pods.values():
        await node.create(pod)
    for pod in pods.values():
        await rig.wait_phase(pod, Phase.RUNNING)
    await node.want("halves")
    await told(rig, "waiting for 4 pod(s)")
    stay = []
    for name, pod in pods.items():
        if await node.index_of(pod) < GPUS // 2:
            stay.append(name)
        else:
            await node.end(pod)
    return stay


async def test_empty_gpus_sell_while_others_drain() -> None:
    """Units held on GPUs that drain are not on offer: at their holders' end the kubelet would hand them out.

    The holders' requests count all the same. It is said how much room of empty GPUs that hides.
    """
    async with embedded_rig() as rig, mode_node(rig, **QUIET) as node:
        drains = await halves_drain(rig, node)
        assert len(drains) == 4
        # 400 allocatable less 240 that are held elsewhere: two of four such pods are let in.
        new = [share_pod(f"new-{number}", 80, 40) for number in range(4)]
        for pod in new:
            await node.create(pod)
        for pod in new[:2]:
            await rig.wait_phase(pod, Phase.RUNNING)
            assert await node.index_of(pod) >= GPUS // 2
        await unschedulable(rig, new[2])
        words = (
            f"; {4 * CORES} {VGPU.core}, {4 * BLOCKS} {VGPU.memory} held on GPUs that drain are not on offer"
        )
        assert "pods may stay Pending" in await told(rig, words)
        code, text = await command(rig, "status")
        assert code == 0
        assert words in " ".join(text.split())  # it is broken into lines
        # Each holder that ends gives the empty GPUs 60 cores more to offer.
        held = {pod.name: pod for pod in node.pods}
        await node.end(held[drains[0]])
        await told(rig, f"; {3 * CORES} {VGPU.core}")
        await node.end(held[drains[1]])
        await rig.wait_phase(new[2], Phase.RUNNING)
        await unschedulable(rig, new[3])
        await node.end(held[drains[2]])
        await rig.wait_phase(new[3], Phase.RUNNING)
        assert {await node.index_of(pod) for pod in new} == {4, 5, 6, 7}
        await node.end(held[drains[3]])
        await node.applied("halves")
        await told(rig, "4 GPU(s) pgpu, 4 GPU(s) vgpu")
        assert "Pending" not in (await rig.node()).conditions[CONDITION][2]
        await rig.wait_allocatable(4, GPU)
