from __future__ import annotations

from omlxd.wear import life_years


def test_a_terabyte_written_with_a_terabyte_a_day_lasts_600_days() -> None:
    assert life_years(10**12, 10**12) == 1.6


def test_half_the_writing_lasts_twice_as_long() -> None:
    assert life_years(10**12, 10**11) == 16.4


def test_nothing_is_said_where_nothing_is_written_or_known() -> None:
    assert life_years(10**12, 1000) is None
    assert life_years(0, 10**9) is None
