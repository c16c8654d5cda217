"""Who holds what, on the embedded kubelet."""

from collections.abc import Awaitable, Callable
from types import ModuleType

import pytest

from tests.component.embedded_rig import embedded_rig
from tests.component.extended_rig import extended_rig
from tests.scenarios import init_holders, vgpu
from tests.scenarios.load import full_load_with_departures
from tests.scenarios.rig import Rig

LOAD_SECONDS = 20.0
Scenario = Callable[[Rig], Awaitable[None]]


def on_the_embedded_kubelet(scenario: Scenario) -> Callable[[], Awaitable[None]]:
    @pytest.mark.timeout(300)
    async def test() -> None:
        async with embedded_rig() as rig:
            await scenario(rig)

    return test


for _scenario in init_holders.ALL:
    globals()[_scenario.__name__] = on_the_embedded_kubelet(_scenario)


@pytest.mark.timeout(300)
async def test_full_load_with_departures() -> None:
    async with extended_rig(status_tick=10.0) as rig:
        await vgpu.serving(rig)
        await full_load_with_departures(rig, vgpu.GPUS, vgpu.BLOCKS, LOAD_SECONDS)


@pytest.mark.parametrize("module", [init_holders])
def test_no_scenario_is_forgotten(module: ModuleType) -> None:
    assert len(module.ALL) == len([name for name in vars(module) if name.startswith("test_")])
