"""LRU by logical ranks.

Every resident key has a rank, also while it is pinned or pending, so recency never depends on when a transfer
begins or ends.

The order is kept as a *log*: giving a key a new rank appends (key, rank) and leaves the older entry behind,
to be recognised as stale when a search for victims meets it. An access therefore costs two appends and one
dictionary write, and pinning costs nothing at all. A search that meets a pinned or pending key takes it out
of the log; `mark_evictable` then lets it back in by way of a heap, which eviction merges with the log by
rank. Log and heap are rebuilt when stale entries outnumber the live ones, so both are bounded by the number
of resident keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from omlxd.policy.base import CachePolicy, ChunkStatus, RequestContext, Victims, order_request_keys

_SLACK = 1024  # stale entries that are never worth a rebuild
_SPENT = -1  # in place of a rank: this entry of the log says nothing any more

# Where a key stands that is not in the log: (rank, -position, -how many keys the request had seen before it,
# key).
_Place = tuple[int, int, int, bytes]


@dataclass(slots=True)
class _Provisional:
    """The rank that the keys of one running request share until it ends."""

    rank: int
    epoch: object
    seen: int = 0


class LRUCachePolicy(CachePolicy):
    """Least recently used first; within a running request's keys the tail first."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: dict[bytes, ChunkStatus] = {}
        self._rank: dict[bytes, int] = {}
        self._next_rank = count()
        self._log_keys: list[bytes] = []
        self._log_ranks: list[int] = []
        self._head = 0  # the log's entries before it are spent
        self._shared: dict[bytes, _Place] = {}  # keys at a provisional rank
        self._out: set[bytes] = set()  # keys neither in log nor heap: pinned or pending when a search met them
        self._heap: list[_Place] = []
        self._heaped: dict[bytes, _Place] = {}  # the heap's live entries
        self._epoch = object()

    def get(self, key: bytes) -> ChunkStatus | None:
        """The chunk of `key`, or None."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: ChunkStatus, req_context: RequestContext | None = None) -> None:
        """Take the next rank; with a context that has a provisional one, and a position for `key`, that one."""
        if self._heaped or self._out or self._shared:
            self._leave_place(key)
        self._chunks[key] = chunk
        if req_context is not None and self in req_context.scratch:
            position = req_context.get_offload_key_position(key)
            if position is not None:
                self._share(key, position, self._provisional(req_context))
                return
        self._rank[key] = rank = next(self._next_rank)
        self._log_keys.append(key)
        self._log_ranks.append(rank)

    def remove(self, key: bytes) -> None:
        """Forget `key`; KeyError for an unknown one."""
        del self._chunks[key]
        del self._rank[key]
        self._leave_place(key)
        self._tidy()

    def touch(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> None:
        """New ranks, tail to head; unknown keys are ignored."""
        ranks, next_rank = self._rank, self._next_rank
        log_key, log_rank = self._log_keys.append, self._log_ranks.append
        placed = bool(self._heaped or self._out or self._shared)
        for key in reversed(keys):
            if key in ranks:
                if placed:
                    self._leave_place(key)
                ranks[key] = rank = next(next_rank)
                log_key(key)
                log_rank(rank)
        self._tidy()

    def on_request_access(self, keys: Sequence[bytes], ctx: RequestContext) -> None:
        """Give `keys` the request's provisional rank, unless a newer access has given them a higher one.

        Among them the larger position leaves first, so that an unfinished prefix loses its tail. A key
        without a position counts as lying behind the keys that the request has seen before.
        """
        provisional = self._provisional(ctx)
        for key in keys:
            rank = self._rank.get(key)
            if rank is not None and rank < provisional.rank:
                position = ctx.get_offload_key_position(key)
                self._leave_place(key)
                self._share(key, provisional.seen if position is None else position, provisional)

    def _provisional(self, ctx: RequestContext) -> _Provisional:
        state = ctx.scratch.get(self)
        if not isinstance(state, _Provisional) or state.epoch is not self._epoch:
            ctx.scratch[self] = state = _Provisional(next(self._next_rank), self._epoch)
        return state

    def _share(self, key: bytes, position: int, provisional: _Provisional) -> None:
        place = (provisional.rank, -position, -provisional.seen, key)
        provisional.seen += 1
        self._rank[key] = provisional.rank
        self._shared[key] = place
        if self._chunks[key].ref_cnt == 0:
            self._push(place)
        else:
            self._out.add(key)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: Collection[bytes],
        reused_keys: Collection[bytes],
        ctx: RequestContext | None = None,
    ) -> None:
        """New ranks, tail to head over all groups, for every resident key that the request observed."""
        if ctx is not None:
            ctx.scratch.pop(self, None)
        self.touch(order_request_keys(key_groups, ctx), ctx)

    def mark_evictable(self, key: bytes) -> None:
        """Let a key back in at the rank it has, where a search for victims has passed it by."""
        if key in self._out:
            self._out.remove(key)
            self._push(self._place(key))

    def _place(self, key: bytes) -> _Place:
        return self._shared.get(key) or (self._rank[key], 0, 0, key)

    def _push(self, place: _Place) -> None:
        if len(self._heap) > 2 * len(self._heaped) + _SLACK:
            self._heap[:] = self._heaped.values()
            heapify(self._heap)
        self._heaped[place[3]] = place
        heappush(self._heap, place)

    def _leave_place(self, key: bytes) -> None:
        """Forget where a key stood outside the log."""
        self._heaped.pop(key, None)
        self._shared.pop(key, None)
        self._out.discard(key)

    def evict(self, n: int, protected: Collection[bytes]) -> Victims | None:
        """The `n` evictable keys of lowest rank, or None and nothing changed."""
        if n > len(self._chunks):
            return None
        return self._evict(n, None, protected)

    def evict_until(self, enough: Callable[[bytes, ChunkStatus], bool], protected: Collection[bytes]) -> Victims | None:
        """The evictable keys of lowest rank until `enough`, or None and nothing changed."""
        return self._evict(len(self._chunks) + 1, enough, protected)

    def _evict(
        self, n: int, enough: Callable[[bytes, ChunkStatus], bool] | None, protected: Collection[bytes]
    ) -> Victims | None:
        chunks, ranks, heap, heaped = self._chunks, self._rank, self._heap, self._heaped
        log_keys, log_ranks = self._log_keys, self._log_ranks
        victims: Victims = []
        taken: list[_Place] = []  # off the heap for this search; whatever stays resident goes back
        at, end = self._head, len(log_keys)
        while len(victims) < n:
            if heap and (at == end or heap[0][0] < log_ranks[at]):
                place = heappop(heap)
                key = place[3]
                if heaped.get(key) is not place:
                    continue
                chunk = chunks[key]
                if chunk.ref_cnt:
                    del heaped[key]
                    self._out.add(key)
                    continue
                taken.append(place)
                if key in protected:
                    continue
            elif at < end:
                key, rank = log_keys[at], log_ranks[at]
                at += 1
                if ranks.get(key) != rank:
                    continue
                chunk = chunks[key]
                if chunk.ref_cnt:
                    log_ranks[at - 1] = _SPENT
                    self._out.add(key)
                    continue
                if key in protected:
                    log_ranks[at - 1] = _SPENT
                    heaped[key] = place = (rank, 0, 0, key)
                    taken.append(place)
                    continue
            else:
                self._put_back(taken)
                return None
            victims.append((key, chunk))
            if enough is not None and enough(key, chunk):
                break
        self._head = at
        for key, _ in victims:
            del chunks[key], ranks[key]
        if taken:
            for key, _ in victims:
                self._leave_place(key)
            self._put_back(taken)
        self._tidy()
        return victims

    def _put_back(self, taken: list[_Place]) -> None:
        for place in taken:
            if place[3] in self._rank:
                heappush(self._heap, place)

    def _tidy(self) -> None:
        """Keep the log shorter than twice the resident keys."""
        if len(self._log_keys) > 2 * len(self._rank) + _SLACK:
            ranks = self._rank
            live = [
                (key, rank)
                for key, rank in zip(self._log_keys[self._head :], self._log_ranks[self._head :], strict=True)
                if ranks.get(key) == rank
            ]
            self._log_keys = [key for key, _ in live]
            self._log_ranks = [rank for _, rank in live]
            self._head = 0

    def clear(self) -> None:
        """Drop everything. Provisional ranks of running requests end here too."""
        self._chunks.clear()
        self._rank.clear()
        self._log_keys.clear()
        self._log_ranks.clear()
        self._head = 0
        self._shared.clear()
        self._out.clear()
        self._heap.clear()
        self._heaped.clear()
        self._epoch = object()

    def chunks(self) -> Iterator[tuple[bytes, ChunkStatus]]:
        """By rank, pinned and pending keys included."""
        for key in sorted(self._chunks, key=self._place):
            yield key, self._chunks[key]
