from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omlxd.storage.figures import Histogram


@given(st.lists(st.floats(min_value=0, max_value=100)))
def test_counts_are_those_at_or_under_each_bound(values: list[float]) -> None:
    histogram = Histogram([1, 5, 20])
    for value in values:
        histogram.observe(value)
    assert histogram.cumulative() == [sum(v <= bound for v in values) for bound in (1, 5, 20, 100)]
    assert histogram.count == len(values)
    assert abs(histogram.sum - sum(values)) < 1e-6


def test_one_observation_may_count_several_times() -> None:
    histogram = Histogram([1])
    histogram.observe(0.5, times=3)
    assert (histogram.cumulative(), histogram.sum) == ([3, 3], 1.5)
