"""Every entry point of the driver has a rule in the enforcement library."""

from collections import Counter

import pytest

from clib import headers, rules
from clib.headers import EntryPoint
from clib.wheels import BuildError


@pytest.mark.timeout(600)  # the first run on a machine fetches compiler and headers
@pytest.mark.parametrize("label", ["11.8", "12", "13"])
def test_every_entry_point_has_a_rule(label: str) -> None:
    entries = headers.entry_points(label)
    made = rules.rules(entries)
    assert [rule.entry for rule in made] == list(entries)
    hooked = Counter(rule.name for rule in made if rule.hook)
    for name, count in sorted(Counter(rule.name for rule in made).items()):
        print(f"{label}: {name:15} {count:4} symbols, {hooked[name]:3} with a hook")
    for rule in made:
        if rule.name in rules.HOOKED:
            assert rule.hook in ("own", "forward"), rule.entry.symbol
        assert bool(rule.reason) == (rule.hook != "own"), rule.entry.symbol
    # What takes memory or launches work is never merely passed on.
    taking = [rule for rule in made if rule.name in ("a.alloc", "b.launch")]
    assert {rule.entry.base for rule in taking if rule.hook != "own"} <= {"cuMulticastCreate"}


def test_an_entry_point_that_no_rule_claims_is_an_error() -> None:
    new = EntryPoint(
        symbol="cuMemTeleport", base="cuMemTeleport", abi=1, stream="", version=14000, parameters=()
    )
    with pytest.raises(BuildError, match="no rule claims cuMemTeleport"):
        rules.rules([new])


def test_an_allocation_without_a_hook_is_an_error() -> None:
    newer = EntryPoint(
        symbol="cuMemAlloc_v9",
        base="cuMemAlloc",
        abi=9,
        stream="",
        version=14000,
        parameters=("size_t bytes",),
    )
    with pytest.raises(BuildError, match=r"cuMemAlloc_v9 is in class .* and has no hook"):
        rules.rules([newer])


def test_hooks_of_their_own_are_entry_points() -> None:
    """A hook for a misspelt name would never be called."""
    assert rules.own_hooks() <= {entry.symbol for entry in headers.entry_points("13")}
