"""Who holds what, on the embedded kubelet, with both faces of its PodResources where they differ for it."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import ModuleType

import pytest

from tests.component.embedded_rig import FACES, QUICK, Face, embedded_rig
from tests.component.extended_rig import extended_rig
from tests.pace import scaled
from tests.scenarios import holders, init_holders, vgpu
from tests.scenarios.load import full_load_with_departures
from tests.scenarios.rig import Rig

LOAD_SECONDS = 20.0
Scenario = Callable[[Rig], Awaitable[None]]


# Kubelets before 1.34 list finished pods, too: they must not be taken for holders.
BOTH_FACES = (holders.test_restarted_kubelet_that_lists_nothing,)
# A kubelet waits for no plugin's list before it admits pods again: on a busy machine ours come late.
FIRST_PODS_SECONDS = 2.5


def on_the_embedded_kubelet(scenario: Scenario) -> Callable[[Face], Awaitable[None]]:
    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("face", FACES if scenario in BOTH_FACES else FACES[:1])
    async def test(face: Face) -> None:
        timings = replace(QUICK, first_pods=scaled(FIRST_PODS_SECONDS))
        async with embedded_rig(face, timings=timings) as rig:
            await scenario(rig)

    return test


for _scenario in (*holders.ALL, *init_holders.ALL):
    globals()[_scenario.__name__] = on_the_embedded_kubelet(_scenario)


@pytest.mark.timeout(300)
async def test_waiting_pod_gets_the_freed_gpu() -> None:
    async with extended_rig() as rig:
        await vgpu.serving(rig, extender=True)
        await holders.freed_gpu_goes_to_the_waiting_pod(rig, vgpu.GPUS, vgpu.BLOCKS, turns=8)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_full_load_with_departures() -> None:
    async with extended_rig(status_tick=10.0) as rig:
        await vgpu.serving(rig, extender=True)
        await full_load_with_departures(rig, vgpu.GPUS, vgpu.BLOCKS, LOAD_SECONDS)


@pytest.mark.parametrize("module", [holders, init_holders])
def test_no_scenario_is_forgotten(module: ModuleType) -> None:
    assert len(module.ALL) == len([name for name in vars(module) if name.startswith("test_")])
