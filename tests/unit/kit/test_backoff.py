"""Pauses between tries."""

from hypothesis import given
from hypothesis import strategies as st

from agent.kit.tasks import Backoff


def test_pauses_grow_to_the_longest_and_begin_anew() -> None:
    backoff = Backoff(first=1, longest=10, factor=3, jitter=0)
    assert [backoff.next() for _ in range(5)] == [1, 3, 9, 10, 10]
    backoff.reset()
    assert backoff.next() == 1


@given(
    first=st.floats(0.001, 10),
    times=st.floats(1, 100),
    factor=st.floats(1, 10),
    jitter=st.floats(0, 1),
    tries=st.integers(1, 50),
)
def test_every_pause_stays_within_its_bounds(
    first: float, times: float, factor: float, jitter: float, tries: int
) -> None:
    longest = first * times
    backoff = Backoff(first, longest, factor, jitter)
    plain = first
    for _ in range(tries):
        pause = backoff.next()
        upper = min(plain, longest)
        assert upper * (1 - jitter) * (1 - 1e-9) <= pause <= upper * (1 + 1e-9)
        plain = min(plain * factor, longest)


def test_a_thousand_failures_do_not_overflow() -> None:
    backoff = Backoff(first=0.5, longest=30, factor=10)
    for _ in range(1000):
        assert backoff.next() <= 30
