"""Evidence for a verdict that an Xid's number leaves open: the driver, its log line, Xids beside it."""

import pytest

from agent.model.health import (
    HEALTHY,
    SETTLED_SECONDS,
    Fault,
    FaultKind,
    Health,
    HealthState,
    RecoveryAction,
    Rules,
    event,
    explained,
    probe_passed,
)
from agent.model.xids import XidClass, class_of

RULES = Rules()
NONE, RESET = RecoveryAction.NONE, RecoveryAction.GPU_RESET
ECC = Fault(FaultKind.ECC)
REMAP_PENDING = "a row remap waits for a reset of the GPU"


def xid(number: int, xid_class: XidClass | None = None) -> Fault:
    return Fault(FaultKind.XID, number, xid_class)


def after_xid(number: int, at: float = 100.0) -> Health:
    return event(HEALTHY, xid(number), RULES, at)


def test_a_gpu_first_seen_with_a_failed_remap_is_not_sold() -> None:
    obstacle = "a row remap failed: the GPU should be replaced"
    health = probe_passed(HEALTHY, RULES, 10, obstacle, remap_failed=True)
    assert health.state is HealthState.UNHEALTHY
    assert health.fault == Fault(FaultKind.REMAP)
    assert RULES.remedy(health) == "have the GPU replaced"
    assert probe_passed(health, RULES, 12, obstacle, remap_failed=True) is health
    assert probe_passed(health, RULES, 12).state is HealthState.PROBATION


@pytest.mark.parametrize("action", [action for action in RecoveryAction if action.forbids_work])
def test_what_the_driver_asks_for_takes_a_gpu_out_of_sale(action: RecoveryAction) -> None:
    health = probe_passed(HEALTHY, RULES, 10, action=action)
    assert not health.offered
    assert health.cause == action.words
    assert ("reboot" in RULES.remedy(health)) == action.reboots
    assert probe_passed(health, RULES, 12, action=action) is health
    back = probe_passed(health, RULES, 20, action=NONE)
    assert back.state is HealthState.PROBATION
    assert probe_passed(back, RULES, 20 + SETTLED_SECONDS, action=NONE) is HEALTHY


@pytest.mark.parametrize("action", [None, NONE, RecoveryAction.RECOVER_IMEX_DOMAIN])
def test_a_driver_that_asks_for_nothing_leaves_a_healthy_gpu_alone(action: RecoveryAction | None) -> None:
    assert probe_passed(HEALTHY, RULES, 10, REMAP_PENDING, action=action) is HEALTHY


def test_a_harmless_xid_after_which_the_driver_asks_for_a_reset_is_none() -> None:
    assert after_xid(109) is HEALTHY
    assert not probe_passed(after_xid(109), RULES, 101, action=RESET).offered


@pytest.mark.parametrize("number", [48, 145, 149, 171, 999])
def test_the_driver_settles_what_the_table_leaves_open(number: int) -> None:
    health = after_xid(number, at=100)
    assert not health.offered
    # At once it may not know yet: a B200 asked for a reset 0.4 s after Xid 149.
    early = probe_passed(health, RULES, 101, REMAP_PENDING, action=NONE)
    assert early.state is HealthState.UNHEALTHY
    late = probe_passed(early, RULES, 100 + SETTLED_SECONDS, REMAP_PENDING, action=NONE)
    assert late.state is HealthState.PROBATION
    assert probe_passed(late, RULES, 100 + 2 * SETTLED_SECONDS, REMAP_PENDING, action=NONE) is HEALTHY


def test_xid_48_without_a_driver_that_tells_waits_for_a_reset() -> None:
    health = after_xid(48)
    for second in range(1000):
        health = probe_passed(health, RULES, 101 + second)
    assert health.state is HealthState.UNHEALTHY


@pytest.mark.parametrize("number", [46, 64, 95, 119, 79])
def test_the_driver_does_not_overrule_what_the_table_is_clear_about(number: int) -> None:
    health = after_xid(number)
    for second in range(1000):
        health = probe_passed(health, RULES, 101 + second, action=NONE)
    assert health.state is HealthState.UNHEALTHY


def test_a_reset_that_the_driver_asks_for_no_more_has_been_made() -> None:
    asked = probe_passed(after_xid(119), RULES, 102, action=RESET)
    assert asked.fault == xid(119)
    assert asked.obstacle == RESET.words
    assert probe_passed(asked, RULES, 104, action=None).state is HealthState.UNHEALTHY
    assert probe_passed(asked, RULES, 104, action=NONE).state is HealthState.PROBATION


@pytest.mark.parametrize("memory", [ECC, xid(48)])
@pytest.mark.parametrize("excuse", [94, 63])
def test_a_contained_error_stays_contained_whatever_else_tells_of_it(memory: Fault, excuse: int) -> None:
    after = event(event(HEALTHY, memory, RULES, 100), xid(excuse), RULES, 101)
    assert after.state is HealthState.SUSPECT
    assert event(after, ECC, RULES, 102).offered
    assert event(after, ECC, RULES, 200).state is HealthState.UNHEALTHY  # another error


def test_a_contained_error_told_first_stays_contained() -> None:
    suspect = after_xid(94, at=100)
    for at in (100.1, 102.0):
        suspect = event(suspect, ECC, RULES, at)
    assert suspect.state is HealthState.SUSPECT
    # A pending remap holds no new work up (NVIDIA, GPU Memory Error Management), unless the driver says so.
    assert probe_passed(suspect, RULES, 1000, REMAP_PENDING).offered
    drained = probe_passed(suspect, RULES, 103, REMAP_PENDING, action=RecoveryAction.DRAIN_AND_RESET)
    assert not drained.offered
    assert event(suspect, xid(95), RULES, 103).state is HealthState.UNHEALTHY


def test_an_uncontained_error_is_not_excused() -> None:
    after = event(after_xid(95, at=100), xid(94), RULES, 101)
    assert after.fault == xid(95)
    assert not after.offered


LINES = [
    (149, ", NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000 0x00000000)", XidClass.RESET),
    (149, ", NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000)", XidClass.INFORMATIONAL),
    (149, ", NETIR_LINK_DOWN Fatal XC0 i0 Link 00 (0x02800011 0x00000000)", XidClass.INFORMATIONAL),
    (149, ", NETIR_BER_EVENT Nonfatal XC0 i0 Link 05 (0x00000013 0x00000001)", XidClass.INFORMATIONAL),
    (145, ", RLW_REMAP Nonfatal XC1 i0 Link 02 (0x00000004 0x00000010 0x0)", XidClass.CONTAINED),
    (145, ", RLW_REMAP Fatal XC0 i0 Link 02 (0x00000004 0x00000040 0x0)", XidClass.RESET),
    (145, ", RLW_SRC_TRACK Nonfatal XC1 i0 Link -1 (0x00000007 0x00000004)", XidClass.CONTAINED),
    (145, ", pid=12, name=vllm, RLW_RXPIPE Nonfatal XC0 i0 Link 9 (0x6 0x1)", XidClass.INFORMATIONAL),
    (145, ", RLW_RXPIPE Fatal XC0 i0 Link 09 (0x00000086 0x00000001)", XidClass.RESET),
    (146, ", TLW_RX_PIPE1 Nonfatal XC0 i0 Link 03 (0x00000010 0x00000020)", XidClass.INFORMATIONAL),
    (149, ", NETIR_LINK_EVT Fatal XC 1 i 2 Link 01 [0x0000000a]", XidClass.RESET),
    (150, ", MSE Degraded", None),
    (149, "", None),
    (79, ", GPU has fallen off the bus. Fatal (0x1 0x2)", None),
]


@pytest.mark.parametrize(("number", "rest", "kind"), LINES)
def test_the_log_line_of_an_nvlink_xid_says_what_its_number_does_not(
    number: int, rest: str, kind: XidClass | None
) -> None:
    assert class_of(number, rest) is kind


def test_the_log_line_closes_what_the_number_left_open() -> None:
    numbered = after_xid(145, at=100)
    assert explained(numbered, xid(145, XidClass.INFORMATIONAL), RULES, 100.2) is HEALTHY
    assert explained(numbered, xid(145, XidClass.CONTAINED), RULES, 100.2).state is HealthState.SUSPECT
    grave = explained(numbered, xid(145, XidClass.RESET), RULES, 100.2)
    for second in range(1000):
        grave = probe_passed(grave, RULES, 101 + second)
    assert grave.state is HealthState.UNHEALTHY
    assert explained(HEALTHY, xid(145, XidClass.RESET), RULES, 100).state is HealthState.UNHEALTHY


def test_a_harmless_log_line_excuses_nothing_else() -> None:
    for health in (after_xid(79, at=100), after_xid(149, at=100)):
        assert explained(health, xid(145, XidClass.INFORMATIONAL), RULES, 100.2) is health
    assert not explained(after_xid(145, at=50), xid(145, XidClass.INFORMATIONAL), RULES, 100).offered
    overridden = Rules(by_line=frozenset())
    numbered = after_xid(145, at=100)
    assert explained(numbered, xid(145, XidClass.INFORMATIONAL), overridden, 100.2) is numbered
