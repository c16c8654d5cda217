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


def second(cap: float, *, throttled: bool = True, working: bool = True, processes: int = 1) -> Second:
    return Second(1.0, cap, working=working, throttled=throttled, processes=processes)


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
    ],
)
def test_who_else_has_work(seconds: tuple[Second, ...], total: float, expected: tuple[float, ...]) -> None:
    assert learned(1.0, seconds, total, others=False).rivals == expected


def test_a_stranger_has_what_the_others_leave() -> None:
    assert learned(1.0, (second(20),), 100, others=True).rivals == (1,)


def test_alone_a_container_learns_its_own_factor_and_is_not_braked() -> None:
    found = learned(0.5, (second(30), second(70, working=False)), 60, others=False)
    assert found.brake == 0.5
    assert found.factors[0] < 1 == found.factors[1]
    assert found.in_force(0) == found.factors[0]


def test_a_second_with_a_change_says_nothing_of_several() -> None:
    changed = Second(1.0, 20, steady=False)
    assert learned(1.0, (changed, second(20)), 100, others=False).brake == 1
    assert learned(1.0, (changed,), 100, others=False).factors == (1,)


def test_a_brake_stays_off_where_shares_are_right_on_average() -> None:
    """Long kernels exceed them in one second, and have less in the next."""
    brake, least = 1.0, 1.0
    for total in (39.5, 79.5) * 20:
        found = learned(brake, (second(30), second(30)), total, others=False)
        brake = found.brake
        least = min(least, found.in_force(0))
    assert least > 0.9


def test_all_of_a_gpu_is_no_excess() -> None:
    for total in (50, 100):
        found = learned(1.0, (second(30), second(70)), total, others=False)
        assert found.in_force(0) == found.in_force(1) == 1
