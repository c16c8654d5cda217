"""A label switch on a busy node."""

import anyio

from agent.model.pod import VGPU
from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.component.embedded_rig import embedded_rig
from tests.pictures.svg import MODES
from tests.pictures.timeline import Legend, drawn, recording
from tests.scenarios.mode_node import GPUS, ModeNode, mode_node

TITLE = "A node is switched from whole GPUs to fractions while pods run"
LEGEND: Legend = (
    ("whole GPU, held by a pod", MODES["pgpu"], False),
    ("held and draining: no new pods", "url(#drains)", False),
    ("whole GPU, free", MODES["pgpu"], True),
    ("fractions, held", MODES["vgpu"], False),
    ("fractions, free", MODES["vgpu"], True),
)
PAUSE = 0.9  # seconds between what a person does


async def made() -> str:
    """Three pods on whole GPUs; the label says vgpu; pods with fractions come; the three end one by one."""
    async with embedded_rig() as rig, mode_node(rig) as node:
        await node.want("pgpu")
        await node.applied("pgpu")
        await node.offers("pgpu")
        pods = await node.run("pgpu", "train-a", "train-b", "train-c")
        async with recording(node.folder) as (record, act):
            await anyio.sleep(PAUSE)
            act("label: vgpu")
            await node.want("vgpu")
            await node.offers("vgpu", GPUS - len(pods))
            await anyio.sleep(PAUSE / 2)
            act("pods with 60 % and 30 %")
            await _run(node, ("web-1", 60), ("web-2", 30))
            for number, pod in enumerate(pods):
                await anyio.sleep(PAUSE)
                act(f"{pod.name} ends")
                await node.end(pod)
                if number == 1:
                    await anyio.sleep(PAUSE)
                    act("a pod with 50 %")
                    await _run(node, ("web-3", 50))
            await node.applied("vgpu")
            await anyio.sleep(PAUSE)
    return drawn(record, TITLE, LEGEND)


async def _run(node: ModeNode, *sizes: tuple[str, int]) -> None:
    pods = [
        PodSpec(name, (ContainerSpec("main", {VGPU.core: cores, VGPU.memory: 5 * cores}),))
        for name, cores in sizes
    ]
    for pod in pods:
        await node.create(pod)
    for pod in pods:
        await node.rig.wait_phase(pod, Phase.RUNNING)
