"""By how much learned device times are off, and how many others have work, by what an H200 said."""

import pytest

from agent.vgpu.correction import LEAST, MOST, Second, corrected, learned


def test_the_factor_stays_within_bounds() -> None:
    assert corrected(MOST, 40, 0.0, throttled=True) == MOST
    assert corrected(LEAST, 40, 100.0, throttled=True) == LEAST
    assert corrected(1.5, 0, 10.0, throttled=True) == 1.5


def test_the_factor_stays_where_a_share_is_right_on_average() -> None:
    """Long kernels have nothing of it in one second and twice of it in the next."""
    factor = 1.0
    for share in (0, 19.0) * 20:
        factor = corrected(factor, 10, share, throttled=True)
    assert factor == pytest.approx(1, abs=0.05)


def second(
    cap: float,
    factor: float = 1.0,
    *,
    throttled: bool = True,
    working: bool = True,
    processes: int = 1,
    listed: bool = False,
) -> Second:
    return Second(factor, cap, working, throttled, processes=processes, listed=listed)


@pytest.mark.parametrize(
    ("seconds", "total", "expected"),
    [
        ((second(20),), 20, (0,)),
        ((second(20), second(80, working=False)), 20, (0, 0.25)),  # one that begins meets it
        ((second(10), second(90)), 96, (1, 0.25)),  # the larger one always has work
        ((second(50), second(50)), 88, (0.875, 0.875)),
        ((second(50), second(50)), 100, (1, 1)),
        ((second(30), second(70, throttled=False)), 52, (0.375, 0.5)),
        ((second(25),) * 4, 100, (3, 3, 3, 3)),
        ((second(5), second(5), second(5), second(85, throttled=False)), 100, (1.25, 1.25, 1.25, 0.375)),
        ((second(40, processes=4),), 40, (0.5,)),  # of its own, seldom at once
        ((second(20), second(80)), 0, (0, 0)),
        ((second(20), second(80, working=False, listed=True)), 100, (1, 0.5)),  # it hides
    ],
)
def test_who_else_has_work(seconds: tuple[Second, ...], total: float, expected: tuple[float, ...]) -> None:
    assert learned(seconds, total, others=False).rivals == expected


def test_a_stranger_has_what_the_others_leave() -> None:
    assert learned((second(20),), 100, others=True).rivals == (1,)


def test_a_factor_is_learned_while_nobody_else_is_there() -> None:
    there = second(70, working=False, listed=True)
    gone = second(70, working=False)
    assert learned((second(30), gone), 60, others=False).factors[0] < 1
    for beside, others in ((there, False), (gone, True)):
        found = learned((second(30), beside), 60, others=others)
        assert list(found.factors) == [1, 1]
        assert found.used(0, 60, others=others) is None


def test_beside_others_nothing_takes_from_who_may_have_obeyed() -> None:
    """Whichever of them exceeded the sum, a brake would take from the rest what they were promised."""
    for total in (61, 80, 100):
        assert learned((second(30), second(30)), total, others=False).factors == (1, 1)
    low = learned((second(30, 0.5), second(30, 2.0)), 100, others=False)
    assert low.factors == (0.5, 2.0)


def test_who_had_less_than_its_share_beside_others_gets_its_own_price_back() -> None:
    """Even if all of the sum was its own."""
    factor = 0.4
    for _ in range(10):
        seconds = (second(30, factor), second(70, working=False, listed=True))
        factor = learned(seconds, 12, others=True).factors[0]
    assert factor == 1
    # A second a little below its share says nothing: others do not show when it was above it.
    assert learned((second(30, 0.5), second(70)), 27, others=False).factors[0] == 0.5
    idle = second(30, 0.5, throttled=False)
    assert learned((idle, second(70)), 5, others=False).factors[0] == 0.5


def test_a_second_with_a_change_says_nothing() -> None:
    for total in (0, 100):
        assert learned((Second(0.5, 20, steady=False),), total, others=False).factors == (0.5,)
        assert learned((Second(0.5, 20, steady=False),), total, others=True).factors == (0.5,)


def test_all_of_a_gpu_is_no_excess() -> None:
    for total in (50, 100):
        assert learned((second(100),), total, others=False).factors == (1,)
