"""The walking skeleton's scenarios on the embedded kubelet, with both faces of its PodResources."""

from collections.abc import Awaitable, Callable

import pytest

from tests.component.embedded_rig import FACES, MOSTLY_THE_NEWEST, EmbeddedRig, Face, embedded_rig
from tests.scenarios import skeleton
from tests.scenarios.rig import Rig

Scenario = Callable[[Rig], Awaitable[None]]
# A container of it finishes, or a kubelet takes up pods.
BOTH_FACES = (
    skeleton.test_init_container_hands_its_gpu_on,
    skeleton.test_kubelet_restart_keeps_allocatable,
)


def on_the_embedded_kubelet(scenario: Scenario) -> Callable[[Face], Awaitable[None]]:
    # No fixture: the kubelet's task group must open and close in the test's own task.
    @pytest.mark.parametrize("face", FACES if scenario in BOTH_FACES else MOSTLY_THE_NEWEST)
    async def test(face: Face) -> None:
        async with embedded_rig(face) as rig:
            await scenario(rig)

    return test


for _scenario in skeleton.ALL:
    globals()[_scenario.__name__] = on_the_embedded_kubelet(_scenario)


async def test_agent_stops_within_its_time_and_leaves_no_socket() -> None:
    async with embedded_rig() as rig:
        await skeleton.serving(rig)
        assert list((rig.kubelet.root / "plugins_registry").iterdir())
        assert await rig.stop_agent(deadline=5.0) == 0
        assert not list((rig.kubelet.root / "plugins_registry").iterdir())


def test_the_rig_is_complete() -> None:
    rig: type[Rig] = EmbeddedRig
    assert rig is EmbeddedRig
    assert len(skeleton.ALL) == len([name for name in vars(skeleton) if name.startswith("test_")])
