"""A static pod whose manifest is edited: the next one is admitted while the mirror of the last one stands."""

from dataclasses import replace

import anyio
import pytest

from agent.simulator.kubelet.pod_specs import ContainerSpec, Phase, PodSpec
from tests.component.embedded_rig import FACES, Face, embedded_rig
from tests.pace import scaled
from tests.scenarios.rig import GPU

FIRST = PodSpec("static-simulated-node", (ContainerSpec("main", {GPU: 8}),), static=True, grace=3.0)
EDITED = replace(FIRST, annotations={"edited": "yes"})
READ_SECONDS = 1.5  # by then the agent has read who holds what


@pytest.mark.timeout(120)
@pytest.mark.parametrize("face", FACES)
async def test_the_edited_one_gets_what_the_last_one_had(face: Face) -> None:
    """All GPUs of the node, on one of which the last one has a process that takes its time to end."""
    async with embedded_rig(face) as rig:
        await rig.start_agent({"defaultMode": "pgpu", **await rig.api_access()})
        await rig.wait_allocatable(8)
        await rig.create_pod(FIRST)
        await rig.wait_phase(FIRST, Phase.RUNNING)
        api = rig.kubelet.api
        await rig.kubelet.wait_for(lambda: FIRST.key in api.pods, 10, lambda: "there is no mirror")
        pid = await rig.container_pid(FIRST, "main")
        rig.machine.processes.start(0, pid, memory_mib=100)
        await anyio.sleep(scaled(READ_SECONDS))
        edited = api.edit_manifest(EDITED)
        await rig.kubelet.wait_for(lambda: edited.phase is not Phase.PENDING, 20, lambda: "it waits")
        assert edited.phase is Phase.RUNNING, edited.message
