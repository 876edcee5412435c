"""Belady's MIN (1966): evicts what is used again last. Knows the future, so it runs in replays only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import heappop, heappush

from omlxd.policy.base import CachePolicy, ChunkStatus, RequestContext, Victims

_NEVER = 1 << 62


class BeladyCachePolicy(CachePolicy):
    """The block whose next use is farthest leaves first; of one request's blocks the deepest.

    It refuses a store whose blocks are used again later than what would have to leave for them.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: dict[bytes, ChunkStatus] = {}
        self._uses: dict[bytes, list[int]] = {}  # requests that use a key, the next one last
        self._depth: dict[bytes, int] = {}
        self._heap: list[tuple[int, int, bytes]] = []
        self._now = 0

    def know(self, requests: Iterable[Sequence[bytes]]) -> None:
        """Tell the future: the keys of each request, in order; each ends with an `on_request_finished`."""
        for number, keys in enumerate(requests):
            for depth, key in enumerate(keys):
                self._uses.setdefault(key, []).append(number)
                self._depth[key] = depth
        for uses in self._uses.values():
            uses.reverse()

    def _next_use(self, key: bytes) -> int:
        """The next request after the present one that uses `key`."""
        uses = self._uses.get(key, [])
        while uses and uses[-1] <= self._now:
            uses.pop()
        return uses[-1] if uses else _NEVER

    def _note(self, key: bytes) -> None:
        heappush(self._heap, (-self._next_use(key), -self._depth.get(key, 0), key))

    def get(self, key: bytes) -> ChunkStatus | None:
        """The chunk of `key`, or None."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: ChunkStatus, req_context: RequestContext | None = None) -> None:
        """Take in a chunk."""
        self._chunks[key] = chunk
        self._note(key)

    def remove(self, key: bytes) -> None:
        """Forget `key`, which may be unknown."""
        self._chunks.pop(key, None)

    def touch(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> None:
        """What was used has another next use now."""
        for key in keys:
            if key in self._chunks:
                self._note(key)

    def on_store_miss(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> None:
        """Changes nothing."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: Collection[bytes],
        reused_keys: Collection[bytes],
        ctx: RequestContext | None = None,
    ) -> None:
        """The next request of the known future begins."""
        for group in key_groups:
            self.touch(group, ctx)
        self._now += 1

    def evict(self, n: int, protected: Collection[bytes]) -> Victims | None:
        """The `n` evictable blocks whose next use is farthest, or None and nothing changed."""
        return self._evict(n, None, protected)

    def evict_until(self, enough: Callable[[bytes, ChunkStatus], bool], protected: Collection[bytes]) -> Victims | None:
        """As `evict`, until `enough`."""
        return self._evict(len(self._chunks) + 1, enough, protected)

    def _evict(
        self, n: int, enough: Callable[[bytes, ChunkStatus], bool] | None, protected: Collection[bytes]
    ) -> Victims | None:
        farthest = max((self._next_use(key) for key in protected if key not in self._chunks), default=0)
        found: list[tuple[int, int, bytes]] = []
        passed: list[tuple[int, int, bytes]] = []
        sated = n == 0
        chosen: set[bytes] = set()
        while not sated and self._heap:
            entry = heappop(self._heap)
            next_use, _, key = entry
            chunk = self._chunks.get(key)
            if chunk is None or key in chosen or -next_use != self._next_use(key):
                continue
            if chunk.ref_cnt or key in protected:
                passed.append(entry)
                continue
            if -next_use < farthest:
                passed.append(entry)
                break
            found.append(entry)
            chosen.add(key)
            sated = len(found) == n or (enough is not None and enough(key, chunk))
        for entry in passed if sated else passed + found:
            heappush(self._heap, entry)
        return [(key, self._chunks.pop(key)) for _, _, key in found] if sated else None

    def clear(self) -> None:
        """Drop the contents; the known future stays."""
        self._chunks.clear()
        self._heap.clear()

    def chunks(self) -> Iterator[tuple[bytes, ChunkStatus]]:
        """All keys with their chunks, the farthest next use first."""
        ordered = sorted(self._chunks, key=lambda key: (-self._next_use(key), -self._depth.get(key, 0)))
        return iter([(key, self._chunks[key]) for key in ordered])
