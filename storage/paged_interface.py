"""What the paged manager offers to code that knows only "a cache": the ABC and the statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omlxd.storage.paged_pool import BlockPool


@dataclass
class PagedCacheStats:
    """Numbers of a paged cache, in blocks, except the tokens."""

    hits: int = 0
    """Full blocks that a lookup found."""
    misses: int = 0
    """Lookups that ended at a block that was nowhere."""
    evictions: int = 0
    """Blocks that could be found and were given up for room."""
    total_blocks: int = 0
    allocated_blocks: int = 0
    """In use, the null block included."""
    free_blocks: int = 0
    """In the free queue, those included that can still be found."""
    shared_blocks: int = 0
    """Used by more than one request."""
    total_tokens_cached: int = 0
    """Tokens in blocks that are in use or can be found."""
    cow_copies: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits in all lookups of a block, 0 to 1; 0 before the first."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0

    def to_dict(self) -> dict[str, int | float]:
        """All numbers and `hit_rate`, for JSON."""
        numbers: dict[str, int | float] = {name: getattr(self, name) for name in PagedCacheStats.__dataclass_fields__}
        numbers["hit_rate"] = self.hit_rate
        return numbers


class PoolStats(PagedCacheStats):
    """The statistics of a manager. What can be counted is counted when it is read, so it cannot drift."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.hits = self.misses = self.evictions = self.cow_copies = 0

    @property
    def total_blocks(self) -> int:  # type: ignore[override]  # read-only here, by intention
        """Blocks that exist so far, the null block included."""
        return len(self._pool.blocks)

    @property
    def allocated_blocks(self) -> int:  # type: ignore[override]
        """Blocks in use, the null block included."""
        return len(self._pool.allocated_blocks)

    @property
    def free_blocks(self) -> int:  # type: ignore[override]
        """Blocks in the free queue."""
        return self._pool.free_block_queue.num_free_blocks

    @property
    def shared_blocks(self) -> int:  # type: ignore[override]
        """Blocks used by more than one request."""
        with self._pool._lock:
            return sum(block.ref_count > 1 for block in self._pool.allocated_blocks.values())

    @property
    def total_tokens_cached(self) -> int:  # type: ignore[override]
        """Tokens in blocks that are in use or can be found."""
        with self._pool._lock:
            return sum(block.token_count for block in self._pool.blocks)


class CacheManager(ABC):
    """A cache, whatever is in it."""

    @abstractmethod
    def fetch(self, key: bytes | int) -> tuple[object, bool]:
        """`(value, True)` for what is under `key`, or `(None, False)`."""

    @abstractmethod
    def store(self, key: bytes, value: object) -> bool:
        """Put `value` under `key`; whether it is there now."""

    @abstractmethod
    def evict(self, key: bytes | int) -> bool:
        """Give up what is under `key`; whether something was."""

    @abstractmethod
    def clear(self) -> int:
        """Give up everything; how many there were."""

    @abstractmethod
    def get_stats(self) -> PagedCacheStats:
        """Statistics."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many there are."""

    @property
    @abstractmethod
    def max_size(self) -> int:
        """How many there can be."""
