"""Switching modes on a real cluster whose kubelet has its default tick: node.status is up to 10 s behind."""

from collections.abc import AsyncIterator

import pytest

from tests.cluster.real_rig import RealRig, real_rig
from tests.cluster.rig import Cluster
from tests.scenarios import modes
from tests.scenarios.mode_streams import switches
from tests.scenarios.modes import (
    test_agent_kill_in_mid_switch,
    test_agent_update_under_a_stream_of_pods,
    test_api_server_outage_in_mid_switch,
    test_busy_gpus_drain_under_a_backlog,
    test_kubelet_restart_in_mid_switch,
    test_label_flapping,
    test_no_admission_error_across_thirty_switches,
    test_three_modes_in_turn_on_an_idle_node,
    test_three_modes_side_by_side,
    test_time_slicing_layout,
    test_unknown_label_changes_nothing,
    test_whenbusy_refuse,
)

__all__ = [
    "test_agent_kill_in_mid_switch",
    "test_agent_update_under_a_stream_of_pods",
    "test_api_server_outage_in_mid_switch",
    "test_busy_gpus_drain_under_a_backlog",
    "test_kubelet_restart_in_mid_switch",
    "test_label_flapping",
    "test_no_admission_error_across_thirty_switches",
    "test_three_modes_in_turn_on_an_idle_node",
    "test_three_modes_side_by_side",
    "test_time_slicing_layout",
    "test_unknown_label_changes_nothing",
    "test_whenbusy_refuse",
]

LIMIT = 60 + 30 * switches()
"""Seconds for the body of one test (see conftest.py)."""


@pytest.fixture
async def rig(patient: Cluster) -> AsyncIterator[RealRig]:
    """In place of the rig on the session's quick cluster."""
    async with real_rig(patient) as made:
        yield made


def test_no_scenario_is_forgotten() -> None:
    assert {scenario.__name__ for scenario in modes.ALL} == set(__all__)
