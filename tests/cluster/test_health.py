"""The scenarios of health on a real kubelet, under the real pynvml over our libnvidia-ml.so.1."""

from tests.scenarios import health
from tests.scenarios.health import (
    test_a_call_that_never_returns_costs_its_gpu_only,
    test_a_gpu_that_fell_off_the_bus_returns_once_it_is_back,
    test_a_gpu_that_is_lost_in_silence_is_found_and_the_others_are_sold,
    test_a_gpu_with_an_ecc_error_leaves_and_returns_by_itself,
    test_a_verdict_reaches_every_unit_of_both_vgpu_resources,
    test_an_event_wait_that_fails_for_ever_stays_cheap_and_quiet,
    test_an_unhealthy_gpu_stays_so_over_restarts_of_agent_and_kubelet,
    test_each_class_of_xid_has_its_own_end,
    test_faults_of_programs_and_notices_change_nothing,
)

__all__ = [
    "test_a_call_that_never_returns_costs_its_gpu_only",
    "test_a_gpu_that_fell_off_the_bus_returns_once_it_is_back",
    "test_a_gpu_that_is_lost_in_silence_is_found_and_the_others_are_sold",
    "test_a_gpu_with_an_ecc_error_leaves_and_returns_by_itself",
    "test_a_verdict_reaches_every_unit_of_both_vgpu_resources",
    "test_an_event_wait_that_fails_for_ever_stays_cheap_and_quiet",
    "test_an_unhealthy_gpu_stays_so_over_restarts_of_agent_and_kubelet",
    "test_each_class_of_xid_has_its_own_end",
    "test_faults_of_programs_and_notices_change_nothing",
]


def test_no_scenario_of_health_is_forgotten() -> None:
    assert {scenario.__name__ for scenario in health.ALL} == set(__all__)
