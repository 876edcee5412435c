"""S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP 2023).

A small queue takes new keys, a main queue those that were used more than once while they were in it; a queue of
ghosts as long as the main one lets a key that comes back soon skip the small queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Enum, auto

from omlxd.policy.base import CachePolicy, ChunkStatus, RequestContext, Victims, order_request_keys

_SMALL_PART = 10  # the small queue has a tenth of the room
_MOST_USES = 3  # two bits
_PROMOTED_ABOVE = 1


class _Step(Enum):
    """What becomes of the first key of a queue while victims are looked for."""

    PASS_SMALL = auto()
    """It may not leave now: set aside until the search is over."""
    PASS_MAIN = auto()
    PROMOTE = auto()
    """From the small queue to the main one."""
    AGAIN = auto()
    """Once more round the main queue."""
    OUT_OF_SMALL = auto()
    OUT_OF_MAIN = auto()


class _Search:
    """The steps of one search for victims, so that one that fails leaves everything as it was."""

    def __init__(
        self,
        uses: dict[bytes, int],
        small: OrderedDict[bytes, None],
        main: OrderedDict[bytes, None],
        ghosts: OrderedDict[bytes, None],
    ) -> None:
        self._uses, self._small, self._main, self._ghosts = uses, small, main, ghosts
        self._steps: list[tuple[_Step, bytes, int]] = []
        self._passed_small: list[bytes] = []
        self._passed_main: list[bytes] = []

    @property
    def num_small(self) -> int:
        """Keys in the small queue, those set aside included."""
        return len(self._small) + len(self._passed_small)

    @property
    def num_main(self) -> int:
        """Keys in the main queue, those set aside included."""
        return len(self._main) + len(self._passed_main)

    def move(self, step: _Step, key: bytes) -> None:
        """Make a step with `key`, the first of its queue."""
        self._steps.append((step, key, self._uses[key]))
        if step is _Step.AGAIN:
            self._uses[key] -= 1
            self._main.move_to_end(key)
            return
        del (self._main if step in (_Step.PASS_MAIN, _Step.OUT_OF_MAIN) else self._small)[key]
        match step:
            case _Step.PASS_SMALL:
                self._passed_small.append(key)
            case _Step.PASS_MAIN:
                self._passed_main.append(key)
            case _Step.PROMOTE:
                self._main[key] = None
                self._uses[key] = 0
            case _Step.OUT_OF_SMALL:
                self._ghosts[key] = None

    def put_back_passed(self) -> None:
        """What was set aside is first in its queue again."""
        for queue, passed in ((self._small, self._passed_small), (self._main, self._passed_main)):
            for key in reversed(passed):
                _put_first(queue, key)

    def undo(self) -> None:
        """All steps backwards."""
        for step, key, uses in reversed(self._steps):
            self._uses[key] = uses
            if step is _Step.PROMOTE:
                del self._main[key]
            elif step is _Step.OUT_OF_SMALL:
                del self._ghosts[key]
            _put_first(self._main if step in (_Step.PASS_MAIN, _Step.OUT_OF_MAIN, _Step.AGAIN) else self._small, key)


def _put_first(queue: OrderedDict[bytes, None], key: bytes) -> None:
    queue[key] = None
    queue.move_to_end(key, last=False)


class S3FIFOCachePolicy(CachePolicy):
    """Three FIFO queues. What one request inserted together leaves tail first."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: dict[bytes, ChunkStatus] = {}
        self._uses: dict[bytes, int] = {}
        self._small: OrderedDict[bytes, None] = OrderedDict()
        self._main: OrderedDict[bytes, None] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._small_room = max(1, cache_capacity // _SMALL_PART)

    def get(self, key: bytes) -> ChunkStatus | None:
        """The chunk of `key`, or None."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: ChunkStatus, req_context: RequestContext | None = None) -> None:
        """To the small queue, or to the main one where the key is a ghost."""
        if key not in self._chunks:
            queue = self._main if key in self._ghosts else self._small
            self._ghosts.pop(key, None)
            queue[key] = None
            self._uses[key] = 0
        self._chunks[key] = chunk

    def remove(self, key: bytes) -> None:
        """Forget `key`, which may be unknown."""
        if self._chunks.pop(key, None) is not None:
            del self._uses[key]
            self._small.pop(key, None)
            self._main.pop(key, None)

    def touch(self, keys: Iterable[bytes], ctx: RequestContext | None = None) -> None:
        """Count a use of the resident ones."""
        uses = self._uses
        for key in keys:
            if key in uses and uses[key] < _MOST_USES:
                uses[key] += 1

    def on_store_miss(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> None:
        """A miss is no use."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: Collection[bytes],
        reused_keys: Collection[bytes],
        ctx: RequestContext | None = None,
    ) -> None:
        """Count a use of what was reused; what was inserted goes behind all others of its queue, tail to head."""
        inserted = set(insertion_only_keys)
        ordered = order_request_keys(key_groups, ctx)
        for key in reversed(ordered):
            if key in inserted:
                queue = self._small if key in self._small else self._main
                if key in queue:
                    queue.move_to_end(key)
        reused = set(reused_keys)
        self.touch((key for key in ordered if key in reused), ctx)

    def evict(self, n: int, protected: Collection[bytes]) -> Victims | None:
        """The next `n` victims, or None and nothing changed."""
        return self._evict(n, None, protected) if n <= len(self._chunks) else None

    def evict_until(self, enough: Callable[[bytes, ChunkStatus], bool], protected: Collection[bytes]) -> Victims | None:
        """The next victims until `enough`, or None and nothing changed."""
        return self._evict(len(self._chunks) + 1, enough, protected)

    def _evict(
        self, n: int, enough: Callable[[bytes, ChunkStatus], bool] | None, protected: Collection[bytes]
    ) -> Victims | None:
        if n == 0:
            return []
        search = _Search(self._uses, self._small, self._main, self._ghosts)
        most_ghosts = max(1, self.cache_capacity - self._small_room)
        victims: Victims = []
        while (key := self._next(search, protected)) is not None:
            chunk = self._chunks.pop(key)
            victims.append((key, chunk))
            if len(victims) == n or (enough is not None and enough(key, chunk)):
                search.put_back_passed()
                for gone, _ in victims:
                    del self._uses[gone]
                while len(self._ghosts) > most_ghosts:
                    self._ghosts.popitem(last=False)
                return victims
        search.undo()
        self._chunks.update(victims)
        return None

    def _next(self, search: _Search, protected: Collection[bytes]) -> bytes | None:
        """Take the next victim out of its queue."""
        if search.num_small >= self._small_room or not search.num_main:
            key = self._next_small(search, protected)
            if key is not None:
                return key
        key = self._next_main(search, protected)
        return key if key is not None else self._next_small(search, protected)

    def _next_small(self, search: _Search, protected: Collection[bytes]) -> bytes | None:
        while self._small:
            key = next(iter(self._small))
            if self._chunks[key].ref_cnt or key in protected:
                search.move(_Step.PASS_SMALL, key)
            elif self._uses[key] > _PROMOTED_ABOVE:
                search.move(_Step.PROMOTE, key)
            else:
                search.move(_Step.OUT_OF_SMALL, key)
                return key
        return None

    def _next_main(self, search: _Search, protected: Collection[bytes]) -> bytes | None:
        while self._main:
            key = next(iter(self._main))
            if self._chunks[key].ref_cnt or key in protected:
                search.move(_Step.PASS_MAIN, key)
            elif self._uses[key]:
                search.move(_Step.AGAIN, key)
            else:
                search.move(_Step.OUT_OF_MAIN, key)
                return key
        return None

    def clear(self) -> None:
        """Drop everything, ghosts included."""
        for held in (self._chunks, self._uses, self._small, self._main, self._ghosts):
            held.clear()

    def chunks(self) -> Iterator[tuple[bytes, ChunkStatus]]:
        """All keys with their chunks: the small queue, then the main one."""
        for key in [*self._small, *self._main]:
            yield key, self._chunks[key]
