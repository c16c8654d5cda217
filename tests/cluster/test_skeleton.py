"""The walking skeleton's scenarios on a real kubelet, scheduler and container runtime."""

from tests.scenarios import skeleton
from tests.scenarios.skeleton import (
    test_agent_sigkill_disturbs_no_pod,
    test_deleted_pods_free_their_gpus,
    test_eight_gpus_become_allocatable,
    test_init_container_hands_its_gpu_on,
    test_kubelet_restart_keeps_allocatable,
    test_ninth_gpu_pod_stays_pending,
    test_pod_sees_exactly_its_two_gpus,
    test_two_containers_in_one_pod,
)

__all__ = [
    "test_agent_sigkill_disturbs_no_pod",
    "test_deleted_pods_free_their_gpus",
    "test_eight_gpus_become_allocatable",
    "test_init_container_hands_its_gpu_on",
    "test_kubelet_restart_keeps_allocatable",
    "test_ninth_gpu_pod_stays_pending",
    "test_pod_sees_exactly_its_two_gpus",
    "test_two_containers_in_one_pod",
]


def test_no_scenario_is_forgotten() -> None:
    assert {scenario.__name__ for scenario in skeleton.ALL} == set(__all__)
