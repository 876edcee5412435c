"""A policy that knows prefixes: what one request used last leaves by what such groups are worth.

What a request used stands in groups (`prefix_groups`); from hits and from ghosts the policy learns when groups
of a class are used again (`prefix_model`). The least worthy group loses its deepest block first, and a block
with a resident child does not leave before it. A store whose blocks would be less worth than what would have
to leave for them is refused; its blocks are remembered as ghosts and learnt from. While its predictions do
worse than LRU the policy does as LRU does (`prefix_guard`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import inf

from omlxd.policy.base import CachePolicy, ChunkStatus, RequestContext, Victims, arrange, order_request_keys, state_keys
from omlxd.policy.prefix_groups import STRETCH, Group, Node, Path, path_features
from omlxd.policy.prefix_history import History
from omlxd.policy.prefix_model import gain_over_rent
from omlxd.policy.prefix_state import PrefixState

WEAR = 216.0
"""Uses that a block must promise beyond the rent of its room to be worth a write to an SSD which all that is new
would fill within one request. The price of a write is a share of the disk's life, and a disk of twice the size
may be written twice as much; so it falls with the time in which the new would fill it.
"""
_FULL = 0.97  # of the capacity, which a tier with a byte budget can only estimate
AGAIN_COUNTS = 3.0
"""What a use of a block counts there that has been used again before: more uses follow it than a first one."""


class PrefixCachePolicy(CachePolicy):
    """Learns how long each kind of prefix is worth its room."""

    keeps_heads = True

    def __init__(self, cache_capacity: int) -> None:
        self._history = History(cache_capacity)
        super().__init__(cache_capacity)
        self._missed: Sequence[bytes] = ()
        self._declined = False

    @property
    def cache_capacity(self) -> int:
        """In chunks; a tier with a byte budget changes it as the mean size of its blocks does."""
        return self._history.capacity

    @cache_capacity.setter
    def cache_capacity(self, capacity: int) -> None:
        self._history.set_capacity(capacity)

    @property
    def declined(self) -> bool:
        """Whether the last search for victims gave none because all that may leave is worth more than what would come."""
        return self._declined

    def get(self, key: bytes) -> ChunkStatus | None:
        """The chunk of `key`, or None."""
        node = self._history.nodes.get(key)
        return None if node is None else node.chunk

    # Uses

    def on_store_miss(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> None:
        """Remember what is going to be inserted together, for stores that belong to no request."""
        self._missed = keys

    def on_request_access(self, keys: Sequence[bytes], ctx: RequestContext) -> None:
        """Append `keys` to the path of the running request."""
        path = self._path(ctx)
        if path is None:
            path = self._begin(ctx)
        path.expected = len(ctx.positions)
        path.context = ctx
        self._history.use(path, keys, create=True)

    def _begin(self, ctx: RequestContext) -> Path:
        """A path for the request of `ctx`: a new one, or its old one where it has ended before and goes on."""
        entry = ctx.scratch.get(self)
        if isinstance(entry, tuple) and entry[0] is self._history:
            path: Path = self._history.reopen(entry[1])
        else:
            path = self._history.open_path()
        ctx.scratch[self] = (self._history, path)
        return path

    def _path(self, ctx: RequestContext | None) -> Path | None:
        """The path of a request that runs, if this policy has seen it since the last `clear`."""
        entry = None if ctx is None else ctx.scratch.get(self)
        if isinstance(entry, tuple) and entry[0] is self._history and not entry[1].closed:
            path = entry[1]
            assert isinstance(path, Path)
            return path
        return None

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: Collection[bytes],
        reused_keys: Collection[bytes],
        ctx: RequestContext | None = None,
    ) -> None:
        """One use of the path that the request's keys make, over all KV groups."""
        keys = order_request_keys(key_groups, ctx)
        path = self._path(ctx)
        if path is None:
            self.touch(keys, ctx)
            return
        self._history.use(path, keys, create=False)
        known = self._history.nodes
        ordered = [known[key] for key in keys if key in known and known[key].group is path]
        if len(ordered) == len(path.nodes) and ordered != path.nodes:
            self._history.reorder(path, ordered)
        self._history.close(path)

    def touch(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> None:
        """One use of the path that `keys` make, heads first. Keys that are not here become ghosts: they may be in
        the other tier, and come here later. With the context of a request it is that request that used them, once.
        """
        if keys:
            path = self._history.open_path() if ctx is None else self._path(ctx) or self._begin(ctx)
            if ctx is not None:
                path.expected = max(path.expected, len(ctx.positions))
            self._history.use(path, keys, create=True)
            self._history.close(path)

    # Coming and going

    def insert(self, key: bytes, chunk: ChunkStatus, req_context: RequestContext | None = None) -> None:
        """Take in a chunk, at the place in its request's path that the accesses before have given it.

        Without a request a ghost comes back at the age that it has (a spill is no use), and unknown keys that
        were reported as missed together become one group.
        """
        history = self._history
        node = history.nodes.get(key)
        if node is None:
            path = self._path(req_context)
            if path is not None:
                history.use(path, (key,), create=True)
            else:
                together = [other for other in self._missed if other not in history.nodes]
                path = history.open_path()
                history.use(path, together if key in together else (key,), create=True, chained=False)
                history.close(path)
                self._missed = ()
            node = history.nodes[key]
        history.arrive(node, chunk)

    def remove(self, key: bytes) -> None:
        """Forget `key`, which may be unknown; makes no ghost."""
        node = self._history.nodes.get(key)
        if node is not None:
            self._history.forget(node)

    def clear(self) -> None:
        """Forget everything, what was learnt included."""
        self._history = History(self.cache_capacity)
        self._missed = ()
        self._declined = False

    def mark_evictable(self, key: bytes) -> None:
        """Let the chunk's group be evicted, where it waited for this chunk."""
        self._edge_changed(key)

    def mark_non_evictable(self, key: bytes) -> None:
        """Keep the chunk's group, where this chunk would be next."""
        self._edge_changed(key)

    def _edge_changed(self, key: bytes) -> None:
        node = self._history.nodes.get(key)
        if node is not None:
            group = node.group
            if isinstance(group, Group) and group.edge == node.place:
                self._history.requeue(group)

    # Victims

    def evict(self, n: int, protected: Collection[bytes]) -> Victims | None:
        """The deepest blocks of the `n` least worthy places, or None and nothing changed."""
        if n > self._history.num_residents:
            self._declined = False
            return None
        return self._evict(n, None, protected)

    def evict_until(self, enough: Callable[[bytes, ChunkStatus], bool], protected: Collection[bytes]) -> Victims | None:
        """As `evict`, until `enough`."""
        return self._evict(self._history.num_residents + 1, enough, protected)

    def _evict(
        self, n: int, enough: Callable[[bytes, ChunkStatus], bool] | None, protected: Collection[bytes]
    ) -> Victims | None:
        history = self._history
        queue = history.queue
        by_use = history.guard.lru_leads
        pick = queue.oldest if by_use else queue.least
        highest = inf if by_use else self._worth_of_newcomers(protected)
        self._declined = False
        victims: list[tuple[Node, ChunkStatus]] = []
        passed: list[Group] = []
        sated = n == 0
        while not sated:
            found = pick()
            if found is None:
                break
            worth, group = found
            node = group.nodes[group.edge]
            assert node is not None
            assert node.chunk is not None
            if node.key in protected:
                queue.take(group)
                passed.append(group)
                continue
            if worth > highest:
                self._declined = True
                break
            chunk = node.chunk
            history.depart(node)
            victims.append((node, chunk))
            sated = len(victims) == n or (enough is not None and enough(node.key, chunk))
        for group in reversed(passed):
            queue.add(group, first=True)
        if not sated and not self._declined:
            sated = self._take_any(n, enough, protected, victims)
        if not sated:
            for node, chunk in reversed(victims):
                history.come_back(node, chunk)
            return None
        history.drop_ghosts()
        return [(node.key, chunk) for node, chunk in victims]

    def _worth_of_newcomers(self, protected: Collection[bytes]) -> float:
        """Worth of the deepest of the blocks that a request stores which may be declined; otherwise nothing is worth more."""
        paths = self._history.paths
        if not any(path.context is not None and path.context.may_be_declined for path in paths):
            return inf
        nodes = self._history.nodes
        deepest: Node | None = None
        for key in protected:
            node = nodes.get(key)
            if node is not None and node.chunk is None and (deepest is None or node.place > deepest.place):
                deepest = node
        path = None if deepest is None else deepest.group
        if deepest is None or not isinstance(path, Path) or path.context is None or not path.context.may_be_declined:
            return inf
        return self._history.model.of(path_features(path, STRETCH, path.uses_at(deepest.place))).worths[0]

    def _take_any(
        self,
        n: int,
        enough: Callable[[bytes, ChunkStatus], bool] | None,
        protected: Collection[bytes],
        victims: list[tuple[Node, ChunkStatus]],
    ) -> bool:
        """No group may lose a block, so take what is left: of running requests, the oldest first, and at last what
        has children that cannot leave. Whether that was enough.
        """
        for node in self._history.last_resort():
            chunk = node.chunk
            if chunk is None or chunk.ref_cnt or node.key in protected:
                continue
            self._history.depart(node)
            victims.append((node, chunk))
            if len(victims) == n or (enough is not None and enough(node.key, chunk)):
                return True
        return False

    # What the tiers ask

    def worth_writing(self, key: bytes) -> bool:
        """Whether the block's uses will outweigh the rent of its room by enough.

        The rent is what the room of the next victim is worth. While there is room without, and while there is nothing
        to predict from, every block is worth it. A group's deepest block is asked about first, and decides for all of it:
        of a tail without its head the writes would be lost.
        """
        history = self._history
        node = history.nodes.get(key)
        if node is None or isinstance(node.group, Path) or history.num_residents < _FULL * history.capacity:
            return True
        least = None if history.guard.lru_leads else history.queue.least()
        if least is None:
            return True
        group = node.group
        if group.worth_writing is None:
            group_class = group.group_class
            counts = AGAIN_COUNTS if group_class.has_been_used_again else 1.0
            gain = gain_over_rent(group_class.hazards, group.bin, least[0], counts)
            group.worth_writing = gain >= min(1.0, WEAR * history.turnover)
        return group.worth_writing

    def chunks(self) -> Iterator[tuple[bytes, ChunkStatus]]:
        """All resident keys with their chunks, least worthy first."""
        for node in self._history.residents():
            assert node.chunk is not None
            yield node.key, node.chunk

    def state(self) -> dict[str, object]:
        """Residents in their groups, and all that was learnt; no ghosts."""
        return PrefixState.of(self._history).pack()

    def restore_state(self, state: Mapping[str, object], residents: Mapping[bytes, ChunkStatus]) -> None:
        """Go on from `state`, this policy's or the order of another's."""
        order = arrange(state_keys(state, "order"), residents)
        packed = PrefixState.unpack(state)
        self.clear()
        if packed is not None:
            self._history = packed.rebuild(self.cache_capacity, residents)
        for key in order:
            if key not in self._history.nodes:
                self.insert(key, residents[key])
