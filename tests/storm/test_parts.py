"""Which instances count as others', by what the agent could have seen."""

import pytest

from tests.storm.parts import Parts

ONE, PLACE, ELSEWHERE = "MIG-1", (14, 0), (14, 2)


@pytest.mark.parametrize(
    ("between", "place", "others"),
    [
        (lambda _: None, PLACE, set()),
        (lambda _: None, ELSEWHERE, {ONE}),
        (Parts.looked, PLACE, {ONE}),
        (Parts.booted, PLACE, {ONE}),
        (lambda parts: [parts.came(ONE, ELSEWHERE), parts.went(ONE)], PLACE, {ONE}),
    ],
    ids=["unseen", "elsewhere", "looked", "booted", "another meanwhile"],
)
def test_one_of_the_agent_that_is_made_again_unseen_stays_its_own(
    between: object, place: tuple[int, int], others: set[str]
) -> None:
    parts = Parts()
    parts.made(ONE, PLACE)
    parts.went(ONE)
    assert callable(between)
    between(parts)
    parts.came(ONE, place)
    assert parts.others == others


def test_one_that_the_agent_did_not_make_stays_others() -> None:
    parts = Parts()
    for _ in range(2):
        parts.came(ONE, PLACE)
        assert parts.others == {ONE}
        parts.went(ONE)
    parts.made(ONE, PLACE)
    parts.destroyed(ONE)
    parts.came(ONE, PLACE)
    assert parts.others == {ONE}
