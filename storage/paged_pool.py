"""The pool of the paged manager: who has which block, and in which order free blocks are taken.

Every block is in exactly one of two places: in `allocated_blocks` while its `ref_count` is above 0 (the null
block always is), else in `free_block_queue`. A queued block may still have its hash; then it can be found
again until somebody takes it. Blocks that can be found are exactly those in `cached_block_hash_to_block`. A
block that is neither in use nor findable has no tokens.

Public methods lock; those that begin with `_` expect the lock to be held.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence

from omlxd.storage.paged_blocks import BlockHashToBlockMap, CacheBlock, FreeKVCacheBlockQueue
from omlxd.storage.paged_interface import PoolStats

logger = logging.getLogger("omlxd.storage.paged")

GROWTH_FOR_ONE = 256
GROWTH_BEYOND_SHORTFALL = 128


class BlockPool:
    """Blocks 0 to `max_blocks` - 1, created as they are needed. Block 0 is the null block: a placeholder that
    nobody can have or free.
    """

    def __init__(self, block_size: int, max_blocks: int, initial_blocks: int) -> None:
        for name, value in (("block_size", block_size), ("max_blocks", max_blocks), ("initial_blocks", initial_blocks)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be 1 or more")
        self.block_size = block_size
        self.max_blocks = max_blocks
        self._initial_blocks = min(initial_blocks, max_blocks)
        self._lock = threading.RLock()
        self._start()
        self.stats = PoolStats(self)

    def _start(self) -> None:
        self.blocks = [CacheBlock(block_id) for block_id in range(self._initial_blocks)]
        self._current_allocated_count = len(self.blocks)
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.null_block.ref_count = 1
        self.allocated_blocks = {0: self.null_block}
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks[1:])
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self._cold: dict[int, CacheBlock] = {}

    # Taking

    def allocate_block(self) -> CacheBlock | None:
        """A block with `ref_count` 1 and no content, or None when all are in use."""
        with self._lock:
            if not self.free_block_queue.num_free_blocks and not self._grow(GROWTH_FOR_ONE):
                return None
            return self._take(self.free_block_queue.popleft())

    def get_new_blocks(self, num_blocks: int) -> list[CacheBlock]:
        """As many as asked for; ValueError, with none taken, when there are not so many."""
        with self._lock:
            shortfall = num_blocks - self.free_block_queue.num_free_blocks
            if shortfall > self.max_blocks - len(self.blocks):
                raise ValueError(
                    f"{num_blocks} blocks were asked for; {self.free_blocks} are free and "
                    f"{self.max_blocks - len(self.blocks)} more can be made (max_blocks is {self.max_blocks})"
                )
            if shortfall > 0:
                self._grow(shortfall + GROWTH_BEYOND_SHORTFALL)
            return [self._take(block) for block in self.free_block_queue.popleft_n(num_blocks)]

    def _grow(self, wanted: int) -> int:
        """Make up to `wanted` more blocks; how many there are now that were not."""
        first = len(self.blocks)
        new = [CacheBlock(block_id) for block_id in range(first, min(first + wanted, self.max_blocks))]
        self.blocks += new
        self.free_block_queue.append_n(new)
        self._current_allocated_count = len(self.blocks)
        return len(new)

    def _take(self, block: CacheBlock) -> CacheBlock:
        """Give a block that has just left the queue to its user, empty."""
        if block.block_hash is not None:
            self.stats.evictions += 1
            self._forget(block)
        block.ref_count = 1
        block.touch()
        self.allocated_blocks[block.block_id] = block
        return block

    # References

    def touch(self, blocks: Iterable[CacheBlock]) -> None:
        """A hit: one reference more for each, out of the free queue if it was there."""
        with self._lock:
            for block in blocks:
                if not block.is_null:
                    self._refer(block)

    def increment_ref(self, block_id: int) -> bool:
        """One reference more; False for a block that does not exist, the null block, or a free one without
        content.
        """
        with self._lock:
            block = self._with_content(block_id)
            if block is None:
                return False
            self._refer(block)
            return True

    def decrement_ref(self, block_id: int) -> bool:
        """The same as `free_block`."""
        return self.free_block(block_id)

    def acquire_cached_block(self, block_id: int, expected_hash: bytes) -> bool:
        """One reference more if the block still has `expected_hash`, in one step; False, with nothing
        changed, if it has not.
        """
        with self._lock:
            block = self._block(block_id)
            if block is None or block.is_null or block.block_hash is None or block.block_hash != expected_hash:
                return False
            self._refer(block)
            return True

    def free_block(self, block_id: int) -> bool:
        """One reference less. At 0 the content is given up and the block joins the end of the free queue:
        True.

        A block that nobody has, or the null block: a warning and False.
        """
        with self._lock:
            block = self._in_use(block_id)
            return block is not None and self._release(block, keep=False)

    def release_blocks(self, blocks: Sequence[CacheBlock]) -> int:
        """`free_block` for each of `blocks`, in their order; how many became free."""
        return sum(self.free_block(block.block_id) for block in blocks)

    def release_for_eviction(self, block_ids: Iterable[int]) -> int:
        """One reference less for each, but they can still be found until somebody needs the room; how many
        became evictable.

        The first of them will be the first to be evicted: give a prefix's tail first.
        """
        with self._lock:
            found = (self._in_use(block_id) for block_id in block_ids)
            return sum(self._release(block, keep=True) for block in found if block is not None)

    def _block(self, block_id: int) -> CacheBlock | None:
        return self.blocks[block_id] if 0 <= block_id < len(self.blocks) else None

    def _with_content(self, block_id: int) -> CacheBlock | None:
        """The block, if it is in use or can be found, and is not the null block."""
        block = self._block(block_id)
        if block is None or block.is_null or (block.ref_count == 0 and block.block_hash is None):
            return None
        return block

    def _in_use(self, block_id: int) -> CacheBlock | None:
        block = self.allocated_blocks.get(block_id)
        if block is None or block.is_null:
            logger.warning("block %s is not in use: it cannot be freed", block_id)
            return None
        return block

    def _refer(self, block: CacheBlock) -> None:
        if block.ref_count == 0:
            self.free_block_queue.remove(block)
            self.allocated_blocks[block.block_id] = block
        block.ref_count += 1
        block.touch()

    def _release(self, block: CacheBlock, *, keep: bool) -> bool:
        """One reference less; whether that was the last. Without `keep` the content goes with it."""
        block.ref_count -= 1
        if block.ref_count:
            return False
        del self.allocated_blocks[block.block_id]
        if not keep or block.block_hash is None:
            self._forget(block)
        self.free_block_queue.append(block)
        return True

    def _forget(self, block: CacheBlock) -> None:
        """Give up what the block holds."""
        if block.block_hash is not None:
            self.cached_block_hash_to_block.pop(block.block_hash, block.block_id)
            block.reset_hash()
        block.token_count = 0
        self._cold.pop(block.block_id, None)

    # Eviction

    def get_evictable_blocks(self, num_blocks: int) -> list[CacheBlock]:
        """Up to `num_blocks` blocks that can be found and that nobody uses, least recently used first."""
        with self._lock:
            return self._evictable(num_blocks)

    def _evictable(self, num_blocks: int) -> list[CacheBlock]:
        found: list[CacheBlock] = []
        for block in self.free_block_queue:
            if len(found) >= num_blocks:
                break
            if block.block_hash is not None:
                found.append(block)
        return found

    def evict_lru_blocks(self, num_blocks: int) -> int:
        """Give up the content of up to `num_blocks` evictable blocks, least recently used first; how many it
        were.
        """
        with self._lock:
            victims = self._evictable(num_blocks)
            for block in victims:
                self._evict(block)
            return len(victims)

    def evict_block_permanently(self, block_id: int) -> bool:
        """Give up the content of one block; False while it is in use, and when there is none."""
        with self._lock:
            block = self._block(block_id)
            if block is None or block.ref_count > 0 or block.block_hash is None:
                return False
            self._evict(block)
            return True

    def handle_memory_pressure(self, num_blocks: int) -> bool:
        """Evict as far as needed for `num_blocks` blocks to be had that hold nothing; whether there are so
        many now.
        """
        with self._lock:
            findable = sum(block.block_hash is not None for block in self.free_block_queue)
            empty = self.free_blocks - findable + self.max_blocks - len(self.blocks)
            return empty + self.evict_lru_blocks(max(0, num_blocks - empty)) >= num_blocks

    def _evict(self, block: CacheBlock) -> None:
        self._forget(block)
        self.stats.evictions += 1

    # Cold blocks: known by their hash, their bytes are not in this process's memory

    def mark_block_cold(self, block_id: int) -> bool:
        """Note that the bytes of a block that is in use or findable are in the cold tier only; False for any
        other block.
        """
        with self._lock:
            block = self._with_content(block_id)
            if block is None:
                return False
            self._cold[block_id] = block
            return True

    def restore_block(self, block_id: int, cache_data: object) -> bool:
        """Note that the engine has a cold block's bytes again. `cache_data` is what it got: None says that it
        got nothing.

        Nothing of it is kept here. False, and the block stays cold, for None and for a block that is not
        cold.
        """
        with self._lock:
            return cache_data is not None and self._cold.pop(block_id, None) is not None

    def get_cold_blocks(self) -> list[CacheBlock]:
        """All cold blocks, in the order in which they became cold."""
        with self._lock:
            return list(self._cold.values())

    @property
    def cold_block_count(self) -> int:
        """How many blocks are cold."""
        return len(self._cold)

    # Numbers

    @property
    def free_blocks(self) -> int:
        """Blocks in the free queue, those included that can still be found."""
        return self.free_block_queue.num_free_blocks

    @property
    def size(self) -> int:
        """Blocks in use, without the null block."""
        return len(self.allocated_blocks) - 1

    @property
    def max_size(self) -> int:
        """The most blocks that there will be."""
        return self.max_blocks

    @property
    def usage(self) -> float:
        """Which part of all blocks that can be had is in use, 0 to 1."""
        return self.size / max(1, self.max_blocks - 1)
