"""A real kubelet and scheduler with claims: the same scenarios as on the embedded ones."""

from tests.scenarios import claims
from tests.scenarios.claims import (
    test_claim_of_two_pods_is_unprepared_once,
    test_driver_that_is_gone,
    test_failed_prepare_waits_for_a_change_of_the_pod,
    test_first_claim_chooses_the_mode_of_a_gpu,
    test_restarted_kubelet_wipes_slices_and_knows_its_claims,
)

__all__ = [
    "test_claim_of_two_pods_is_unprepared_once",
    "test_driver_that_is_gone",
    "test_failed_prepare_waits_for_a_change_of_the_pod",
    "test_first_claim_chooses_the_mode_of_a_gpu",
    "test_restarted_kubelet_wipes_slices_and_knows_its_claims",
]

LIMIT = 400
"""Seconds for the body of one test (see conftest.py): the kubelet's own 403 costs up to 90 of them."""


def test_no_scenario_is_forgotten() -> None:
    assert {scenario.__name__ for scenario in claims.ALL} == set(__all__)
