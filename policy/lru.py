"""LRU by logical ranks.

Every resident key has a rank, also while it is pinned or pending, so recency never depends on when a transfer
begins or ends.

The order is kept as a *log*: giving a key a new rank appends (key, rank) and leaves the older entry behind,
to be recognised as stale when a search for victims meets it. An access therefore costs two appends and one
dictionary write, and pinning costs nothing at all. A search that meets a pinned or pending key takes it out
of the log; `mark_evictable` then lets it back in by way of a heap, which eviction merges with the log by
rank. The keys of a running request share one rank, so their group has one entry in the log; only a search
that meets it orders them, by way of the heap too. Log, groups and heap are rebuilt when stale entries
outnumber the live ones, so all are bounded by the number of resident keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

from omlxd.policy.base import CachePolicy, ChunkStatus, RequestContext, Victims, order_request_keys

_SLACK = 1024  # stale entries that are never worth a rebuild
_SPENT = -1  # in place of a rank: this entry of the log says nothing any more
_GROUP = b""  # in place of a key: this entry of the log stands for all keys of that rank

# Where a key stands that is not in the log: (rank, -position, -how many keys its request had seen before,
# key).
_Place = tuple[int, int, int, bytes]


@dataclass(slots=True, eq=False)
class _Group:
    """The keys of one running request, at the rank that they share until it ends."""

    rank: int
    epoch: object
    seen: int = 0
    places: list[_Place] = field(default_factory=list)
    """Those of its keys, and stale ones, until a search has met the group."""


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
        self._shared: dict[bytes, _Place] = {}  # keys at a rank that they share
        self._groups: dict[int, _Group] = {}  # by rank, those that no search has met yet
        self._num_places = 0  # of all groups together
        self._out: set[bytes] = set()  # keys neither in log, group nor heap: pinned or pending when a search met them
        self._heap: list[_Place] = []
        self._heaped: dict[bytes, _Place] = {}  # the heap's live entries
        self._epoch = object()

    def get(self, key: bytes) -> ChunkStatus | None:
        """The chunk of `key`, or None."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: ChunkStatus, req_context: RequestContext | None = None) -> None:
        """Take the next rank; with a context that has a shared one, and a position for `key`, that one."""
        if key in self._chunks:
            self._leave_place(key)
            self._tidy()
        self._chunks[key] = chunk
        if req_context is not None and key in req_context.positions:
            group = self._group_of(req_context)
            if group is not None:
                self._join(group, (key,), req_context.positions)
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

    def touch(self, keys: Iterable[bytes], ctx: RequestContext | None = None) -> None:
        """New ranks, tail to head; unknown keys are ignored."""
        ranks, next_rank = self._rank, self._next_rank
        log_key, log_rank = self._log_keys.append, self._log_ranks.append
        shared, heaped, out = self._shared, self._heaped, self._out
        for key in reversed(list(keys)):
            if key in ranks:
                if key in shared or key in heaped or key in out:
                    self._leave_place(key)
                ranks[key] = rank = next(next_rank)
                log_key(key)
                log_rank(rank)
        self._tidy()

    def on_request_access(self, keys: Sequence[bytes], ctx: RequestContext) -> None:
        """Give `keys` the rank that the request's keys share, unless a newer access has given them a higher
        one.

        Among them the larger position leaves first, so that an unfinished prefix loses its tail. A key
        without a position counts as lying behind the keys that the request has seen before.
        """
        group = self._group_of(ctx) or self._new_group(ctx)
        ranks, rank = self._rank, group.rank
        self._join(group, [key for key in keys if ranks.get(key, rank) < rank], ctx.positions)

    def _group_of(self, ctx: RequestContext) -> _Group | None:
        group = ctx.scratch.get(self)
        return group if isinstance(group, _Group) and group.epoch is self._epoch else None

    def _new_group(self, ctx: RequestContext) -> _Group:
        ctx.scratch[self] = group = _Group(next(self._next_rank), self._epoch)
        self._groups[group.rank] = group
        self._log_keys.append(_GROUP)
        self._log_ranks.append(group.rank)
        self._tidy()
        return group

    def _join(self, group: _Group, keys: Sequence[bytes], positions: Mapping[bytes, int]) -> None:
        ranks, shared, heaped, out = self._rank, self._shared, self._heaped, self._out
        rank, seen = group.rank, group.seen
        met = rank not in self._groups
        for key in keys:
            if key in shared or key in heaped or key in out:
                self._leave_place(key)
            place = (rank, -positions.get(key, seen), -seen, key)
            seen += 1
            ranks[key] = rank
            shared[key] = place
            if met:
                self._admit(place)
            else:
                group.places.append(place)
        group.seen = seen
        if not met:
            self._num_places += len(keys)
        self._tidy()

    def _live_places(self, group: _Group) -> list[_Place]:
        shared = self._shared
        return [place for place in group.places if shared.get(place[3]) is place]

    def _prune_groups(self) -> None:
        """Drop stale places, and groups that have no other: what joins such a one later goes to the heap."""
        for rank, group in list(self._groups.items()):
            group.places = self._live_places(group)
            if not group.places:
                del self._groups[rank]
        self._num_places = sum(len(group.places) for group in self._groups.values())

    def _open(self, group: _Group) -> None:
        """A search has come to the rank of `group`: its keys are looked for in the heap from now on."""
        del self._groups[group.rank]
        self._num_places -= len(group.places)
        for place in self._live_places(group):
            self._admit(place)
        group.places = []

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

    def _admit(self, place: _Place) -> None:
        """Take a key in that a search will not meet in the log: to the heap, or to those that wait for their
        transfer's end.
        """
        if self._chunks[place[3]].ref_cnt:
            self._out.add(place[3])
        else:
            self._push(place)

    def _push(self, place: _Place) -> None:
        self._heaped[place[3]] = place
        heappush(self._heap, place)

    def _leave_place(self, key: bytes) -> None:
        """Forget where a key stood outside the log."""
        if key in self._shared:
            del self._shared[key]
        if key in self._heaped:
            del self._heaped[key]
        elif key in self._out:
            self._out.remove(key)

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
                del heaped[key]
                chunk = chunks[key]
                if chunk.ref_cnt:
                    self._out.add(key)
                    continue
                taken.append(place)
                if key in protected:
                    continue
            elif at < end:
                key, rank = log_keys[at], log_ranks[at]
                at += 1
                if ranks.get(key) != rank:
                    if rank in self._groups:
                        self._open(self._groups[rank])
                    continue
                chunk = chunks[key]
                if chunk.ref_cnt:
                    log_ranks[at - 1] = _SPENT
                    self._out.add(key)
                    continue
                if key in protected:
                    log_ranks[at - 1] = _SPENT
                    taken.append((rank, 0, 0, key))
                    continue
            else:
                self._put_back(taken)
                self._tidy()
                return None
            victims.append((key, chunk))
            if enough is not None and enough(key, chunk):
                break
        self._head = at
        shared = self._shared
        for key, _ in victims:
            del chunks[key], ranks[key]
            if key in shared:
                del shared[key]
        self._put_back(taken)
        self._tidy()
        return victims

    def _put_back(self, taken: list[_Place]) -> None:
        for place in taken:
            if place[3] in self._rank:
                self._push(place)

    def _tidy(self) -> None:
        """Keep log, heap and groups no longer than twice the resident keys."""
        most = 2 * len(self._rank) + _SLACK
        if len(self._heap) > most:
            self._heap[:] = self._heaped.values()
            heapify(self._heap)
        if len(self._log_keys) > most or self._num_places > most:
            self._prune_groups()
            ranks, groups = self._rank, self._groups
            entries = zip(self._log_keys[self._head :], self._log_ranks[self._head :], strict=True)
            live = [(key, rank) for key, rank in entries if ranks.get(key) == rank or rank in groups]
            self._log_keys = [key for key, _ in live]
            self._log_ranks = [rank for _, rank in live]
            self._head = 0

    def clear(self) -> None:
        """Drop everything. The shared ranks of running requests end here too."""
        self._chunks.clear()
        self._rank.clear()
        self._log_keys.clear()
        self._log_ranks.clear()
        self._head = 0
        self._shared.clear()
        self._groups.clear()
        self._num_places = 0
        self._out.clear()
        self._heap.clear()
        self._heaped.clear()
        self._epoch = object()

    def chunks(self) -> Iterator[tuple[bytes, ChunkStatus]]:
        """By rank, pinned and pending keys included."""
        for key in sorted(self._chunks, key=self._place):
            yield key, self._chunks[key]
