from __future__ import annotations

import logging
import threading

import pytest

from omlxd.storage.paged import CacheBlock, CacheManager, PagedCacheManager, PagedCacheStats, compute_block_hash
from tests.storage.paged_checks import check_invariants

TOKENS = list(range(100, 116))


def manager_of(max_blocks: int = 8, initial_blocks: int = 256, block_size: int = 4) -> PagedCacheManager:
    return PagedCacheManager(block_size, max_blocks, model_name="m", initial_blocks=initial_blocks)


def filled(manager: PagedCacheManager, tokens: list[int], **salts: object) -> list[CacheBlock]:
    """A request's full blocks, registered and in use."""
    blocks = manager.get_new_blocks(len(tokens) // manager.block_size)
    manager.cache_full_blocks(blocks, tokens, 0, len(blocks), **salts)  # type: ignore[arg-type]
    return blocks


def ids(blocks: list[CacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


class TestPool:
    def test_the_null_block_is_reserved_and_never_handed_out_counted_or_freed(self) -> None:
        manager = manager_of(max_blocks=3)
        assert (manager.null_block.block_id, manager.null_block.is_null, manager.null_block.ref_count) == (0, True, 1)
        assert manager.size == 0
        assert ids(manager.get_new_blocks(2)) == [1, 2]
        assert manager.allocate_block() is None
        assert manager.free_block(0) is False
        assert manager.decrement_ref(0) is False
        assert manager.increment_ref(0) is False
        assert manager.evict_block_permanently(0) is False
        assert manager.mark_block_cold(0) is False
        manager.touch([manager.null_block])
        manager.release_blocks([manager.null_block])
        assert manager.release_for_eviction([0]) == 0
        assert (manager.size, manager.usage) == (2, 1.0)
        check_invariants(manager)

    def test_the_pool_grows_by_256_for_one_and_by_the_shortfall_and_128_for_many(self) -> None:
        manager = manager_of(max_blocks=1000, initial_blocks=10)
        assert manager._current_allocated_count == 10
        manager.get_new_blocks(9)
        assert manager._current_allocated_count == 10
        assert manager.allocate_block() is not None
        assert manager._current_allocated_count == 266
        manager.get_new_blocks(manager.free_blocks + 5)
        assert manager._current_allocated_count == 266 + 5 + 128
        manager.get_new_blocks(manager.free_blocks + 1)
        assert manager._current_allocated_count == 399 + 1 + 128
        manager.get_new_blocks(manager.free_blocks + 400)
        assert manager._current_allocated_count == 1000
        check_invariants(manager)

    def test_asking_for_too_many_blocks_says_how_many_there_are_and_takes_none(self) -> None:
        manager = manager_of(max_blocks=20, initial_blocks=5)
        with pytest.raises(ValueError, match=r"20 blocks.*4 are free.*15 more.*max_blocks is 20"):
            manager.get_new_blocks(20)
        assert (manager.free_blocks, manager._current_allocated_count) == (4, 5)
        assert len(manager.get_new_blocks(19)) == 19
        check_invariants(manager)

    def test_a_pool_of_the_null_block_alone_has_nothing_to_give(self) -> None:
        manager = manager_of(max_blocks=1)
        assert (manager.allocate_block(), manager.usage, manager.size) == (None, 0.0, 0)
        check_invariants(manager)

    @pytest.mark.parametrize("name", ["block_size", "max_blocks", "initial_blocks"])
    def test_sizes_that_cannot_be_are_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name} is 0"):
            PagedCacheManager(**{"model_name": "m", name: 0})

    def test_without_sizes_it_has_256_of_1000_blocks_of_64_tokens(self) -> None:
        manager = PagedCacheManager(model_name="m")
        sizes = (manager.block_size, manager._current_allocated_count, manager.max_blocks, manager.free_blocks)
        assert sizes == (64, 256, 1000, 255)
        assert manager.stats.total_blocks == 256

    def test_without_a_model_name_there_is_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            manager_of()
            assert not caplog.records
            PagedCacheManager()
        assert "model_name" in caplog.text


class TestReferences:
    def test_the_last_reference_takes_the_hash_with_it(self) -> None:
        manager = manager_of()
        block = filled(manager, TOKENS[:4])[0]
        name = block.block_hash
        assert name is not None
        assert manager.increment_ref(block.block_id)
        assert manager.free_block(block.block_id) is False
        assert manager.get_cached_block(name) is block
        assert manager.free_block(block.block_id) is True
        assert manager.get_cached_block(name) is None
        assert manager.free_block_queue.get_all_free_blocks()[-1] is block
        check_invariants(manager)

    def test_a_double_free_and_an_unknown_id_warn_and_change_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        manager = manager_of()
        block = manager.allocate_block()
        assert block is not None
        assert manager.free_block(block.block_id)
        for block_id in (block.block_id, 999, -1):
            caplog.clear()
            assert manager.free_block(block_id) is False
            assert str(block_id) in caplog.text
        check_invariants(manager)

    def test_free_blocks_is_a_number_and_release_blocks_frees_many(self) -> None:
        manager = manager_of()
        blocks = manager.get_new_blocks(3)
        manager.touch(blocks[:1])
        assert manager.free_blocks == 4
        assert manager.release_blocks(blocks) == 2
        assert manager.free_blocks == 6
        check_invariants(manager)

    def test_blocks_released_for_eviction_can_be_found_until_they_are_taken(self) -> None:
        manager = manager_of(max_blocks=5)
        blocks = filled(manager, TOKENS[:12])
        names = [block.block_hash for block in blocks]
        assert manager.release_for_eviction([*ids(blocks)[::-1], 999]) == 3
        assert manager.get_evictable_blocks(9) == blocks[::-1]
        assert manager.free_blocks == 4
        assert manager.get_computed_blocks(TOKENS[:12]) == (blocks, 12)
        manager.get_new_blocks(2)  # one that was never used, and the tail
        assert manager.stats.evictions == 1
        assert manager.get_computed_blocks(TOKENS[:12]) == (blocks[:2], 8)
        assert manager.get_cached_block(names[2] or b"") is None
        check_invariants(manager)

    def test_a_block_without_a_hash_that_is_released_for_eviction_is_just_free(self) -> None:
        manager = manager_of()
        block = manager.allocate_block()
        assert block is not None
        block.token_count = 3
        assert manager.release_for_eviction([block.block_id]) == 1
        assert (manager.get_evictable_blocks(9), block.token_count) == ([], 0)
        check_invariants(manager)

    def test_a_hit_takes_a_block_out_of_the_queue(self) -> None:
        manager = manager_of()
        blocks = filled(manager, TOKENS[:8])
        manager.release_for_eviction(ids(blocks))
        manager.touch(blocks)
        assert [block.ref_count for block in blocks] == [1, 1]
        assert (manager.get_evictable_blocks(9), manager.size) == ([], 2)
        check_invariants(manager)

    def test_acquiring_checks_the_hash_and_takes_the_reference_in_one_step(self) -> None:
        manager = manager_of(max_blocks=2)
        block = filled(manager, TOKENS[:4])[0]
        name = block.block_hash
        assert name is not None
        manager.release_for_eviction(ids([block]))
        assert manager.acquire_cached_block(block.block_id, b"other") is False
        assert manager.acquire_cached_block(block.block_id, name) is True
        assert block.ref_count == 1
        manager.release_for_eviction(ids([block]))
        assert manager.allocate_block() is block  # evicted and given to somebody else
        assert manager.acquire_cached_block(block.block_id, name) is False
        assert manager.acquire_cached_block(99, name) is False
        assert block.ref_count == 1
        check_invariants(manager)

    def test_a_free_block_without_content_gets_no_reference(self) -> None:
        manager = manager_of()
        assert manager.increment_ref(3) is False
        assert manager.increment_ref(99) is False
        check_invariants(manager)


class TestPrefixes:
    def test_only_full_blocks_are_found_and_the_first_miss_ends_it(self) -> None:
        manager = manager_of(max_blocks=20)
        blocks = filled(manager, TOKENS)
        assert manager.get_computed_blocks(TOKENS[:15]) == (blocks[:3], 12)
        assert manager.get_computed_blocks(TOKENS[:3]) == ([], 0)
        manager.free_block(blocks[1].block_id)
        assert manager.get_computed_blocks(TOKENS) == (blocks[:1], 4)
        assert (manager.stats.hits, manager.stats.misses) == (3 + 1, 1)
        assert manager.stats.hit_rate == 4 / 5
        check_invariants(manager)

    def test_a_lookup_takes_no_reference_and_a_claim_does(self) -> None:
        manager = manager_of()
        blocks = filled(manager, TOKENS[:8])
        manager.release_for_eviction(ids(blocks))
        assert manager.get_computed_blocks(TOKENS[:8]) == (blocks, 8)
        assert manager.size == 0
        assert manager.claim_computed_blocks(TOKENS[:8]) == (blocks, 8)
        assert [block.ref_count for block in blocks] == [1, 1]
        check_invariants(manager)

    def test_the_list_that_a_lookup_returns_is_the_callers_own(self) -> None:
        manager = manager_of()
        filled(manager, TOKENS[:8])
        found, _ = manager.get_computed_blocks(TOKENS[:8])
        found.clear()
        assert manager.get_computed_blocks(TOKENS[:8])[1] == 8

    def test_find_shared_prefix_splits_a_prompt(self) -> None:
        manager = manager_of()
        blocks = filled(manager, TOKENS[:8])
        assert manager.find_shared_prefix(TOKENS) == (ids(blocks), TOKENS[8:])
        assert manager.find_shared_prefix([1, 2, 3, 4, 5]) == ([], [1, 2, 3, 4, 5])

    @pytest.mark.parametrize(
        "salts",
        [
            {"extra_keys": ("lora", 1)},
            {"extra_keys": "image", "extra_key_token_start": 5},
            {"extra_key_ranges": [(0, "a"), (6, "b"), (9, None)]},
        ],
    )
    def test_insertion_and_lookup_salt_alike(self, salts: dict) -> None:
        manager = manager_of(max_blocks=20)
        blocks = filled(manager, TOKENS, **salts)
        assert manager.get_computed_blocks(TOKENS, **salts) == (blocks, 16)
        plain = filled(manager, TOKENS)
        assert manager.get_computed_blocks(TOKENS)[0][-1] is plain[-1]
        assert manager.get_computed_blocks(TOKENS, **salts) == (blocks, 16)
        assert manager.get_computed_blocks(TOKENS, extra_keys="another") == ([], 0)

    def test_blocks_are_registered_one_by_one_as_all_at_once(self) -> None:
        manager = manager_of()
        one, two = manager.get_new_blocks(2)
        parent = manager.register_block_hash(one, TOKENS[:4])
        assert parent == compute_block_hash(None, TOKENS[:4], None, "m")
        manager.register_block_hash(two, TOKENS[4:8], parent)
        assert manager.get_computed_blocks(TOKENS[:8]) == ([one, two], 8)
        assert manager.find_cached_block(TOKENS[4:8], parent) is two
        assert manager.find_cached_block(TOKENS[4:8], None) is None
        check_invariants(manager)

    def test_the_next_blocks_of_a_request_continue_its_chain(self) -> None:
        manager = manager_of()
        blocks = manager.get_new_blocks(3)
        manager.cache_full_blocks(blocks, TOKENS[:4], 0, 1)
        manager.cache_full_blocks(blocks, TOKENS[:12], 1, 3)
        assert manager.get_computed_blocks(TOKENS[:12]) == (blocks, 12)

    def test_registering_anew_leaves_no_trace_of_the_old_hash(self) -> None:
        manager = manager_of()
        block = manager.get_new_blocks(1)[0]
        old = manager.register_block_hash(block, TOKENS[:4])
        assert old is not None
        manager.register_block_hash(block, TOKENS[4:8])
        assert manager.get_cached_block(old) is None
        check_invariants(manager)

    def test_announcing_more_full_blocks_than_there_are_registers_none(self) -> None:
        manager = manager_of()
        blocks = manager.get_new_blocks(2)
        with pytest.raises(ValueError, match="3 full blocks"):
            manager.cache_full_blocks(blocks, TOKENS, 0, 3)
        with pytest.raises(ValueError, match="7 tokens"):
            manager.cache_full_blocks(blocks, TOKENS[:7], 0, 2)
        manager.free_block(blocks[1].block_id)
        with pytest.raises(ValueError, match="not in use"):
            manager.cache_full_blocks(blocks, TOKENS, 0, 2)
        assert len(manager.cached_block_hash_to_block) == 0
        check_invariants(manager)

    def test_a_block_that_nobody_holds_cannot_be_registered(self) -> None:
        manager = manager_of()
        for block in (manager.null_block, manager.blocks[3], CacheBlock(1)):
            with pytest.raises(ValueError, match="not in use"):
                manager.register_block_hash(block, TOKENS[:4])
        check_invariants(manager)

    def test_two_requests_that_compute_the_same_block_leave_one_after_the_other(self) -> None:
        manager = manager_of()
        one, two = filled(manager, TOKENS[:4])[0], filled(manager, TOKENS[:4])[0]
        name = one.block_hash
        assert one is not two
        assert name is not None
        manager.free_block(one.block_id)
        assert manager.get_cached_block(name) is two
        manager.free_block(two.block_id)
        assert manager.get_cached_block(name) is None
        check_invariants(manager)

    def test_without_caching_nothing_is_registered_or_found(self) -> None:
        manager = PagedCacheManager(4, 8, enable_caching=False, model_name="m")
        blocks = manager.get_new_blocks(2)
        manager.cache_full_blocks(blocks, TOKENS[:8], 0, 2)
        assert manager.register_block_hash(blocks[0], TOKENS[:4]) is None
        assert manager.store(b"h", blocks[0]) is False
        assert manager.get_computed_blocks(TOKENS[:8]) == ([], 0)
        assert manager.find_cached_block(TOKENS[:4]) is None
        assert (manager.stats.hits, manager.stats.misses) == (0, 0)
        assert len(manager.cached_block_hash_to_block) == 0
        check_invariants(manager)

    def test_another_models_blocks_are_not_found(self) -> None:
        names = [PagedCacheManager(4, 8, model_name=name) for name in ("a", "b")]
        hashes = [filled(manager, TOKENS[:4])[0].block_hash for manager in names]
        assert hashes[0] != hashes[1]


class TestTables:
    def test_tables_by_request(self) -> None:
        manager = manager_of()
        table = manager.create_block_table("r")
        assert manager.get_block_table("r") is table
        assert manager.get_or_create_block_table("r") is table
        assert manager.get_block_table("s") is None
        assert manager.get_or_create_block_table("s").request_id == "s"
        with pytest.raises(ValueError, match="'r' has a block table"):
            manager.create_block_table("r")

    def test_deleting_a_table_frees_its_blocks_once(self) -> None:
        manager = manager_of()
        table = manager.create_block_table("r")
        for block in manager.get_new_blocks(3):
            manager.add_block_to_table(table, block, 4)
        assert (table.num_tokens, manager.stats.total_tokens_cached) == (12, 12)
        assert manager.delete_block_table("r") is True
        assert manager.delete_block_table("r") is False
        assert (manager.size, manager.stats.total_tokens_cached, len(table), table.num_tokens) == (0, 0, 0, 0)
        check_invariants(manager)

    def test_a_request_that_ends_leaves_its_blocks_findable_and_its_tail_goes_first(self) -> None:
        manager = manager_of()
        table = manager.create_block_table("r")
        manager.add_block_to_table(table, manager.null_block, 0)
        blocks = filled(manager, TOKENS[:8])
        for block in blocks:
            manager.add_block_to_table(table, block, 4)
        assert manager.release_block_table("r") is True
        assert manager.release_block_table("r") is False
        assert manager.get_evictable_blocks(9) == blocks[::-1]
        assert manager.get_computed_blocks(TOKENS[:8]) == (blocks, 8)
        check_invariants(manager)

    def test_a_fork_has_its_own_list_and_its_own_references(self) -> None:
        manager = manager_of()
        table = manager.create_block_table("r")
        for block in filled(manager, TOKENS[:8]):
            manager.add_block_to_table(table, block, 4)
        fork = manager.fork_block_table(table, "f")
        assert fork.block_ids == table.block_ids
        assert fork.block_ids is not table.block_ids
        assert (fork.num_tokens, manager.stats.shared_blocks) == (8, 2)
        manager.delete_block_table("r")
        assert manager.stats.shared_blocks == 0
        assert manager.get_computed_blocks(TOKENS[:8])[1] == 8
        check_invariants(manager)

    def test_a_fork_of_freed_blocks_or_onto_a_taken_name_changes_nothing(self) -> None:
        manager = manager_of()
        table = manager.create_block_table("r")
        blocks = manager.get_new_blocks(2)
        for block in blocks:
            manager.add_block_to_table(table, block, 4)
        with pytest.raises(ValueError, match="already"):
            manager.fork_block_table(table, "r")
        manager.free_block(blocks[1].block_id)
        with pytest.raises(ValueError, match="not in use"):
            manager.fork_block_table(table, "f")
        assert (blocks[0].ref_count, manager.get_block_table("f")) == (1, None)
        check_invariants(manager)

    def test_shared_blocks_are_copied_before_generation(self) -> None:
        manager = manager_of()
        table = manager.create_block_table("r")
        for block in filled(manager, TOKENS[:8]):
            manager.add_block_to_table(table, block, 4)
        fork = manager.fork_block_table(table, "f")
        blocks, was_copied = manager.get_blocks_for_generation(fork)
        assert was_copied
        assert ids(blocks) == fork.block_ids
        assert not set(fork.block_ids) & set(table.block_ids)
        assert [block.token_count for block in blocks] == [4, 4]
        assert [block.block_hash for block in blocks] == [None, None]
        assert (manager.stats.cow_copies, manager.stats.shared_blocks) == (2, 0)
        assert ids(manager.get_computed_blocks(TOKENS[:8])[0]) == table.block_ids
        assert manager.get_blocks_for_generation(fork) == (blocks, False)
        assert manager.get_blocks_for_generation(table)[1] is False
        check_invariants(manager)

    def test_the_copy_of_a_block_without_bytes_has_none_either(self) -> None:
        manager = manager_of()
        table = manager.create_block_table("r")
        for block in filled(manager, TOKENS[:8]):
            manager.add_block_to_table(table, block, 4)
        manager.mark_block_cold(table.block_ids[1])
        fork = manager.fork_block_table(table, "f")
        manager.get_blocks_for_generation(fork)
        assert ids(manager.get_cold_blocks()) == [table.block_ids[1], fork.block_ids[1]]
        check_invariants(manager)

    def test_copying_without_room_changes_nothing(self) -> None:
        manager = manager_of(max_blocks=4)
        table = manager.create_block_table("r")
        for block in manager.get_new_blocks(2):
            manager.add_block_to_table(table, block, 4)
        fork = manager.fork_block_table(table, "f")
        with pytest.raises(ValueError, match="2 blocks"):
            manager.get_blocks_for_generation(fork)
        assert fork.block_ids == table.block_ids
        assert (manager.stats.cow_copies, manager.stats.shared_blocks) == (0, 2)
        check_invariants(manager)


class TestEviction:
    def test_the_least_recently_used_leave_first_and_used_ones_never(self) -> None:
        manager = manager_of()
        blocks = filled(manager, TOKENS)
        for block in (blocks[2], blocks[0], blocks[3]):
            manager.release_for_eviction([block.block_id])
        assert manager.get_evictable_blocks(2) == [blocks[2], blocks[0]]
        assert manager.evict_lru_blocks(2) == 2
        assert manager.get_evictable_blocks(9) == [blocks[3]]
        assert manager.evict_lru_blocks(9) == 1
        assert manager.evict_lru_blocks(9) == 0
        assert (blocks[1].ref_count, manager.stats.evictions) == (1, 3)
        check_invariants(manager)

    def test_one_block_is_evicted_only_while_nobody_uses_it(self) -> None:
        manager = manager_of()
        block = filled(manager, TOKENS[:4])[0]
        name = block.block_hash
        assert name is not None
        assert manager.evict_block_permanently(block.block_id) is False
        manager.release_for_eviction([block.block_id])
        assert manager.evict_block_permanently(block.block_id) is True
        assert manager.evict_block_permanently(block.block_id) is False
        assert manager.evict_block_permanently(99) is False
        assert manager.get_cached_block(name) is None
        check_invariants(manager)

    def test_memory_pressure_evicts_as_far_as_needed(self) -> None:
        manager = manager_of(max_blocks=6)
        blocks = filled(manager, TOKENS)
        manager.release_for_eviction(ids(blocks[1:]))
        assert manager.handle_memory_pressure(1) is True
        assert manager.stats.evictions == 0
        assert manager.handle_memory_pressure(3) is True
        assert manager.stats.evictions == 2
        assert manager.handle_memory_pressure(5) is False
        assert manager.handle_memory_pressure(4) is True
        check_invariants(manager)

    def test_blocks_go_cold_and_come_back(self) -> None:
        manager = manager_of()
        block = filled(manager, TOKENS[:4])[0]
        assert manager.mark_block_cold(block.block_id) is True
        assert (manager.get_cold_blocks(), manager.cold_block_count) == ([block], 1)
        assert manager.restore_block(block.block_id, None) is False
        assert manager.restore_block(block.block_id, b"bytes") is True
        assert manager.restore_block(block.block_id, b"bytes") is False
        assert manager.cold_block_count == 0
        assert manager.mark_block_cold(99) is False
        assert manager.mark_block_cold(manager.free_block_queue.get_all_free_blocks()[0].block_id) is False
        manager.mark_block_cold(block.block_id)
        manager.free_block(block.block_id)
        assert manager.cold_block_count == 0
        check_invariants(manager)


class TestWhole:
    def test_clear_gives_up_everything_and_returns_to_the_initial_pool(self) -> None:
        manager = manager_of(max_blocks=100, initial_blocks=5)
        table = manager.create_block_table("r")
        blocks = filled(manager, TOKENS)
        for block in blocks:
            manager.add_block_to_table(table, block, 4)
        kept = manager.get_new_blocks(3)
        manager.release_for_eviction(ids(kept[:1]))
        manager.release_for_eviction(ids(blocks[:1]))
        assert manager.clear() == 4 + 2
        assert (manager.size, manager.free_blocks, manager._current_allocated_count) == (0, 4, 5)
        assert manager.get_computed_blocks(TOKENS) == ([], 0)
        assert (manager.request_tables, len(table)) == ({}, 0)
        check_invariants(manager)

    def test_the_prefix_cache_is_reset_only_when_nobody_uses_a_block(self) -> None:
        manager = manager_of()
        blocks = filled(manager, TOKENS[:8])
        manager.release_for_eviction(ids(blocks[1:]))
        assert manager.reset_prefix_cache() is False
        assert manager.get_computed_blocks(TOKENS[:8])[1] == 8
        manager.release_for_eviction(ids(blocks[:1]))
        assert manager.reset_prefix_cache() is True
        assert manager.get_computed_blocks(TOKENS[:8])[1] == 0
        check_invariants(manager)

    def test_it_is_a_cache_of_blocks_by_hash_or_id(self) -> None:
        manager = manager_of()
        assert isinstance(manager, CacheManager)
        block = manager.allocate_block()
        assert block is not None
        assert manager.store(b"h" * 32, block) is True
        assert manager.store(b"g" * 32, manager.blocks[5]) is False
        assert manager.store(b"g" * 32, 0) is False
        assert manager.store(b"g" * 32, "no block") is False
        assert manager.fetch(b"h" * 32) == (block, True)
        assert manager.fetch(block.block_id) == (block, True)
        assert manager.fetch(b"g" * 32) == (None, False)
        assert [manager.fetch(key) for key in (0, 5, -1, 99)] == [(None, False)] * 4
        assert (manager.stats.hits, manager.stats.misses) == (2, 5)
        assert manager.evict(b"h" * 32) is False
        manager.release_for_eviction([block.block_id])
        assert manager.evict(b"h" * 32) is True
        assert manager.evict(block.block_id) is False
        assert (manager.size, manager.max_size) == (0, 8)
        check_invariants(manager)

    def test_statistics_follow_what_is_changed_by_hand_too(self) -> None:
        manager = manager_of()
        stats, block = manager.stats, manager.allocate_block()
        assert block is not None
        block.token_count = 3
        assert (stats.allocated_blocks, stats.total_tokens_cached) == (2, 3)
        manager.increment_ref(block.block_id)
        assert stats.shared_blocks == 1
        snapshot = manager.get_stats()
        manager.free_block(block.block_id)
        assert (snapshot.shared_blocks, stats.shared_blocks) == (1, 0)
        manager.get_cached_block(b"x")
        manager.reset_stats()
        assert (stats.misses, stats.allocated_blocks) == (0, 2)

    def test_reports_agree_with_the_pool(self) -> None:
        manager = manager_of(max_blocks=10)
        blocks = filled(manager, TOKENS)
        manager.touch(blocks[:1])
        manager.release_for_eviction(ids(blocks[1:2]))
        manager.mark_block_cold(blocks[1].block_id)
        assert manager.get_ref_count_distribution() == {0: 6, 1: 2, 2: 1}
        summary = manager.get_ref_count_summary()
        assert summary == {
            "free": 6, "exclusive": 2, "shared": 1, "total_refs": 4, "max_ref_count": 2, "mean_ref_count": 4 / 3,
        }  # fmt: skip
        usage = manager.get_memory_usage()
        assert (usage["evictable_blocks"], usage["cold_blocks"], usage["usage"]) == (1, 1, 3 / 9)
        assert "3 of 10" in repr(manager)

    def test_plain_statistics_can_be_made_and_shown(self) -> None:
        stats = PagedCacheStats(hits=3, misses=1, total_blocks=10)
        assert stats.hit_rate == 0.75
        assert stats.to_dict()["total_blocks"] == 10
        assert PagedCacheStats().hit_rate == 0.0


def race_for_the_only_block() -> None:
    manager = manager_of(max_blocks=2)
    block = filled(manager, TOKENS[:4])[0]
    manager.release_for_eviction([block.block_id])
    barrier = threading.Barrier(2)
    taken: list[CacheBlock | None] = []

    def take() -> None:
        barrier.wait()
        taken.append(manager.allocate_block())

    thread = threading.Thread(target=take)
    thread.start()
    barrier.wait()
    claimed, _ = manager.claim_computed_blocks(TOKENS[:4])
    thread.join()
    assert (claimed == [block]) != (taken == [block])
    assert block.ref_count == 1
    check_invariants(manager)


def test_a_claimed_block_cannot_be_evicted_between_lookup_and_reference() -> None:
    for _ in range(200):
        race_for_the_only_block()
