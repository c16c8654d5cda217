"""Overrides of the health rules in the configuration."""

from pathlib import Path

import pytest

from agent import settings
from agent.inventory.verdicts import rules_from
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("xids: {abc: {}}", "health.xids: key 'abc' must be text of one to four digits"),
        (
            "xids: {79: {verdit: count}}",
            "unknown key health.xids.79.verdit; allowed here: class, quietSeconds",
        ),
        ("xids: {79: {verdict: ignore}}", "health.xids.79.verdict must be one of count, suspect, unhealthy"),
        ("xids: {79: 5}", "health.xids.79 must be a block of keys, not 5"),
        ("xids: []", "health.xids must be a block of keys"),
        ("quiet: {lost: -1}", "health.quiet.lost must be a number from 0"),
        ("probeSeconds: 9", "health.probeSeconds must be a number from 0.2 to 4"),
        ("kernelLog: kmsg", "health.kernelLog must be text that starts with /"),
    ],
)
def test_a_wrong_key_is_told_with_what_is_allowed(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"health:\n  {text}\n")
    with pytest.raises(settings.ConfigurationError) as caught:
        settings.load(file, {})
    assert len(caught.value.faults) == 1
    assert said in caught.value.faults[0]


def test_a_bare_number_is_a_key_too(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("health:\n  xids:\n    79: {verdict: count}\n    '48': {recovers: false}\n")
    found = rules_from(settings.load(file, {}).health)
    assert found.of(Fault(FaultKind.XID, 79)).verdict is Verdict.COUNT
    assert not found.of(Fault(FaultKind.XID, 48)).recovers
