"""Means and maxima over a window of time, against the plain computation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.telemetry.sampler import BUCKETS, Window


def test_a_peak_stays_for_the_window_and_no_longer() -> None:
    window = Window(60)
    for second in range(300):
        window.add(1.0 if second == 100 else 0.0, second)
        present = second >= 100
        if present and second <= 160:
            assert window.span.most == 1.0
        if second > 166 or not present:
            assert window.span.most == 0.0
    assert window.span.mean == 0.0


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 5)), min_size=1, max_size=200), st.floats(1, 60))
def test_it_covers_the_window_and_at_most_two_steps_more(
    readings: list[tuple[float, float]], size: float
) -> None:
    window, now, seen = Window(size), 0.0, []
    for value, step in readings:
        now += step
        seen.append((now, value))
        window.add(value, now)
    inside = [value for at, value in seen if at > now - size]
    nearly = [value for at, value in seen if at >= now - size * (1 + 2 / BUCKETS) - 1e-6]
    assert max(inside) <= window.span.most <= max(nearly)
    low, high = min(nearly), max(nearly)
    assert low == pytest.approx(window.span.mean) or low <= window.span.mean <= high + 1e-9
