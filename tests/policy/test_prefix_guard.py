from __future__ import annotations

import pytest

from omlxd.policy.prefix_guard import Guard


def on_trial() -> Guard:
    """A guard whose predictions are on trial, 40,000 blocks asked for."""
    guard = Guard(1_000)
    for _ in range(40):
        guard.settle(1_000, 0, 0, True, compare=True)
    assert not guard.lru_leads
    return guard


@pytest.mark.parametrize("lost", [30, 500, 1_000])
def test_one_request_ends_no_trial_however_long_it_is(lost: int) -> None:
    guard = on_trial()
    guard.settle(1_000, 0, lost, True, compare=True)
    assert not guard.lru_leads


def test_what_is_lost_in_several_requests_ends_it() -> None:
    guard = on_trial()
    requests = 0
    while not guard.lru_leads and requests < 20:
        guard.settle(100, 0, 3, True, compare=True)
        requests += 1
    assert requests == 4  # the worst is left out; of 40,000 blocks 8 may be lost
    before = guard.state()
    again = Guard(1_000)
    again.restore(*before)
    assert again.state() == before


def test_a_trial_begins_again_after_a_pause_but_not_in_debt() -> None:
    guard = on_trial()
    for _ in range(3):
        guard.settle(100, 0, 100, True, compare=True)
    assert guard.lru_leads
    asked = 40_300
    while guard.lru_leads:
        guard.settle(1_000, 0, 0, True, compare=True)
        asked += 1_000
        assert asked < 200_000
    assert asked >= 100_000, "300 blocks were lost; with the worst 100 aside that is 0.2 % of 100,000"
