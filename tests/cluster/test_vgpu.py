"""The scenarios of fractions on a real kubelet, scheduler and container runtime."""

from tests.scenarios import vgpu
from tests.scenarios.vgpu import (
    test_agent_sigkilled_ten_times_in_a_burst,
    test_equal_cores_different_memory_never_swapped,
    test_forty_random_pairs_on_one_gpu_each,
    test_impossible_requests_say_the_rule,
    test_init_and_app_containers_share_one_gpu,
    test_kubelet_restart_under_vgpu_pods,
    test_pair_that_fits_no_gpu_is_refused_with_largest_free_share,
    test_whole_gpu_takes_its_memory_off_the_lists,
)

__all__ = [
    "test_agent_sigkilled_ten_times_in_a_burst",
    "test_equal_cores_different_memory_never_swapped",
    "test_forty_random_pairs_on_one_gpu_each",
    "test_impossible_requests_say_the_rule",
    "test_init_and_app_containers_share_one_gpu",
    "test_kubelet_restart_under_vgpu_pods",
    "test_pair_that_fits_no_gpu_is_refused_with_largest_free_share",
    "test_whole_gpu_takes_its_memory_off_the_lists",
]


def test_no_scenario_is_forgotten() -> None:
    assert {scenario.__name__ for scenario in vgpu.ALL} == set(__all__)
