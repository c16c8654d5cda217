"""Who holds what, on a real kubelet with its default tick."""

from collections.abc import AsyncIterator

import pytest

from tests.cluster.cutting import kubelets_way
from tests.cluster.real_rig import RealRig, real_rig
from tests.cluster.rig import Cluster
from tests.scenarios import holders, init_holders
from tests.scenarios.holders import test_waiting_pod_fits_after_agent_update
from tests.scenarios.init_holders import (
    test_no_mode_flip_under_a_running_init_container,
    test_refused_switch_waits_for_a_running_init_container,
)

__all__ = [
    "test_no_mode_flip_under_a_running_init_container",
    "test_refused_switch_waits_for_a_running_init_container",
    "test_restarted_kubelet_that_lists_nothing",
    "test_waiting_pod_fits_after_agent_update",
]


@pytest.fixture
async def rig(patient: Cluster) -> AsyncIterator[RealRig]:
    """In place of the rig on the session's quick cluster."""
    async with real_rig(patient) as made:
        yield made


async def test_restarted_kubelet_that_lists_nothing(rig: RealRig, patient: Cluster) -> None:
    """It hears of its pods once its plugins are back, however slow the machine is.

    For the kubelet waits for no plugin: it admits again a pod whose init container runs, and fails it if no
    list has come yet for its app containers (`devicesToAllocate`). At load 20 our lists came 20 to 140 ms
    after it began to look for plugins, its pods 800 ms or more.
    """
    async with kubelets_way(patient, rig) as way:

        async def restart() -> None:
            way.cut()
            await rig.restart_kubelet()
            way.mend()

        await holders.restarted_kubelet_lists_nothing(rig, restart)


def test_no_scenario_is_forgotten() -> None:
    assert {scenario.__name__ for scenario in (*holders.ALL, *init_holders.ALL)} == set(__all__)
