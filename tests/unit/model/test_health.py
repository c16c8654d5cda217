"""The health state machine, transition by transition."""

from dataclasses import replace

import pytest

from agent.model.health import (
    HEALTHY,
    Fault,
    FaultKind,
    Health,
    HealthState,
    Rules,
    after_reboot,
    event,
    probe_failed,
    probe_passed,
)
from agent.model.xids import XIDS, Verdict, XidClass

RULES = Rules()
LOST = Fault(FaultKind.LOST)
HUNG = Fault(FaultKind.HUNG)
PROBE = Fault(FaultKind.PROBE)


def xid(number: int) -> Fault:
    return Fault(FaultKind.XID, number)


def after_xid(number: int, at: float = 100.0) -> Health:
    return event(HEALTHY, xid(number), RULES, at)


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (XidClass.APPLICATION, HealthState.HEALTHY),
        (XidClass.INFORMATIONAL, HealthState.HEALTHY),
        (XidClass.CONTAINED, HealthState.SUSPECT),
        (XidClass.RESET, HealthState.UNHEALTHY),
        (XidClass.REBOOT, HealthState.UNHEALTHY),
    ],
)
def test_every_xid_of_a_class_is_judged_alike(kind: XidClass, state: HealthState) -> None:
    numbers = [number for number, rule in XIDS.items() if rule.kind is kind]
    assert numbers
    for number in numbers:
        health = after_xid(number)
        assert health.state is state
        assert health.offered == (state is not HealthState.UNHEALTHY)


def test_the_application_faults_of_the_vendors_plugin_are_counted_only() -> None:
    for number in (13, 31, 43, 45, 68, 109):
        assert XIDS[number].verdict is Verdict.COUNT
        assert after_xid(number) is HEALTHY


def test_an_unknown_xid_is_taken_seriously_and_recovers() -> None:
    health = after_xid(999)
    assert health.state is HealthState.UNHEALTHY
    assert "999" in health.cause
    assert probe_passed(health, RULES, 101).state is HealthState.PROBATION


def test_recovery_needs_the_quiet_time_and_probes() -> None:
    unhealthy = after_xid(74, at=100)
    probation = probe_passed(unhealthy, RULES, 102)
    assert probation.state is HealthState.PROBATION
    assert not probation.offered
    assert probation.until == 402
    assert probe_passed(probation, RULES, 401) is probation
    assert probe_passed(probation, RULES, 402) is HEALTHY


def test_a_new_event_in_probation_begins_anew() -> None:
    probation = probe_passed(after_xid(74), RULES, 102)
    again = event(probation, xid(74), RULES, 200)
    assert again.state is HealthState.UNHEALTHY
    assert again.until is None
    assert probe_passed(again, RULES, 201).until == 501


@pytest.mark.parametrize("fault", [LOST, HUNG, PROBE])
def test_a_failed_probe_ends_probation(fault: Fault) -> None:
    probation = probe_passed(after_xid(74), RULES, 102)
    failed = probe_failed(probation, fault, "no", RULES, 200)
    assert failed.state is HealthState.UNHEALTHY
    assert failed.fault == xid(74)  # the graver of the two


def test_a_pending_row_remap_forbids_recovery() -> None:
    unhealthy = after_xid(74)
    held = probe_passed(unhealthy, RULES, 102, obstacle="a row remap waits for a reset")
    assert held.state is HealthState.UNHEALTHY
    assert "clear-health" in RULES.remedy(held)
    probation = probe_passed(held, RULES, 103)
    assert probation.state is HealthState.PROBATION
    assert probe_passed(probation, RULES, 104, obstacle="again").state is HealthState.UNHEALTHY


def test_a_pending_row_remap_alone_condemns_nobody() -> None:
    assert probe_passed(HEALTHY, RULES, 5, obstacle="a row remap waits for a reset") is HEALTHY


def test_what_no_probe_can_witness_waits_for_a_reset() -> None:
    health = after_xid(119)
    for second in range(1000):
        health = probe_passed(health, RULES, 101 + second)
    assert health.state is HealthState.UNHEALTHY
    assert probe_passed(health, RULES, 2000, was_reset=True).state is HealthState.PROBATION


def test_a_gpu_that_was_gone_and_came_back_counts_as_reset() -> None:
    fallen = after_xid(79)
    assert "reboot" in RULES.remedy(fallen)
    gone = probe_failed(fallen, LOST, "lost", RULES, 101)
    assert gone.cause == fallen.cause
    assert probe_failed(gone, LOST, "lost", RULES, 103) is gone  # nothing new, nothing published
    back = probe_passed(gone, RULES, 110)
    assert back.state is HealthState.PROBATION
    assert probe_passed(back, RULES, 110 + 300) is HEALTHY


def test_a_failing_probe_is_no_reset() -> None:
    health = after_xid(119)
    for second in (1, 3, 5):
        health = probe_failed(health, HUNG, "no answer", RULES, 100 + second)
    assert probe_passed(health, RULES, 110).state is HealthState.UNHEALTHY


def test_a_lost_gpu_is_unhealthy_at_once() -> None:
    lost = probe_failed(HEALTHY, LOST, "the GPU is lost", RULES, 50)
    assert lost.state is HealthState.UNHEALTHY
    assert lost.cause == "the GPU is lost"
    back = probe_passed(lost, RULES, 60)
    assert back.until == 120


@pytest.mark.parametrize("fault", [HUNG, PROBE])
def test_one_failed_probe_makes_a_suspect_two_condemn(fault: Fault) -> None:
    once = probe_failed(HEALTHY, fault, "no answer", RULES, 50)
    assert once.state is HealthState.SUSPECT
    assert once.offered
    assert probe_passed(once, RULES, 52) is HEALTHY
    twice = probe_failed(once, fault, "no answer", RULES, 52)
    assert twice.state is HealthState.UNHEALTHY
    assert twice.cause == "no answer"
    assert probe_failed(twice, fault, "no answer", RULES, 54) is twice


def test_a_contained_error_is_watched_for_the_quiet_time() -> None:
    suspect = after_xid(94, at=100)
    assert probe_passed(suspect, RULES, 399) is suspect
    assert probe_passed(suspect, RULES, 400) is HEALTHY
    assert event(suspect, xid(95), RULES, 200).state is HealthState.UNHEALTHY


def test_the_graver_fault_stays_the_cause() -> None:
    health = event(after_xid(62), xid(48), RULES, 110)
    assert health.fault == xid(62)
    assert health.last_event == 110
    assert event(after_xid(48), xid(62), RULES, 110).fault == xid(62)


def test_a_verdict_of_an_earlier_boot_must_pass_checks_and_quiet_time() -> None:
    health = after_reboot(after_xid(119, at=90_000), now=20)
    assert health.state is HealthState.UNHEALTHY
    probation = probe_passed(health, RULES, 25)
    assert probation.state is HealthState.PROBATION
    assert probation.until == 325
    assert after_reboot(after_xid(94), now=20) is HEALTHY


def test_an_event_after_a_reset_is_a_new_fault() -> None:
    reset = replace(after_xid(119), reset_seen=True)
    assert not event(reset, xid(119), RULES, 300).reset_seen


def test_a_reset_answers_what_was_before_it() -> None:
    lost = probe_failed(after_xid(79), LOST, "lost", RULES, 103.0)
    back = probe_passed(lost, RULES, 105.0)
    assert (back.state, back.reset_seen) == (HealthState.PROBATION, True)
    # Xid 48 recovers by itself; 79, which asked for the reset, no longer counts.
    after = event(back, xid(48), RULES, 106.0)
    assert (after.state, after.fault) == (HealthState.UNHEALTHY, xid(48))
