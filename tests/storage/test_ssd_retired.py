"""Blocks of a retired namespace leave before all others."""

from __future__ import annotations

from pathlib import Path

from tests.storage.ssd_store import assert_exact, chain_of, open_tier, restore, spill_in_groups

MIB = 1 << 20
OLD, NEW = b"o" * 32, b"n" * 32


def test_retired_blocks_leave_first_although_they_were_used_last_tails_before_heads(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, limit=16 * MIB)
    kept = chain_of("kept", [MIB] * 6, NEW)
    retired = chain_of("retired", [MIB] * 6, OLD)
    spill_in_groups(tier, [*kept, *retired])
    tier.touch([meta.key for meta in retired])
    tier.retire(OLD, True)
    more = chain_of("more", [MIB] * 5, NEW)
    spill_in_groups(tier, more)
    assert all(meta.key in tier for meta in [*kept, *more])
    left = [meta.position for meta in retired if meta.key in tier]
    assert left == list(range(len(left)))
    assert 0 < len(left) < 6
    assert_exact(tier)
    tier.close()


def test_namespace_that_is_taken_back_is_an_ordinary_one_again(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, limit=16 * MIB)
    first = chain_of("first", [MIB] * 6, NEW)
    back = chain_of("back", [MIB] * 6, OLD)
    spill_in_groups(tier, [*first, *back])
    tier.retire(OLD, True)
    tier.retire(OLD, False)
    spill_in_groups(tier, chain_of("more", [MIB] * 5, NEW))
    assert all(meta.key in tier for meta in back)
    assert not all(meta.key in tier for meta in first)
    tier.close()


def test_retired_blocks_are_readable_until_they_leave_and_what_was_discarded_is_no_trouble(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, limit=16 * MIB)
    retired = chain_of("retired", [MIB] * 6, OLD)
    spill_in_groups(tier, retired)
    tier.retire(OLD, True)
    assert restore(tier, retired[0].key)
    tier.discard([retired[5].key, retired[4].key], "removed")
    spill_in_groups(tier, chain_of("more", [MIB] * 12, NEW))
    assert_exact(tier)
    tier.close()
