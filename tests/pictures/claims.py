"""Claims (DRA): the first pod on a GPU chooses its mode, the last one frees it."""

import anyio

from agent.model.modes import SHARES, WHOLE_GPUS
from agent.simulator.kubelet.pod_specs import Phase
from tests.component.dra.test_door import asking, dra_node, rig_of, run
from tests.pictures.svg import MODES
from tests.pictures.timeline import Legend, drawn, recording
from tests.scenarios.skeleton import unschedulable

TITLE = "GPUs of DRA: the first claim on a GPU chooses its mode, and the last one that ends frees it"
LEGEND: Legend = (
    ("free: a claim chooses", MODES["dra"], True),
    ("MPS shares, held", MODES["mps"], False),
    ("rest of it: shares only", MODES["mps"], True),
    ("whole GPU, held", MODES["pgpu"], False),
    ("being prepared", MODES["pgpu"], True),
)
PAUSE = 0.9


async def made() -> str:
    """Shares come first, whole GPUs after them; one more waits until the last share has ended."""
    async with dra_node() as node:
        rig = rig_of(node)
        shares = [
            asking(name, SHARES, cores, gib) for name, cores, gib in (("chat", 50, 60), ("embed", 30, 20))
        ]
        whole = [asking(f"train-{letter}", WHOLE_GPUS) for letter in "abcdefg"]
        late = asking("late", WHOLE_GPUS)
        async with recording(node.run) as (record, act):
            await anyio.sleep(PAUSE)
            act("chat claims 50 %")
            await run(rig, shares[0])
            await anyio.sleep(PAUSE)
            act("embed 30 %")
            await run(rig, shares[1])
            await anyio.sleep(PAUSE)
            act("seven pods claim whole GPUs")
            await run(rig, *whole)
            await anyio.sleep(PAUSE)
            act("late wants a whole one: waits")
            await rig.create_pod(late)
            await unschedulable(rig, late)
            for pod in shares:
                await anyio.sleep(PAUSE)
                act(f"{pod.name} ends")
                await rig.delete_pod(pod)
            await rig.wait_phase(late, Phase.RUNNING)
            await anyio.sleep(PAUSE)
    return drawn(record, TITLE, LEGEND)
