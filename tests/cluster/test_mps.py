"""The MPS scenarios on a real kubelet, scheduler and container runtime, with the real control daemon."""

from tests.scenarios import mps
from tests.scenarios.mps import (
    test_agent_update_keeps_daemons_and_pods,
    test_daemon_death_turns_ids_unhealthy_then_healthy,
    test_mps_half_a_pair_is_refused,
    test_mps_pair_on_one_gpu,
    test_mps_pods_get_exactly_their_caps,
    test_mps_sells_no_more_holders_than_clients_fit,
    test_mps_switched_off_leaves_no_daemon_and_default_compute_mode,
)

__all__ = [
    "test_agent_update_keeps_daemons_and_pods",
    "test_daemon_death_turns_ids_unhealthy_then_healthy",
    "test_mps_half_a_pair_is_refused",
    "test_mps_pair_on_one_gpu",
    "test_mps_pods_get_exactly_their_caps",
    "test_mps_sells_no_more_holders_than_clients_fit",
    "test_mps_switched_off_leaves_no_daemon_and_default_compute_mode",
]


def test_no_scenario_is_forgotten() -> None:
    assert {scenario.__name__ for scenario in mps.ALL} == set(__all__)
