"""The monitoring scenarios on a real kubelet and container runtime: real processes in real cgroups."""

from tests.scenarios import monitoring
from tests.scenarios.monitoring import (
    test_each_container_sees_its_own_figures,
    test_figures_exist_before_the_first_cuda_call,
    test_figures_vanish_with_the_pod,
)

__all__ = [
    "test_each_container_sees_its_own_figures",
    "test_figures_exist_before_the_first_cuda_call",
    "test_figures_vanish_with_the_pod",
]


def test_no_scenario_is_forgotten() -> None:
    assert {scenario.__name__ for scenario in monitoring.ALL} == set(__all__)
