"""An agent is killed, and the next one offers something else, long before the kubelet's tick."""

import pytest

from tests.component.embedded_rig import embedded_rig
from tests.scenarios.mode_node import mode_node, pod_of
from tests.scenarios.skeleton import unschedulable

TICK_SECONDS = 60.0


@pytest.mark.timeout(120)
async def test_pods_of_the_mode_of_before_wait_rather_than_die() -> None:
    async with embedded_rig(status_tick=TICK_SECONDS) as rig, mode_node(rig) as node:
        await node.want("vgpu")
        await node.offers("vgpu")
        await rig.kill_agent()
        await node.want("pgpu")
        await node.start()
        await node.offers("pgpu")
        late = pod_of("vgpu", "late")
        await node.create(late)
        await unschedulable(rig, late)
        await node.run("pgpu", "early")
        assert await node.logged("stale_figures_taken_back")
