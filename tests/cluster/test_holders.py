"""Who holds what, on a real kubelet with its default tick."""

from collections.abc import AsyncIterator

import pytest

from tests.cluster.real_rig import RealRig, real_rig
from tests.cluster.rig import Cluster
from tests.scenarios import holders, init_holders
from tests.scenarios.holders import (
    test_restarted_kubelet_that_lists_nothing,
    test_waiting_pod_fits_after_agent_update,
)
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


def test_no_scenario_is_forgotten() -> None:
    assert {scenario.__name__ for scenario in (*holders.ALL, *init_holders.ALL)} == set(__all__)
