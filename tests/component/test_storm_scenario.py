"""The small storm of the real cluster on the embedded kubelet, with the agent as a process of its own."""

import pytest

from tests.component.embedded_rig import embedded_rig
from tests.scenarios.storm import storm

SECONDS = 15.0


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_storm_leaves_the_node_as_asked_for() -> None:
    async with embedded_rig() as rig:

        async def restart(down: float) -> None:
            await rig.kubelet.restart(down)

        assert await storm(rig, restart, seed=1, seconds=SECONDS) > 5
