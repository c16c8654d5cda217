"""Overrides of the health rules in the configuration."""

from agent import settings
from agent.inventory.rules import rules_from
from agent.model.health import Fault, FaultKind
from agent.model.xids import Verdict, XidClass


def test_an_override_changes_what_it_names() -> None:
    found = rules_from(
        settings.load(None, {}, ["health.xids={79: {recovers: true, quietSeconds: 7}}"]).health
    ).of(Fault(FaultKind.XID, 79))
    assert (found.recovers, found.quiet_seconds) == (True, 7)
    assert (found.kind, found.verdict) == (XidClass.REBOOT, Verdict.UNHEALTHY)


def test_a_class_brings_its_verdict_and_quiet_time() -> None:
    found = rules_from(
        settings.load(
            None, {}, ["health.xids={13: {class: needs_reset}}", "health.quiet.needsReset=9"]
        ).health
    )
    assert found.of(Fault(FaultKind.XID, 13)).verdict is Verdict.UNHEALTHY
    assert found.of(Fault(FaultKind.XID, 13)).quiet_seconds == 9
    assert found.of(Fault(FaultKind.XID, 31)).verdict is Verdict.COUNT


def test_an_xid_that_nobody_knows_can_be_made_harmless() -> None:
    found = rules_from(settings.load(None, {}, ["health.xids={900: {verdict: count}}"]).health)
    assert found.of(Fault(FaultKind.XID, 900)).verdict is Verdict.COUNT
    assert found.of(Fault(FaultKind.XID, 901)).verdict is Verdict.UNHEALTHY


def test_quiet_times_reach_every_kind_of_fault() -> None:
    flags = [
        f"health.quiet.{key}={number}" for number, key in enumerate(("ecc", "lost", "probe", "unknown"), 1)
    ]
    found = rules_from(settings.load(None, {}, flags).health)
    assert found.of(Fault(FaultKind.ECC)).quiet_seconds == 1
    assert found.of(Fault(FaultKind.LOST)).quiet_seconds == 2
    assert found.of(Fault(FaultKind.HUNG)).quiet_seconds == 3
    assert found.of(Fault(FaultKind.XID, 999)).quiet_seconds == 4
