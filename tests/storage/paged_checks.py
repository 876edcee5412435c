"""What must hold in a paged manager at every moment, counted anew from its public state."""

from __future__ import annotations

from omlxd.storage.paged import BlockHashToBlockMap, CacheBlock, PagedCacheManager


def named_blocks(index: BlockHashToBlockMap) -> list[tuple[bytes, CacheBlock]]:
    """All (hash, block) pairs of the index."""
    pairs = []
    for block_hash, found in index._blocks.items():
        pairs += [(block_hash, block) for block in (found.values() if isinstance(found, dict) else [found])]
    return pairs


def check_invariants(manager: PagedCacheManager) -> None:
    with manager._lock:
        blocks, queued = manager.blocks, manager.free_block_queue.get_all_free_blocks()
        used = [block for block in blocks if block.ref_count > 0]
        assert [block.block_id for block in blocks] == list(range(len(blocks)))
        assert len(blocks) == manager._current_allocated_count <= manager.max_blocks
        assert min(block.ref_count for block in blocks) >= 0

        assert manager.null_block is blocks[0]
        assert manager.null_block.is_null
        assert manager.null_block.ref_count == 1
        assert not any(block.is_null for block in blocks[1:])

        assert manager.allocated_blocks == {block.block_id: block for block in used}
        assert {id(block) for block in queued} == {id(block) for block in blocks if block.ref_count == 0}
        assert len(queued) == manager.free_blocks == manager.free_block_queue.num_free_blocks
        backwards, block = [], manager.free_block_queue._tail.prev_free_block
        while block is not None and block is not manager.free_block_queue._head:
            backwards.append(block)
            block = block.prev_free_block
        assert backwards[::-1] == queued

        findable = {(block.block_hash, block.block_id) for block in blocks if block.block_hash is not None}
        named = named_blocks(manager.cached_block_hash_to_block)
        assert {(block_hash, block.block_id) for block_hash, block in named} == findable
        assert len(named) == len(findable)
        assert all(blocks[block.block_id] is block for _, block in named)
        assert len(manager.cached_block_hash_to_block) == len({block_hash for block_hash, _ in findable})
        assert all(block.token_count == 0 for block in blocks if block.ref_count == 0 and block.block_hash is None)
        cold = manager.get_cold_blocks()
        assert len(cold) == manager.cold_block_count
        assert all(block.ref_count > 0 or block.block_hash is not None for block in cold)

        stats = manager.stats
        assert stats.allocated_blocks + stats.free_blocks == stats.total_blocks == len(blocks)
        assert stats.allocated_blocks == len(used)
        assert stats.free_blocks == len(queued)
        assert stats.shared_blocks == sum(block.is_shared() for block in blocks)
        assert stats.total_tokens_cached == sum(block.token_count for block in blocks)
        assert manager.size == len(used) - 1
        assert 0.0 <= manager.usage <= 1.0
        assert manager.get_stats().to_dict() == stats.to_dict()
        tables = [table.block_ids for table in manager.request_tables.values()]
        assert len({id(ids) for ids in tables}) == len(tables)
