"""The cold tier behind the paged manager, whatever it is."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import MagicMock

from omlxd.storage.paged import PagedCacheManager
from omlxd.storage.paged_hash import prompt_hashes
from tests.storage.paged_checks import check_invariants

TOKENS = list(range(16))
NAMES = list(prompt_hashes(TOKENS, 4, "m"))


class OneByOne:
    def __init__(self, names: Sequence[bytes]) -> None:
        self.names = set(names)
        self.asked: list[bytes] = []

    def has_block(self, block_hash: bytes) -> bool:
        self.asked.append(block_hash)
        return block_hash in self.names


class AllAtOnce(OneByOne):
    def __init__(self, names: Sequence[bytes]) -> None:
        super().__init__(names)
        self.calls = 0

    def has_blocks(self, hashes: Sequence[bytes]) -> list[bool]:
        self.calls += 1
        self.asked += hashes
        return [block_hash in self.names for block_hash in hashes]


def manager_before(cold: object, max_blocks: int = 8, initial_blocks: int = 256) -> PagedCacheManager:
    manager = PagedCacheManager(4, max_blocks, model_name="m", initial_blocks=initial_blocks)
    manager.set_paged_ssd_cache_manager(cold)  # type: ignore[arg-type]
    assert manager._paged_ssd_cache_manager is cold
    return manager


def test_what_only_the_cold_tier_has_becomes_a_free_block_without_bytes() -> None:
    cold = OneByOne(NAMES[:2])
    manager = manager_before(cold)
    blocks, tokens = manager.get_computed_blocks(TOKENS)
    assert (tokens, [block.block_hash for block in blocks]) == (8, NAMES[:2])
    assert [(block.ref_count, block.token_count) for block in blocks] == [(0, 4), (0, 4)]
    assert manager.get_cold_blocks() == blocks
    assert (manager.stats.hits, manager.stats.misses, manager.size, manager.stats.evictions) == (2, 1, 0, 0)
    check_invariants(manager)
    manager.touch(blocks)
    assert manager.restore_block(blocks[0].block_id, b"bytes")
    assert manager.get_cold_blocks() == blocks[1:]
    check_invariants(manager)


def test_each_block_is_asked_for_once_and_none_behind_the_first_miss() -> None:
    cold = OneByOne(NAMES[:2])
    manager = manager_before(cold)
    manager.get_computed_blocks(TOKENS)
    assert cold.asked == NAMES[:3]
    cold.asked.clear()
    assert manager.get_computed_blocks(TOKENS)[1] == 8
    assert cold.asked == NAMES[2:3]


def test_a_cold_tier_that_answers_for_many_is_asked_once_for_the_whole_prompt() -> None:
    cold = AllAtOnce(NAMES[:3])
    manager = manager_before(cold)
    assert manager.get_computed_blocks(TOKENS)[1] == 12
    assert (cold.calls, cold.asked) == (1, NAMES)


def test_blocks_in_memory_are_not_asked_for() -> None:
    cold = AllAtOnce(NAMES)
    manager = manager_before(cold)
    blocks = manager.get_new_blocks(4)
    manager.cache_full_blocks(blocks, TOKENS, 0, 4)
    assert manager.get_computed_blocks(TOKENS) == (blocks, 16)
    assert cold.calls == 0
    manager.free_block(blocks[1].block_id)
    assert manager.get_computed_blocks(TOKENS)[1] == 16
    assert cold.asked == [NAMES[1]]
    check_invariants(manager)


def test_a_mock_that_answers_to_every_name_is_asked_by_has_block() -> None:
    cold = MagicMock()
    cold.has_block.side_effect = [True, False]
    manager = manager_before(cold)
    assert manager.get_computed_blocks(TOKENS)[1] == 4
    assert cold.has_block.call_count == 2


def test_without_room_a_cold_block_is_a_plain_miss() -> None:
    manager = manager_before(OneByOne(NAMES), max_blocks=3)
    used = manager.allocate_block()
    blocks, tokens = manager.get_computed_blocks(TOKENS)
    assert (tokens, len(blocks)) == (4, 1)
    assert used not in blocks
    assert (manager.stats.hits, manager.stats.misses) == (1, 1)
    assert manager.get_computed_blocks(TOKENS) == (blocks, 4)
    check_invariants(manager)


def test_registering_a_cold_block_grows_the_pool_before_it_pushes_out_the_prompts_own_blocks() -> None:
    manager = manager_before(OneByOne(NAMES), max_blocks=8, initial_blocks=3)
    assert manager.get_computed_blocks(TOKENS)[1] == 16
    assert manager.stats.evictions == 0
    check_invariants(manager)


def test_registering_a_cold_head_does_not_push_out_the_rest_of_the_same_prompt() -> None:
    manager = manager_before(AllAtOnce(NAMES[:1]), max_blocks=5)
    stranger, head, *rest = manager.get_new_blocks(4)
    manager.register_block_hash(stranger, [9, 9, 9, 9])
    manager.cache_full_blocks([head, *rest], TOKENS[:12], 0, 3)
    manager.release_for_eviction([*(block.block_id for block in rest), stranger.block_id])
    manager.free_block(head.block_id)
    assert manager.free_block_queue.get_all_free_blocks() == [*rest, stranger, head]
    assert manager.get_computed_blocks(TOKENS[:12]) == ([stranger, *rest], 12)
    check_invariants(manager)


def test_a_claimed_cold_block_is_not_evicted_by_its_own_lookup() -> None:
    manager = manager_before(AllAtOnce(NAMES), max_blocks=5)
    blocks, tokens = manager.claim_computed_blocks(TOKENS)
    assert (tokens, manager.size, manager.cold_block_count) == (16, 4, 4)
    assert [block.block_hash for block in blocks] == NAMES
    check_invariants(manager)


def test_the_evicted_and_the_missed_stay_counted_when_cold_blocks_take_their_place() -> None:
    manager = manager_before(AllAtOnce(NAMES[:1]), max_blocks=2)
    block = manager.get_new_blocks(1)[0]
    old = manager.register_block_hash(block, [9, 9, 9, 9])
    assert old is not None
    manager.release_for_eviction([block.block_id])
    assert manager.get_computed_blocks(TOKENS)[0] == [block]
    assert manager.stats.evictions == 1
    assert manager.get_cached_block(old) is None
    check_invariants(manager)
