from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from omlxd.storage.blocks import BlockMeta
from omlxd.storage.environment import Environment
from omlxd.storage.ssd import MIN_LIMIT, Missing, SsdError, SsdLocked, SsdTier
from omlxd.storage.ssd_pages import read_header
from tests.storage.ssd_store import (
    NAMESPACE,
    OTHER,
    assert_exact,
    chain_of,
    disk_usage,
    do_chores,
    key_of,
    open_tier,
    payload_of,
    restore,
    spill,
    spill_in_groups,
)

KIB, MIB = 1 << 10, 1 << 20
LONG = os.environ.get("OMLXD_LONG") == "1"


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SsdTier]:
    opened = open_tier(tmp_path / "store", limit=16 * MIB)
    yield opened
    opened.close(clean=False)


def kept(tier: SsdTier, metas: list[BlockMeta]) -> list[int]:
    """Positions of the blocks that are still there."""
    return [meta.position for meta in metas if meta.key in tier]


# -- in and out -----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "zstd", "zstd-planes", "auto"])
def test_what_was_spilled_is_restored_byte_for_byte(tmp_path: Path, codec: str) -> None:
    tier = open_tier(tmp_path, codec=codec)
    metas = chain_of("a", [0, 1, 5000, 300_001, 2 * MIB])
    spill(tier, metas)
    for meta in metas:
        assert meta.key in tier
        assert restore(tier, meta.key) == payload_of(meta.key, meta.nbytes)
        entry = tier.meta(meta.key)
        assert entry is not None
        assert (entry.namespace, entry.nbytes, entry.parent, entry.position, entry.layout) == (
            NAMESPACE,
            meta.nbytes,
            meta.parent,
            meta.position,
            None,
        )
    tier.close()


def test_a_store_that_holds_several_codecs_reads_all_of_them(tmp_path: Path) -> None:
    stored = []
    for codec in ("raw", "zstd", "zstd-planes"):
        tier = open_tier(tmp_path, codec=codec)
        metas = chain_of(codec, [200_000, 70_000])
        spill(tier, metas)
        stored += metas
        for meta in stored:
            assert restore(tier, meta.key) == payload_of(meta.key, meta.nbytes)
        tier.close()


def test_a_block_can_be_restored_only_once_its_commit_was_applied(tier: SsdTier) -> None:
    (meta,) = chain_of("a", [1000])
    plan = tier.plan([tier.encode(meta, memoryview(payload_of(meta.key, 1000)))])
    assert plan is not None
    assert meta.key not in tier
    outcome = tier.commit(plan)
    assert meta.key not in tier
    tier.applied(plan, outcome)
    assert meta.key in tier


def test_only_one_plan_at_a_time(tier: SsdTier) -> None:
    (meta,) = chain_of("a", [1000])
    block = tier.encode(meta, memoryview(payload_of(meta.key, 1000)))
    plan = tier.plan([block])
    with pytest.raises(SsdError, match="one commit at a time"):
        tier.plan([block])
    assert plan is not None
    outcome = tier.commit(plan)
    tier.applied(plan, outcome)
    with pytest.raises(SsdError, match="outstanding"):
        tier.applied(plan, outcome)


def test_clean_blocks_are_never_written_again(tier: SsdTier) -> None:
    metas = chain_of("a", [100_000, 100_000])
    spill(tier, metas)
    written = tier.counts["written_bytes"]
    assert spill(tier, metas) is None
    twice = chain_of("b", [1000]) * 2
    spill(tier, twice)
    assert tier.counts["written_bytes"] == written + 1000
    assert tier.counts["declined_present"] == 3


def test_nothing_to_do_is_no_plan(tier: SsdTier) -> None:
    do_chores(tier)
    assert not tier.has_chores
    assert tier.plan() is None


def test_unknown_keys_are_missing(tier: SsdTier) -> None:
    with pytest.raises(Missing):
        tier.read_into(key_of("nobody", 0), memoryview(bytearray(10)))


def test_a_slot_that_is_too_small_is_refused(tier: SsdTier) -> None:
    (meta,) = chain_of("a", [1000])
    spill(tier, [meta])
    with pytest.raises(ValueError, match="1000 bytes, the slot only 999"):
        tier.read_into(meta.key, memoryview(bytearray(999)))
    with pytest.raises(ValueError, match="announced"):
        tier.encode(meta, memoryview(bytes(999)))


def test_the_store_can_be_opened_with_sane_options_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too small"):
        open_tier(tmp_path, limit=MIN_LIMIT - 1)
    with pytest.raises(ValueError, match="durability 'maybe'"):
        open_tier(tmp_path, durability="maybe")
    with pytest.raises(ValueError, match="policy 'fifo9'"):
        open_tier(tmp_path, policy="fifo9")
    with pytest.raises(ValueError, match="codec 'lzma'"):
        open_tier(tmp_path, codec="lzma")


# -- limit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "smallest", "largest"), [(4 * MIB, 10, 400_000), (16 * MIB, 100_000, 900_000)])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_limit_holds_after_every_commit_and_the_map_is_never_full(
    tmp_path: Path, limit: int, smallest: int, largest: int, policy: str
) -> None:
    import random

    rng = random.Random(4)
    tier = open_tier(tmp_path, limit=limit, policy=policy)
    pushed = number = 0
    while pushed < 5 * limit:
        metas = chain_of(number, [rng.randrange(smallest, largest) for _ in range(rng.randrange(1, 6))])
        number += 1
        pushed += sum(meta.nbytes for meta in metas)
        spill_in_groups(tier, metas)
        assert disk_usage(tmp_path) <= limit
        assert abs(disk_usage(tmp_path) - tier.used_bytes) <= 4096 * 4
    stats = tier.stats()
    assert tier.counts["map_full"] == 0
    assert tier.counts["evicted"] > 0
    assert not [reason for reason in tier.counts if reason.startswith("declined") and tier.counts[reason]]
    assert isinstance(stats["stored_bytes"], int)
    assert tier.used_bytes < 1.12 * stats["stored_bytes"] + 2 * MIB
    assert_exact(tier)
    tier.close()


def test_a_block_that_can_never_fit_is_declined_and_nothing_leaves_for_it(tier: SsdTier) -> None:
    metas = chain_of("a", [1 * MIB] * 5)
    spill_in_groups(tier, metas)
    assert spill(tier, chain_of("huge", [16 * MIB])) is None
    assert tier.counts["declined_too_large"] == 1
    assert kept(tier, metas) == [0, 1, 2, 3, 4]


def test_one_block_may_need_most_of_the_tier(tier: SsdTier) -> None:
    spill_in_groups(tier, chain_of("a", [1 * MIB] * 12))
    huge = chain_of("huge", [12 * MIB])
    spill(tier, huge)
    assert kept(tier, huge) == [0]
    assert restore(tier, huge[0].key) == payload_of(huge[0].key, 12 * MIB)
    assert disk_usage(tier.path) <= 16 * MIB


def test_room_is_made_for_all_blocks_of_a_plan_or_for_none(tier: SsdTier) -> None:
    metas = chain_of("a", [1 * MIB] * 12)
    spill_in_groups(tier, metas)
    for meta in metas:
        tier.pin(meta.key)
    assert spill(tier, chain_of("b", [2 * MIB, 2 * MIB])) is None
    assert tier.counts["declined_no_room"] == 2
    assert kept(tier, metas) == list(range(12))
    for meta in metas:
        entry = tier.meta(meta.key)
        assert entry is not None
        tier.unpin(entry)
    assert spill(tier, chain_of("b", [2 * MIB, 2 * MIB])) is not None


def test_a_record_that_is_being_restored_stays(tier: SsdTier) -> None:
    metas = chain_of("a", [1 * MIB] * 4)
    spill_in_groups(tier, metas)
    assert tier.pin(metas[3].key)
    spill_in_groups(tier, chain_of("b", [1 * MIB] * 13))
    assert 3 in kept(tier, metas)
    assert restore(tier, metas[3].key) == payload_of(metas[3].key, 1 * MIB)
    assert not tier.pin(key_of("nobody", 1))


def test_a_lowered_limit_is_reached_step_by_step_and_the_space_goes_back(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, limit=32 * MIB)
    spill_in_groups(tier, [meta for chain in range(15) for meta in chain_of(chain, [1 * MIB] * 2)])
    assert disk_usage(tmp_path) > 28 * MIB
    tier.limit = 8 * MIB
    assert tier.has_chores
    do_chores(tier)
    if tier.counts["returned_bytes"] == 0:
        pytest.skip("this file system cannot make holes in files")
    assert disk_usage(tmp_path) == tier.used_bytes <= 8 * MIB
    newest = chain_of("new", [1 * MIB] * 5)
    for meta in newest:
        spill(tier, [meta])
        assert disk_usage(tmp_path) <= 8 * MIB
    assert kept(tier, newest) == [0, 1, 2, 3, 4]
    assert_exact(tier)
    with pytest.raises(ValueError, match="too small"):
        tier.limit = 5
    tier.close()


def test_a_lower_limit_at_the_start_is_reached_step_by_step_too(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, limit=32 * MIB)
    spill_in_groups(tier, [meta for chain in range(15) for meta in chain_of(chain, [1 * MIB] * 2)])
    tier.close()
    tier = open_tier(tmp_path, limit=8 * MIB)
    assert tier.stats()["over_limit_bytes"] != 0
    assert len(tier) == 29 or len(tier) == 30, "nothing leaves unannounced"
    do_chores(tier)
    if tier.counts["returned_bytes"] == 0:
        pytest.skip("this file system cannot make holes in files")
    assert disk_usage(tmp_path) <= 8 * MIB
    assert_exact(tier)
    tier.close()


def test_the_free_space_floor_is_never_crossed_and_given_back_when_others_fill_the_disk(tmp_path: Path) -> None:
    size, others = 64 * MIB, 0

    def free_space(path: Path) -> int:
        return size - others - disk_usage(path)

    tier = open_tier(tmp_path, limit=60 * MIB, min_free=32 * MIB, free_space=free_space)
    for number in range(50):
        spill(tier, chain_of(number, [1 * MIB]))
        assert free_space(tmp_path) >= 32 * MIB
    assert tier.used_bytes > 28 * MIB
    others = 16 * MIB
    tier.observe(tier.probe())
    do_chores(tier)
    if tier.counts["returned_bytes"] == 0:
        pytest.skip("this file system cannot make holes in files")
    assert free_space(tmp_path) >= 32 * MIB
    assert len(tier) > 8
    for number in range(50, 70):
        spill(tier, chain_of(number, [1 * MIB]))
        assert free_space(tmp_path) >= 32 * MIB
    others = 0
    tier.observe(tier.probe())
    for number in range(70, 100):
        spill(tier, chain_of(number, [1 * MIB]))
    assert tier.used_bytes > 28 * MIB
    assert_exact(tier)
    tier.close()


# -- who leaves -----------------------------------------------------------------------------------


def test_tails_leave_before_heads(tier: SsdTier) -> None:
    old = chain_of("old", [1 * MIB] * 8)
    for meta in old:  # head first, each in a commit of its own: the order that would lose the head
        spill(tier, [meta])
    spill_in_groups(tier, chain_of("new", [1 * MIB] * 11))
    left = kept(tier, old)
    assert left == list(range(len(left)))
    assert len(left) < 8


def test_what_was_used_stays_longer(tier: SsdTier) -> None:
    chains = [chain_of(name, [1 * MIB] * 3) for name in ("a", "b", "c", "d")]
    for chain in chains:
        spill_in_groups(tier, chain)
    tier.touch([meta.key for meta in chains[0]])
    spill_in_groups(tier, chain_of("e", [1 * MIB] * 5))
    assert kept(tier, chains[0]) == [0, 1, 2]
    assert kept(tier, chains[1]) == []


def test_blocks_whose_parent_is_in_no_tier_leave_first(tier: SsdTier) -> None:
    old, broken = chain_of("old", [1 * MIB] * 4), chain_of("broken", [1 * MIB] * 4)
    spill_in_groups(tier, old)
    spill_in_groups(tier, broken)
    tier.discard([broken[0].key], "damaged")
    assert tier.stats()["waiting_for_parent"] == 1
    spill_in_groups(tier, chain_of("new", [1 * MIB] * 10))
    assert kept(tier, broken) == []
    assert kept(tier, old) == [0, 1, 2, 3], "although it was older"
    assert tier.counts["evicted_orphans"] == 3


def test_blocks_whose_parent_is_still_in_ram_are_no_orphans(tier: SsdTier) -> None:
    tails_first = chain_of("a", [1 * MIB] * 4)
    tier.elsewhere = lambda key: key == tails_first[0].key
    for meta in reversed(tails_first[1:]):  # a cleaner spills the coldest first, and tails are
        spill(tier, [meta])
    old = chain_of("old", [1 * MIB] * 7)
    tier.touch([meta.key for meta in tails_first])
    spill_in_groups(tier, old)
    spill(tier, [tails_first[0]])
    spill_in_groups(tier, chain_of("new", [1 * MIB] * 4))
    assert tier.counts["evicted_orphans"] == 0
    assert tier.stats()["waiting_for_parent"] == 0


@pytest.mark.parametrize("positions", [(1, 1), (1, 2)])
def test_blocks_that_name_each_other_as_parents_make_no_loop(tmp_path: Path, positions: tuple[int, int]) -> None:
    first, other = key_of("loop", 1), key_of("loop", 2)
    path = tmp_path / "store"
    tier = open_tier(path)
    spill(tier, [BlockMeta(first, NAMESPACE, 10_000, other, positions[0])])
    spill(tier, [BlockMeta(other, NAMESPACE, 10_000, first, positions[1])])
    spill(tier, [BlockMeta(key_of("self", 1), NAMESPACE, 10_000, key_of("self", 1), 1)])
    for _ in range(2):
        ends = [tier.chain(key)[0] for key in tier.entries]
        assert set(ends) <= set(tier.entries)
        assert_exact(tier)
        tier.close()
        tier = open_tier(path)
    tier.clear()
    do_chores(tier)
    assert not tier.entries
    tier.close()


def test_the_parent_of_a_block_that_is_being_stored_is_no_victim(tier: SsdTier) -> None:
    chain = chain_of("a", [12 * MIB, 1 * MIB, 1 * MIB])
    for meta in chain:
        spill(tier, [meta])
    assert spill(tier, chain_of("a", [3 * MIB], start=3)) is None, "it would have to break its own chain"
    assert kept(tier, chain) == [0, 1, 2]
    spill(tier, chain_of("a", [2 * MIB], start=1)[:1])
    fork = chain_of("fork", [2 * MIB])[0]
    spill(tier, [BlockMeta(fork.key, NAMESPACE, fork.nbytes, chain[0].key, 1)])
    assert kept(tier, chain)[0] == 0
    assert fork.key in tier


def test_a_namespace_keeps_to_its_share(tier: SsdTier) -> None:
    tier.set_share(OTHER, 4 * MIB)
    mine = chain_of("mine", [1 * MIB] * 6)
    spill_in_groups(tier, mine)
    for number in range(8):
        spill_in_groups(tier, chain_of(number, [1 * MIB] * 2, OTHER))
    totals = {space.id: space for space in tier.namespaces()}
    assert 3 * MIB <= totals[OTHER].stored_bytes <= 4 * MIB
    assert kept(tier, mine) == list(range(6)), "one namespace's excess is not another's loss"
    assert spill(tier, chain_of("wide", [5 * MIB], OTHER)) is None
    assert tier.counts["declined_share"] == 1
    tier.set_share(OTHER, None)
    assert spill(tier, chain_of("wide", [5 * MIB], OTHER)) is not None
    assert_exact(tier)


def test_a_failed_commit_gives_the_victims_back(tier: SsdTier) -> None:
    from omlxd.storage.ssd import CommitOutcome

    old = chain_of("old", [1 * MIB] * 12)
    spill_in_groups(tier, old)
    metas = chain_of("new", [1 * MIB] * 4)
    plan = tier.plan([tier.encode(meta, memoryview(payload_of(meta.key, meta.nbytes))) for meta in metas])
    assert plan is not None
    assert plan.victims
    assert all(entry.key not in tier for entry in plan.victims)
    tier.applied(plan, CommitOutcome(stored=False, removed=False, reason="a test says so"))
    assert kept(tier, old) == list(range(12))
    assert kept(tier, metas) == []
    assert_exact(tier)


# -- leaving by request -----------------------------------------------------------------------------


def test_discarded_records_are_out_at_once_and_leave_the_disk_with_the_next_plan(tier: SsdTier) -> None:
    metas = chain_of("a", [1 * MIB] * 4)
    spill_in_groups(tier, metas)
    assert tier.discard([metas[3].key, key_of("nobody", 0)], "removed") == 1
    assert kept(tier, metas) == [0, 1, 2]
    do_chores(tier)
    with pytest.raises(Missing):
        tier.read_into(metas[3].key, memoryview(bytearray(1 * MIB)))
    assert_exact(tier)


def test_what_is_discarded_while_it_is_being_committed_does_not_appear(tier: SsdTier) -> None:
    metas = chain_of("a", [1000, 1000])
    plan = tier.plan([tier.encode(meta, memoryview(payload_of(meta.key, 1000))) for meta in metas])
    assert plan is not None
    assert tier.discard([metas[1].key], "removed") == 1
    tier.applied(plan, tier.commit(plan))
    assert kept(tier, metas) == [0]
    do_chores(tier)
    assert_exact(tier)


@pytest.mark.parametrize("everything", [True, False])
def test_clear_empties_and_gives_the_space_back(tier: SsdTier, everything: bool) -> None:
    tier.register_namespace(OTHER, {"model": "b"})
    mine, others = chain_of("mine", [1 * MIB] * 5), chain_of("others", [1 * MIB] * 6, OTHER)
    spill_in_groups(tier, mine)
    spill_in_groups(tier, others)
    in_flight = chain_of("late", [1 * MIB], OTHER)
    plan = tier.plan([tier.encode(in_flight[0], memoryview(payload_of(in_flight[0].key, 1 * MIB)))])
    assert plan is not None
    assert tier.clear(None if everything else OTHER) == (11 if everything else 7)
    tier.applied(plan, tier.commit(plan))
    do_chores(tier)
    assert kept(tier, others) == kept(tier, in_flight) == []
    assert kept(tier, mine) == ([] if everything else list(range(5)))
    assert_exact(tier)
    assert {space.id: space.descriptor for space in tier.namespaces()}[OTHER] == {"model": "b"}
    if everything or tier.counts["returned_bytes"]:
        assert disk_usage(tier.path) < (1 if everything else 6) * MIB
    spill_in_groups(tier, others)
    assert_exact(tier)


# -- restarts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [True, False])
def test_records_namespaces_and_totals_survive_a_restart(tmp_path: Path, clean: bool) -> None:
    tier = open_tier(tmp_path)
    tier.register_namespace(NAMESPACE, {"model": "org/name", "block_tokens": 64})
    tier.register_namespace(OTHER, {"model": "unused"})
    metas = [*chain_of("a", [300_000] * 3), BlockMeta(key_of("l", 0), OTHER, 10, None, 4, layout=b"own layout")]
    spill(tier, metas)
    tier.close(clean)
    tier = open_tier(tmp_path)
    assert tier.clean_start is clean
    assert tier.aside == ""
    assert kept(tier, metas) == [0, 1, 2, 4]
    assert {space.id: space.descriptor for space in tier.namespaces()} == {
        NAMESPACE: {"model": "org/name", "block_tokens": 64},
        OTHER: {"model": "unused"},
    }
    entry = tier.meta(key_of("l", 0))
    assert entry is not None
    assert entry.layout == b"own layout"
    assert_exact(tier)
    assert tier.lifetime["written_bytes"] == 900_010
    tier.close()


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_hottest_block_is_not_the_first_victim_after_a_restart(tmp_path: Path, clean: bool, policy: str) -> None:
    tier = open_tier(tmp_path, limit=16 * MIB, policy=policy)
    hot, cold = chain_of("hot", [1 * MIB] * 4), chain_of("cold", [1 * MIB] * 6)
    spill_in_groups(tier, hot)
    spill_in_groups(tier, cold)
    tier.touch([meta.key for meta in hot])
    tier.persist()
    do_chores(tier)
    tier.close(clean)
    tier = open_tier(tmp_path, limit=16 * MIB, policy=policy)
    spill_in_groups(tier, chain_of("new", [1 * MIB] * 8))
    assert kept(tier, hot) == [0, 1, 2, 3]
    assert len(kept(tier, cold)) < 6
    tier.close()


def test_the_order_of_victims_is_the_same_with_and_without_a_restart(tmp_path: Path) -> None:
    import random

    def victims(path: Path, restarts: set[int]) -> list[bytes]:
        rng = random.Random(9)
        tier = open_tier(path, limit=8 * MIB)
        order: list[bytes] = []
        for step in range(40):
            before = set(tier.entries)
            spill_in_groups(tier, chain_of(step, [400_000] * 2))
            order += sorted(before - set(tier.entries))
            tier.touch([meta.key for meta in chain_of(rng.randrange(step + 1), [1, 1])])
            if step in restarts:
                tier.close()
                tier = open_tier(path, limit=8 * MIB)
        tier.close()
        return order

    assert victims(tmp_path / "one", set()) == victims(tmp_path / "two", {5, 17, 30})


def test_a_policy_can_be_changed_between_two_starts(tmp_path: Path) -> None:
    for policy in ("arc", "lru", "arc"):
        tier = open_tier(tmp_path, policy=policy)
        spill(tier, chain_of(policy, [1000] * 3))
        tier.touch([key_of(policy, 0)])
        assert_exact(tier)
        tier.close()
    assert len(open_tier(tmp_path)) == 6


def test_record_numbers_are_never_given_twice(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    metas = chain_of("a", [1000] * 3)
    spill(tier, metas)
    entry = tier.meta(metas[2].key)
    assert entry is not None
    highest = entry.chunk_id
    tier.discard([metas[2].key], "removed")
    do_chores(tier)
    tier.close(clean=False)
    tier = open_tier(tmp_path)
    spill(tier, chain_of("b", [1000]))
    entry = tier.meta(key_of("b", 0))
    assert entry is not None
    assert entry.chunk_id > highest
    tier.close()


# -- the owner ------------------------------------------------------------------------------------


def test_a_second_owner_is_told_the_pid_of_the_first(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    with pytest.raises(SsdLocked, match=f"process {os.getpid()}") as caught:
        open_tier(tmp_path)
    assert caught.value.pid == os.getpid()
    tier.close()
    open_tier(tmp_path).close()


def test_a_lock_that_a_dead_owner_left_is_taken_over(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from tests.storage.ssd_store import *\n"
        "tier = open_tier(Path(sys.argv[1])); spill(tier, chain_of('a', [1000])); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert (tmp_path / "owner").read_text().split()[0] != str(os.getpid())
    tier = open_tier(tmp_path)
    assert key_of("a", 0) in tier
    assert (tmp_path / "owner").read_text().split()[0] == str(os.getpid())
    tier.close()


def test_only_the_owner_can_read_the_directory_and_backups_pass_it_by(tmp_path: Path) -> None:
    open_tier(tmp_path / "deep" / "store").close()
    assert (tmp_path / "deep" / "store").stat().st_mode & 0o777 == 0o700
    tag = (tmp_path / "deep" / "store" / "CACHEDIR.TAG").read_text()
    assert tag.startswith("Signature: 8a477f597d28d172789f06886806bc55")


# -- everything at random, against a model ----------------------------------------------------------


class StoreMachine(RuleBasedStateMachine):
    """Puts, uses, pins, discards, clears, changes of the limit and restarts, in any order."""

    @initialize(limit=st.sampled_from([4 * MIB, 8 * MIB]), policy=st.sampled_from(["lru", "arc"]))
    def start(self, limit: int, policy: str) -> None:
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.limit, self.policy = limit, policy
        self.tier = open_tier(self.path, limit=limit, policy=policy, codec="zstd-planes")
        self.known: dict[bytes, int] = {}
        self.others: dict[int, bool] = {}
        self.pinned: list[bytes] = []
        self.chains = 0

    @rule(count=st.integers(1, 5), size=st.integers(0, 600_000), other=st.booleans(), fork=st.booleans())
    def put(self, count: int, size: int, other: bool, fork: bool) -> None:
        self.chains += not fork
        # A key names its content, and with it a size and a namespace: another offer of the same key has both again.
        sizes = [self.known.get(key_of(self.chains, at), size) for at in range(count)]
        metas = chain_of(self.chains, sizes, OTHER if self.others.setdefault(self.chains, other) else NAMESPACE)
        spill_in_groups(self.tier, metas)
        self.known.update({meta.key: meta.nbytes for meta in metas})

    @rule(chain=st.integers(0, 30), length=st.integers(1, 5))
    def use(self, chain: int, length: int) -> None:
        self.tier.touch([key_of(chain, at) for at in range(length)])

    @rule(chain=st.integers(0, 30), at=st.integers(0, 4))
    def pin(self, chain: int, at: int) -> None:
        if self.tier.pin(key_of(chain, at)):
            self.pinned.append(key_of(chain, at))

    @rule()
    def unpin(self) -> None:
        if self.pinned:
            entry = self.tier.meta(self.pinned.pop())
            assert entry is not None, "a pinned record left"
            self.tier.unpin(entry)

    @rule(chain=st.integers(0, 30), at=st.integers(0, 4))
    def discard(self, chain: int, at: int) -> None:
        key = key_of(chain, at)
        if key not in self.pinned:
            self.tier.discard([key], "removed")

    @rule(namespace=st.sampled_from([None, NAMESPACE, OTHER]))
    def clear(self, namespace: bytes | None) -> None:
        if not self.pinned:
            self.tier.clear(namespace)

    @rule(limit=st.sampled_from([4 * MIB, 6 * MIB, 8 * MIB]))
    def change_limit(self, limit: int) -> None:
        self.limit = self.tier.limit = limit
        do_chores(self.tier)

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        self.pinned.clear()
        self.tier.close(clean)
        self.tier = open_tier(self.path, limit=self.limit, policy=self.policy, codec="zstd-planes")

    @rule()
    def chores(self) -> None:
        do_chores(self.tier)

    @invariant()
    def exact(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert all(self.known.get(key) == entry.nbytes for key, entry in self.tier.entries.items())
        assert self.tier.counts["map_full"] == 0
        if not self.tier.has_chores:
            assert_exact(self.tier)
            assert disk_usage(self.path) == self.tier.used_bytes
            if not self.pinned:
                assert disk_usage(self.path) <= self.limit

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
            self.folder.cleanup()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=200 if LONG else 12, stateful_step_count=60 if LONG else 25, deadline=None)


def test_auto_goes_by_what_restores_took_to_read_check_and_decode(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, codec="zstd")
    (meta,) = chain_of("a", [300_000])
    spill(tier, [meta])
    reader = tier._reader
    assert (reader.fetch_rate, reader.decode_rate("zstd")) == (0, 0)
    assert restore(tier, meta.key) == payload_of(meta.key, 300_000)
    assert 0 < reader.fetch_rate < reader.rate, "checking counts"
    assert reader.decode_rate("zstd") > 0
    assert reader.decode_rate("zstd-planes2") == 0
    assert tier.codec_of(NAMESPACE) == "zstd"
    tier.close()


@pytest.mark.parametrize(("durability", "synced"), [("interval", [3, 5]), ("none", [])])
def test_interval_makes_commits_durable_with_each_look_at_the_disk_and_never_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, synced: list[int]
) -> None:
    tier = open_tier(tmp_path, durability=durability)
    found: list[int] = []
    sync = Environment.sync

    def noted(environment: Environment) -> None:
        found.append(read_header(environment.descriptor).transaction - begun)
        sync(environment)

    monkeypatch.setattr(Environment, "sync", noted)
    begun = tier._environment.header.transaction
    for number in range(5):
        spill(tier, chain_of(number, [5000]))
        assert tier._environment.header.transaction == begun + number + 1
        if number in (2, 4):
            tier.observe(tier.probe())
    assert found == synced
    assert tier.counts["synced"] == len(synced)
    tier.close()
