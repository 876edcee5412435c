"""A chunk manager with a budget in bytes, for traces whose namespaces have blocks of different sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from omlxd.policy.base import CachePolicy, ChunkStatus, Victims
from omlxd.storage.chunks import ChunkManager


class WeighingManager(ChunkManager):
    """Evicts until the bytes of what is stored fit, as the RAM tier does; without the arena, so nothing fragments."""

    def __init__(self, num_chunks: int, cache_policy: type[CachePolicy], weights: Mapping[bytes, int]) -> None:
        """`num_chunks` blocks of the mean of `weights` (bytes of each key) are the budget."""
        super().__init__(num_chunks, cache_policy)
        self._weights = weights
        self._budget = num_chunks * sum(weights.values()) // len(weights)
        self._used = 0
        self._evictable = 0

    def _make_room(self, keys: Sequence[bytes], protected: Collection[bytes]) -> Victims | None:
        if self._used:
            self._policy.cache_capacity = max(1, self._budget * len(self) // self._used)
        need = self._used + sum(map(self._weights.__getitem__, keys)) - self._budget
        if need <= 0:
            return []
        if need > self._evictable:
            return None
        freed = 0

        def enough(key: bytes, chunk: ChunkStatus) -> bool:
            nonlocal freed
            freed += self._weights[key]
            return freed >= need

        return self._policy.evict_until(enough, protected)

    def _allocate_slot(self, key: bytes) -> int:
        self._used += self._weights[key]
        return self._allocate_used_slot()

    def _free_slot(self, key: bytes, chunk: ChunkStatus) -> None:
        super()._free_slot(key, chunk)
        self._used -= self._weights[key]
        if chunk.ref_cnt == 0:
            self._evictable -= self._weights[key]

    def _became_evictable(self, key: bytes, chunk: ChunkStatus) -> None:
        self._evictable += self._weights[key]

    def _became_busy(self, key: bytes, chunk: ChunkStatus) -> None:
        self._evictable -= self._weights[key]
