"""Compute of a GPU, shared out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.vgpu.compute import Claim, allot, claim, elastic

A = claim("a", 30, None, low=False)
BURST = claim("b", 20, 80, low=False)
LOW = claim("l", 20, None, low=True)
NO_CORES = claim("n", 0, None, low=False)


def test_a_claim_without_annotations_is_what_was_asked_for() -> None:
    assert Claim("a", 30, 30) == A
    assert not elastic([A])
    assert allot([A], ()) == allot([A], ["a"]) == {"a": 30}


def test_a_burst_uses_what_is_free_and_no_more_than_it_may() -> None:
    assert allot([A, BURST], ["b"]) == {"a": 30, "b": 80}
    assert allot([A, BURST], ["a", "b"]) == {"a": 30, "b": 70}
    assert elastic([A, BURST])


def test_a_burst_below_the_cores_takes_nothing_away() -> None:
    assert claim("a", 30, 10, low=False) == A


@pytest.mark.parametrize("other", [LOW, NO_CORES])
def test_low_priority_runs_on_what_others_leave(other: Claim) -> None:
    assert allot([A, other], [other.key])[other.key] == 100
    assert allot([A, other], ["a", other.key])[other.key] == 70
    full = claim("f", 70, None, low=False)
    assert allot([A, full, other], ["a", "f", other.key])[other.key] == 0


def test_bursts_come_before_low_priority() -> None:
    assert allot([A, BURST, LOW], ["a", "b", "l"]) == {"a": 30, "b": 70, "l": 0}


def test_equal_parts_and_what_one_leaves_to_the_others() -> None:
    claims = [claim("x", 10, 20, low=False), claim("y", 10, 100, low=False), claim("z", 10, 100, low=False)]
    assert allot(claims, "xyz") == {"x": 20, "y": 40, "z": 40}


SHARES = st.tuples(st.integers(0, 60), st.none() | st.integers(1, 100), st.booleans(), st.booleans())


@given(st.lists(SHARES, max_size=6))
def test_nothing_promised_is_taken_and_nothing_given_twice(
    shares: list[tuple[int, int | None, bool, bool]],
) -> None:
    claims, working, room = [], [], 100
    for number, (cores, burst, low, works) in enumerate(shares):
        claims.append(claim(str(number), min(cores, room), burst, low=low))
        room -= min(cores, room)
        if works:
            working.append(str(number))
    found = allot(claims, working)
    assert sum(found[key] for key in working) <= 100 + 1e-9
    for each in claims:
        assert each.promised <= found[each.key] <= max(each.most, each.promised)
