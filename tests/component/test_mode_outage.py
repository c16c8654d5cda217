"""A kubelet that restarts while the API server stays away: it lists no pods, and they run on."""

import anyio
import pytest

from tests.component.embedded_rig import embedded_rig
from tests.scenarios.mode_node import mode_node

# Longer than a new kubelet is given while the API server is there.
OUTAGE_SECONDS = 33.0


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_gpus_in_use_keep_their_mode_however_long_the_kubelet_hears_of_no_pod() -> None:
    async with embedded_rig() as rig, mode_node(rig) as node:
        await node.want("pgpu")
        await node.offers("pgpu")
        holders = await node.run("pgpu", "holder-0", "holder-1")
        await node.want("vgpu")
        await node.offers("vgpu", 6)
        async with rig.api_server_away():
            await rig.restart_kubelet()
            await anyio.sleep(OUTAGE_SECONDS)
        await node.offers("vgpu", 6)
        told = await node.reach("switching", "vgpu")
        waits = {index for index, gpu in told["gpus"].items() if gpu.get("waitingFor")}
        assert waits == {str(await node.index_of(pod)) for pod in holders}
        await node.end(*holders)
        await node.applied("vgpu")
