"""The table of Xids, and that docs/health.md shows it as it is."""

import re
from pathlib import Path

import pytest

from agent.model.xids import QUIET_SECONDS, XIDS, XidClass, default_verdict

CLASSES = {kind: {number for number, rule in XIDS.items() if rule.kind is kind} for kind in XidClass}
DOCUMENT = Path(__file__).parents[3] / "docs" / "health.md"


@pytest.mark.parametrize("kind", XidClass)
def test_the_document_shows_the_table(kind: XidClass) -> None:
    row = next(line for line in DOCUMENT.read_text().splitlines() if line.startswith(f"| {kind.value} |"))
    _, _, verdict, quiet, numbers, _ = (cell.strip() for cell in row.split("|"))
    assert verdict == default_verdict(kind).value
    assert quiet == (f"{QUIET_SECONDS[kind]:g} s" if QUIET_SECONDS[kind] else "")
    shown = {
        number: (not star, bool(ask))
        for first, last, star, ask in re.findall(r"(\d+)(?:-(\d+))?(\*?)(\??)", numbers)
        for number in range(int(first), int(last or first) + 1)
    }
    assert shown == {number: (XIDS[number].recovers, XIDS[number].open) for number in CLASSES[kind]}


def test_every_rule_is_whole() -> None:
    for rule in XIDS.values():
        assert rule.title
        assert rule.verdict is default_verdict(rule.kind)
        assert rule.quiet_seconds == QUIET_SECONDS[rule.kind]


def test_what_operators_know_is_judged_as_they_know_it() -> None:
    # Named as reset or reboot by NVIDIA's guide to GPU debugging and by the field's alert rules.
    for number in (48, 62, 64, 74, 95, 119, 120):
        assert XIDS[number].kind is XidClass.RESET
    assert XIDS[79].kind is XidClass.REBOOT
    assert XIDS[94].kind is XidClass.CONTAINED
    assert {166, 170} <= CLASSES[XidClass.INFORMATIONAL]  # no action in the catalog
    assert not XIDS[48].recovers  # a reset, unless Xid 63 or 94 or the driver says otherwise
    assert XIDS[48].open
    assert {63, 92} <= CLASSES[XidClass.INFORMATIONAL]
