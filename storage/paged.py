"""The engine-side index of KV blocks: metadata only, no tensor.

`PagedCacheManager` hands out physical block ids, shares prefixes by chain hash, counts references, forks
tables copy-on-write, and falls back to a cold tier (the daemon: `omlxd.engines.paged_cold`) for blocks that
are not in memory. The names are those of the managers that engines have already, so that a changed import is
enough. All methods are thread-safe, under one re-entrant lock.

Its layers, each with one concept: `paged_pool.py` (who has which block), `paged_prefix.py` (sharing by
content), and here the requests' tables.
"""

from __future__ import annotations

from collections import Counter

from omlxd.storage.paged_blocks import BlockHashToBlockMap, BlockTable, CacheBlock, FreeKVCacheBlockQueue
from omlxd.storage.paged_hash import BlockHash, compute_block_hash, resolve_block_extra_keys
from omlxd.storage.paged_interface import CacheManager, PagedCacheStats
from omlxd.storage.paged_pool import logger
from omlxd.storage.paged_prefix import ColdTier, PrefixIndex

__all__ = [
    "BlockHash",
    "BlockHashToBlockMap",
    "BlockTable",
    "CacheBlock",
    "CacheManager",
    "ColdTier",
    "FreeKVCacheBlockQueue",
    "PagedCacheManager",
    "PagedCacheStats",
    "compute_block_hash",
    "resolve_block_extra_keys",
]


class PagedCacheManager(PrefixIndex, CacheManager):
    """Blocks of `block_size` tokens, `max_blocks` at most, one of them (block 0) the null block."""

    def __init__(
        self,
        block_size: int = 64,
        max_blocks: int = 1000,
        enable_caching: bool = True,
        model_name: str = "",
        initial_blocks: int = 256,
    ) -> None:
        super().__init__(block_size, max_blocks, initial_blocks, enable_caching=enable_caching, model_name=model_name)
        self.request_tables: dict[str, BlockTable] = {}

    def __repr__(self) -> str:
        return (
            f"PagedCacheManager({self.size} of {self.max_blocks} blocks of {self.block_size} tokens in use, "
            f"{len(self.cached_block_hash_to_block)} hashes, {len(self.request_tables)} requests)"
        )

    # Tables

    def create_block_table(self, request_id: str) -> BlockTable:
        """An empty table; ValueError when the request has one already, since its blocks would be lost."""
        with self._lock:
            return self._add_table(BlockTable(request_id))

    def get_block_table(self, request_id: str) -> BlockTable | None:
        """The request's table, or None."""
        return self.request_tables.get(request_id)

    def get_or_create_block_table(self, request_id: str) -> BlockTable:
        """The request's table, a new one if it has none."""
        with self._lock:
            table = self.request_tables.get(request_id)
            return self._add_table(BlockTable(request_id)) if table is None else table

    def delete_block_table(self, request_id: str) -> bool:
        """Forget the table and free its blocks; False when there is none."""
        with self._lock:
            table = self.request_tables.pop(request_id, None)
            if table is None:
                return False
            for block_id in filter(None, table.block_ids):  # the null block is nobody's to free
                self.free_block(block_id)
            table.block_ids, table.num_tokens = [], 0
            return True

    def release_block_table(self, request_id: str) -> bool:
        """Forget the table as a request ends, but let its blocks be found, tail first to be evicted; False
        when there is none.
        """
        with self._lock:
            table = self.request_tables.pop(request_id, None)
            if table is None:
                return False
            self.release_for_eviction(filter(None, reversed(table.block_ids)))
            table.block_ids, table.num_tokens = [], 0
            return True

    def add_block_to_table(self, table: BlockTable, block: CacheBlock, num_tokens: int) -> None:
        """Append `block`, which holds the next `num_tokens` tokens. The table takes over the caller's
        reference.
        """
        with self._lock:
            table.add_block(block.block_id, num_tokens)
            if not block.is_null:
                block.token_count = num_tokens
                block.touch()

    def fork_block_table(self, source: BlockTable, new_request_id: str) -> BlockTable:
        """A table of the same blocks for another request, with references of its own.

        ValueError, with nothing changed, when that request has a table or a block of `source` is no longer in
        use.
        """
        with self._lock:
            gone = [block_id for block_id in source.block_ids if block_id not in self.allocated_blocks]
            if gone:
                raise ValueError(
                    f"table of {source.request_id!r} cannot be forked: blocks {gone} are not in use any more"
                )
            table = self._add_table(source.copy(new_request_id))
            self.touch(self.blocks[block_id] for block_id in table.block_ids)
            return table

    def get_blocks_for_generation(self, table: BlockTable) -> tuple[list[CacheBlock], bool]:
        """The table's blocks, none of them shared any more, and whether any had to be copied.

        A shared block is replaced, in the table too, by a private one with the same `token_count` and no
        hash, since its content is about to differ; the engine copies the tensors. ValueError, with nothing
        changed, when there are not enough free blocks.
        """
        with self._lock:
            blocks = [self.blocks[block_id] for block_id in table.block_ids]
            shared = [index for index, block in enumerate(blocks) if block.is_shared()]
            for index, copy in zip(shared, self.get_new_blocks(len(shared)), strict=True):
                copy.token_count = blocks[index].token_count
                if blocks[index].block_id in self._cold:
                    self._cold[copy.block_id] = copy
                self._release(blocks[index], keep=True)
                blocks[index] = copy
                table.block_ids[index] = copy.block_id
            self.stats.cow_copies += len(shared)
            return blocks, bool(shared)

    def _add_table(self, table: BlockTable) -> BlockTable:
        if table.request_id in self.request_tables:
            raise ValueError(f"request {table.request_id!r} has a block table already; delete it first")
        self.request_tables[table.request_id] = table
        return table

    # As a cache of anything

    def fetch(self, key: bytes | int) -> tuple[CacheBlock | None, bool]:
        """`(block, True)` for a hash or the id of a block that is in use or can be found, else `(None,
        False)`; counted.
        """
        with self._lock:
            by_hash = self.cached_block_hash_to_block.get_block
            block = self._with_content(key) if isinstance(key, int) else by_hash(key)
            return self._count(block), block is not None

    def store(self, key: bytes, value: object) -> bool:
        """Make the block in use `value` (a `CacheBlock` or its id) findable by the hash `key`; whether it is."""
        with self._lock:
            block = self._block(value) if isinstance(value, int) else value
            if not isinstance(block, CacheBlock) or block.is_null or not self.enable_caching:
                return False
            if self.allocated_blocks.get(block.block_id) is not block:
                return False
            self._name(block, key, block.token_count)
            return True

    def evict(self, key: bytes | int) -> bool:
        """Give up the content of a block by its hash or id; False while it is in use, and when there is none."""
        with self._lock:
            if isinstance(key, int):
                return self.evict_block_permanently(key)
            block = self.cached_block_hash_to_block.get_block(key)
            return block is not None and self.evict_block_permanently(block.block_id)

    def clear(self) -> int:
        """Give up everything, in use or not, and go back to the initial pool; how many blocks held something.

        Tables and blocks that somebody still has are dead afterwards.
        """
        with self._lock:
            cleared = self.size + len(self._evictable(len(self.blocks)))
            for table in self.request_tables.values():
                table.block_ids, table.num_tokens = [], 0
            self.request_tables.clear()
            self._start()
            return cleared

    def reset_prefix_cache(self) -> bool:
        """Give up everything that can be found; False, with nothing changed, while blocks are in use."""
        with self._lock:
            if self.size:
                logger.warning("the prefix cache is not reset: %d blocks are in use", self.size)
                return False
            for block in self._evictable(len(self.blocks)):
                self._forget(block)
            return True

    # Numbers

    def get_stats(self) -> PagedCacheStats:
        """The statistics as they are at this moment."""
        with self._lock:
            return PagedCacheStats(**{name: getattr(self.stats, name) for name in PagedCacheStats.__dataclass_fields__})

    def reset_stats(self) -> None:
        """Set hits, misses, evictions and copies to 0."""
        with self._lock:
            self.stats.hits = self.stats.misses = self.stats.evictions = self.stats.cow_copies = 0

    def get_memory_usage(self) -> dict[str, int | float]:
        """What the pool holds, in blocks and tokens; the bytes are the engine's."""
        with self._lock:
            return {
                "block_size": self.block_size,
                "max_blocks": self.max_blocks,
                "total_blocks": len(self.blocks),
                "allocated_blocks": self.stats.allocated_blocks,
                "free_blocks": self.free_blocks,
                "evictable_blocks": len(self._evictable(len(self.blocks))),
                "cold_blocks": self.cold_block_count,
                "shared_blocks": self.stats.shared_blocks,
                "total_tokens_cached": self.stats.total_tokens_cached,
                "usage": self.usage,
            }

    def get_ref_count_distribution(self) -> dict[int, int]:
        """How many blocks have which `ref_count`, without the null block."""
        with self._lock:
            return dict(sorted(Counter(block.ref_count for block in self.blocks if not block.is_null).items()))

    def get_ref_count_summary(self) -> dict[str, int | float]:
        """Blocks that are free, used once, and shared; all references; the highest and the mean `ref_count`
        of those in use.
        """
        with self._lock:
            used = [block.ref_count for block in self.allocated_blocks.values() if not block.is_null]
            return {
                "free": self.free_blocks,
                "exclusive": used.count(1),
                "shared": self.stats.shared_blocks,
                "total_refs": sum(used),
                "max_ref_count": max(used, default=0),
                "mean_ref_count": sum(used) / len(used) if used else 0.0,
            }
