"""First in, first out: a yardstick, and the cheapest policy there is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence

from omlxd.policy.base import CachePolicy, ChunkStatus, RequestContext, Victims, order_request_keys


class FIFOCachePolicy(CachePolicy):
    """In the order of insertion; what one request inserted together leaves tail first."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: OrderedDict[bytes, ChunkStatus] = OrderedDict()

    def get(self, key: bytes) -> ChunkStatus | None:
        """The chunk of `key`, or None."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: ChunkStatus, req_context: RequestContext | None = None) -> None:
        """Behind all others."""
        self._chunks[key] = chunk

    def remove(self, key: bytes) -> None:
        """Forget `key`, which may be unknown."""
        self._chunks.pop(key, None)

    def touch(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> None:
        """A use changes nothing."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: Collection[bytes],
        reused_keys: Collection[bytes],
        ctx: RequestContext | None = None,
    ) -> None:
        """What the request inserted goes behind all others, tail to head."""
        inserted = set(insertion_only_keys)
        for key in reversed(order_request_keys(key_groups, ctx)):
            if key in inserted and key in self._chunks:
                self._chunks.move_to_end(key)

    def evict(self, n: int, protected: Collection[bytes]) -> Victims | None:
        """The `n` evictable keys that came first, or None and nothing changed."""
        return self._evict(n, None, protected)

    def evict_until(self, enough: Callable[[bytes, ChunkStatus], bool], protected: Collection[bytes]) -> Victims | None:
        """The evictable keys that came first until `enough`, or None and nothing changed."""
        return self._evict(len(self._chunks) + 1, enough, protected)

    def _evict(
        self, n: int, enough: Callable[[bytes, ChunkStatus], bool] | None, protected: Collection[bytes]
    ) -> Victims | None:
        victims: Victims = []
        sated = n == 0
        for key, chunk in self._chunks.items():
            if sated:
                break
            if chunk.ref_cnt or key in protected:
                continue
            victims.append((key, chunk))
            sated = len(victims) == n or (enough is not None and enough(key, chunk))
        if not sated:
            return None
        for key, _ in victims:
            del self._chunks[key]
        return victims

    def clear(self) -> None:
        """Drop everything."""
        self._chunks.clear()

    def chunks(self) -> Iterator[tuple[bytes, ChunkStatus]]:
        """All keys with their chunks, in the order of insertion."""
        return iter(list(self._chunks.items()))
