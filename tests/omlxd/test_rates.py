from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omlxd.rates import Rates


def test_rate_is_growth_per_second_over_the_window() -> None:
    rates = Rates(every=5)
    for second in range(0, 121, 5):
        rates.note(second, {"hits": second * 2 if second <= 60 else 120})
    assert rates.over(60, 120, {"hits": 120}) == {"hits": 0}
    assert rates.over(120, 120, {"hits": 120}) == {"hits": 1}


def test_window_is_cut_to_what_is_known() -> None:
    rates = Rates()
    assert rates.over(900, 0, {"hits": 5}) == {"hits": 0}
    rates.note(0, {"hits": 0})
    assert rates.over(900, 10, {"hits": 50}) == {"hits": 5}


def test_counter_that_appears_later_counts_from_zero() -> None:
    rates = Rates()
    rates.note(0, {})
    assert rates.over(60, 10, {"misses": 20}) == {"misses": 2}


@given(st.lists(st.floats(min_value=0, max_value=100), max_size=300))
def test_memory_is_bounded_and_the_longest_window_stays_covered(steps: list[float]) -> None:
    rates = Rates(every=5, longest=900)
    now = 0.0
    for step in steps:
        now += step
        rates.note(now, {"ticks": now})
    assert len(rates._samples) <= 900 / 5 + 2
    if steps:
        grown = rates.over(900, now + 5, {"ticks": now + 5})
        assert abs(grown["ticks"] - 1) < 1e-9
