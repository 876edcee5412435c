"""The manager around a cache policy: slots, the life of a chunk, admission, what each request did, events.

Life of a chunk: absent, -1 while a store writes it, 0 ready and evictable, n while n transfers read it.
Nothing here knows bytes: a tier with a byte budget subclasses `ChunkManager` and overrides the hooks at its
end. One thread at a time calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from inspect import Parameter, signature

from omlxd.policy.base import CachePolicy, ChunkStatus, RequestContext, Victims
from omlxd.policy.registry import get_policy
from omlxd.policy.switching import switched
from omlxd.storage.admission import AdmissionFilter
from omlxd.storage.chunk_records import (
    ChunkCounters,
    ChunkError,
    ChunkEvent,
    Lookup,
    PreparedStore,
    RequestState,
)

__all__ = [
    "ChunkCounters",
    "ChunkError",
    "ChunkEvent",
    "ChunkManager",
    "Lookup",
    "PreparedStore",
]


class ChunkManager:
    """Hands out `num_chunks` slots by key and evicts through a policy.

    Every method takes the request's context last. Without one nothing is accounted to a request: recency then
    changes by insertion and `touch` only.
    """

    def __init__(
        self,
        num_chunks: int,
        cache_policy: str | type[CachePolicy] = "lru",
        enable_events: bool = False,
        store_threshold: int = 0,
        max_tracker_size: int = 64_000,
    ) -> None:
        if num_chunks < 0:
            raise ValueError(f"num_chunks is {num_chunks}; it must be 0 or more")
        if max_tracker_size < 1:
            raise ValueError(f"max_tracker_size is {max_tracker_size}; it must be 1 or more")
        policy_class = get_policy(cache_policy) if isinstance(cache_policy, str) else cache_policy
        self.num_chunks = num_chunks
        self.counters = ChunkCounters()
        self.generation = 0
        self._policy = policy_class(num_chunks)
        self._admission = AdmissionFilter(store_threshold, max_tracker_size) if store_threshold > 0 else None
        self._events: list[ChunkEvent] | None = [] if enable_events else None
        self._num_evictable = 0
        self._num_fresh_used = 0
        self._free_slots: list[int] = []
        self._insert_function: object = None
        self._insert_takes_context = False

    @property
    def policy(self) -> CachePolicy:
        """The policy that holds the chunks."""
        return self._policy

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return self.num_chunks - self._num_fresh_used + len(self._free_slots)

    @property
    def num_evictable(self) -> int:
        """Chunks that are ready and that nobody reads."""
        return self._num_evictable

    def __len__(self) -> int:
        return self._num_fresh_used - len(self._free_slots)

    def __contains__(self, key: bytes) -> bool:
        return self._policy.get(key) is not None

    # Reading

    def get(self, key: bytes) -> ChunkStatus | None:
        """The chunk of `key`, or None; no effect on recency."""
        return self._policy.get(key)

    def lookup(self, key: bytes, req_context: RequestContext | None = None) -> Lookup:
        """What there is under `key`. No recency, no admission count."""
        chunk = self._policy.get(key)
        if chunk is None:
            return _MISS
        return _HIT if chunk.ref_cnt >= 0 else _PENDING

    def lookup_many(self, keys: Iterable[bytes], req_context: RequestContext | None = None) -> list[Lookup]:
        """`lookup` of each of `keys`, in their order."""
        get = self._policy.get
        return [_MISS if (chunk := get(key)) is None else _HIT if chunk.ref_cnt >= 0 else _PENDING for key in keys]

    def prepare_load(self, keys: Iterable[bytes], req_context: RequestContext | None = None) -> list[int]:
        """Pin the chunks of `keys`, once per occurrence; returns their slots in the order of `keys`.

        ChunkError, with nothing pinned, when one is absent or not ready.
        """
        keys = list(keys)
        get = self._policy.get
        chunks: list[ChunkStatus] = []
        for key in keys:
            chunk = get(key)
            if chunk is None or chunk.ref_cnt < 0:
                raise _not_ready(key, chunk)
            chunks.append(chunk)
        if req_context is not None:
            self._note_load(keys, req_context)
        mark_non_evictable, became_busy = self._policy.mark_non_evictable, self._became_busy
        for key, chunk in zip(keys, chunks, strict=True):
            chunk.ref_cnt = readers = chunk.ref_cnt + 1
            if readers == 1:
                self._num_evictable -= 1
                mark_non_evictable(key)
                became_busy(key, chunk)
        return [chunk.chunk_id for chunk in chunks]

    def complete_load(self, keys: Iterable[bytes], req_context: RequestContext | None = None) -> None:
        """Undo `prepare_load`, in any order. ChunkError, with nothing changed, for a key that is absent or
        that nobody reads.
        """
        if self._is_stale(req_context):
            return
        get = self._policy.get
        done: list[ChunkStatus] = []
        released: list[tuple[bytes, ChunkStatus]] = []
        for key in keys:
            chunk = get(key)
            if chunk is None or chunk.ref_cnt <= 0:
                for one in done:
                    one.ref_cnt += 1
                raise ChunkError(f"chunk {key.hex()} is {_describe(chunk)}: no load of it is under way")
            chunk.ref_cnt = readers = chunk.ref_cnt - 1
            done.append(chunk)
            if not readers:
                released.append((key, chunk))
        mark_evictable, became_evictable = self._policy.mark_evictable, self._became_evictable
        self._num_evictable += len(released)
        for key, chunk in released:
            mark_evictable(key)
            became_evictable(key, chunk)

    def pin(self, key: bytes) -> ChunkStatus:
        """Read a ready chunk without it counting as an access (a spill does); ChunkError when it is absent or
        not ready.
        """
        chunk = self._policy.get(key)
        if chunk is None or chunk.ref_cnt < 0:
            raise _not_ready(key, chunk)
        chunk.ref_cnt += 1
        if chunk.ref_cnt == 1:
            self._num_evictable -= 1
            self._policy.mark_non_evictable(key)
            self._became_busy(key, chunk)
        return chunk

    def unpin(self, key: bytes) -> None:
        """Undo one `pin`."""
        self.complete_load((key,))

    def touch(self, keys: Iterable[bytes], req_context: RequestContext | None = None) -> None:
        """Note a use of `keys` that happened elsewhere; heads first."""
        self._policy.touch(list(keys), req_context or RequestContext())

    # Writing

    def prepare_store(self, keys: Iterable[bytes], req_context: RequestContext | None = None) -> PreparedStore | None:
        """Take slots for those of `keys` that are absent and admitted, evicting what that needs; None when
        there is no room for all of them.

        The slots are in state -1 until `complete_store`. A key that is present or pending is not stored
        again.
        """
        policy = self._policy
        offered = dict.fromkeys(keys)
        if self._admission is not None:
            self._admission.count(offered)
        get = policy.get
        misses: list[bytes] = []
        ready: list[bytes] = []
        for key in offered:
            chunk = get(key)
            if chunk is None:
                misses.append(key)
            elif chunk.ref_cnt >= 0:
                ready.append(key)
        if self._admission is not None and misses:
            admitted = self._admission.admitted(misses)
            below = set(misses).difference(admitted)
            self.counters.below_threshold += len(below)
            misses = admitted
            observed = [key for key in offered if key not in below] if below else list(offered)
        else:
            observed = list(offered)
        state = None if req_context is None else self._state(req_context)
        self._report_misses(misses, state, req_context)
        if state is not None and req_context is not None:
            state.reused.update(key for key in ready if key not in state.inserted)
            self._see(state, observed, req_context)
        if not misses:
            return PreparedStore([], [], [])
        self.counters.allocation_requested += len(misses)
        victims = self._make_room(misses, offered.keys())
        if victims is None:
            self.counters.refused_stores += 1
            return None
        evicted = self._take_out(victims)
        self.counters.evicted += len(evicted)
        chunk_ids = self._insert(misses, req_context)
        if state is not None:
            state.inserted.update(misses)
        return PreparedStore(misses, chunk_ids, evicted)

    def complete_store(
        self, keys: Iterable[bytes], success: bool = True, req_context: RequestContext | None = None
    ) -> list[bytes]:
        """Make pending `keys` readable, or free their slots again. Others are ignored. Returns those that
        were pending.
        """
        if self._is_stale(req_context):
            return []
        policy = self._policy
        get = policy.get
        flipped: list[bytes] = []
        if success:
            mark_evictable, became_evictable = policy.mark_evictable, self._became_evictable
            for key in keys:
                chunk = get(key)
                if chunk is not None and chunk.ref_cnt < 0:
                    chunk.ref_cnt = 0
                    self._num_evictable += 1
                    mark_evictable(key)
                    became_evictable(key, chunk)
                    flipped.append(key)
            self.counters.stored += len(flipped)
            self._emit(flipped, removed=False)
            return flipped
        for key in keys:
            chunk = get(key)
            if chunk is not None and chunk.ref_cnt < 0:
                policy.remove(key)
                self._free_slot(key, chunk)
                flipped.append(key)
        self.counters.failed += len(flipped)
        if req_context is not None:
            self._state(req_context).inserted.difference_update(flipped)
        return flipped

    def discard(self, keys: Iterable[bytes]) -> list[bytes]:
        """Remove those of `keys` that are ready and unread, without ghosts; returns them. For what is known
        to be useless or damaged.
        """
        found: Victims = []
        for key in dict.fromkeys(keys):
            chunk = self._policy.get(key)
            if chunk is not None and chunk.ref_cnt == 0:
                self._policy.remove(key)
                found.append((key, chunk))
        return self._take_out(found)

    # Requests, events, the whole

    def on_request_finished(self, req_context: RequestContext) -> None:
        """Pass what the request did to the policy, once."""
        state = req_context.scratch.get(self)
        if not isinstance(state, RequestState) or state.finished:
            return
        # What stays is the generation, by which a late completion of a transfer is judged.
        req_context.scratch[self] = RequestState(state.generation, finished=True)
        if state.generation != self.generation:
            return
        self._policy.on_request_finished(state.key_groups(), state.inserted - state.reused, state.reused, req_context)

    def take_events(self) -> list[ChunkEvent]:
        """The events since the last call, oldest first; always empty unless they were enabled."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """Drop everything, whatever its `ref_cnt`. What running requests did before is ignored from now on."""
        self._policy.clear()
        self.generation += 1
        self._num_evictable = 0
        self._reset_slots()
        if self._admission is not None:
            self._admission.clear()
        self.counters = ChunkCounters()

    def switch_policy(self, name: str) -> None:
        """Go on with another policy and the same contents. ValueError when that cannot be; the old policy
        then goes on as it was.
        """
        self._policy = switched(self._policy, name)

    # Hooks for a tier with a byte budget

    def _make_room(self, keys: Sequence[bytes], protected: Collection[bytes]) -> Victims | None:
        """Victims, already out of the policy, without which `keys` do not fit; None to refuse, and then
        nothing has changed.
        """
        need = len(keys) - self.num_free
        if need <= 0:
            return []
        if need > self._num_evictable:
            return None
        return self._policy.evict(need, protected)

    def _allocate_slot(self, key: bytes) -> int:
        """A slot for `key`: a fresh one, else the one freed last. Must succeed after `_make_room` did."""
        if self._num_fresh_used < self.num_chunks:
            self._num_fresh_used += 1
            return self._num_fresh_used - 1
        return self._free_slots.pop()

    def _allocate_used_slot(self) -> int:
        """The slot freed last, else a fresh one: for managers whose budget is bytes, which have no number of slots."""
        if self._free_slots:
            return self._free_slots.pop()
        self._num_fresh_used += 1
        return self._num_fresh_used - 1

    def _free_slot(self, key: bytes, chunk: ChunkStatus) -> None:
        """Give the slot of a chunk back that has left the policy: evicted or discarded (`ref_cnt` 0), or
        failed (-1).
        """
        self._free_slots.append(chunk.chunk_id)

    def _reset_slots(self) -> None:
        """Give all slots back at once, for `reset`."""
        self._num_fresh_used = 0
        self._free_slots.clear()

    def _became_evictable(self, key: bytes, chunk: ChunkStatus) -> None:
        """The chunk's `ref_cnt` has become 0."""

    def _became_busy(self, key: bytes, chunk: ChunkStatus) -> None:
        """The chunk's `ref_cnt` has left 0: it is being read. Not called when it is evicted (`_free_slot`
        is).
        """

    # Inside

    def _state(self, ctx: RequestContext) -> RequestState:
        state = ctx.scratch.get(self)
        if not isinstance(state, RequestState) or state.generation != self.generation or state.finished:
            ctx.scratch[self] = state = RequestState(self.generation)
        return state

    def _is_stale(self, ctx: RequestContext | None) -> bool:
        """Whether the request began its transfers before the last reset."""
        state = None if ctx is None else ctx.scratch.get(self)
        return isinstance(state, RequestState) and state.generation != self.generation

    def _note_load(self, keys: Sequence[bytes], ctx: RequestContext) -> None:
        """Tell the policy that the request reads `keys`; what it has inserted itself it does not reuse."""
        state = self._state(ctx)
        state.reused.update(keys if not state.inserted else (key for key in keys if key not in state.inserted))
        self._see(state, keys, ctx)

    def _see(self, state: RequestState, keys: Sequence[bytes], ctx: RequestContext) -> None:
        seen = state.seen
        fresh = dict.fromkeys(keys if not seen else [key for key in keys if key not in seen])
        if fresh:
            seen.update(fresh)
            self._policy.on_request_access(list(fresh), ctx)

    def _report_misses(self, misses: list[bytes], state: RequestState | None, ctx: RequestContext | None) -> None:
        if state is not None:
            misses = [key for key in misses if key not in state.missed]
            state.missed.update(misses)
        if misses:
            self._policy.on_store_miss(misses, ctx or RequestContext())

    def _take_out(self, victims: Victims) -> list[bytes]:
        """Free the slots of ready chunks that have left the policy."""
        keys = [key for key, _ in victims]
        self._emit(keys, removed=True)
        self._num_evictable -= len(victims)
        for key, chunk in victims:
            self._free_slot(key, chunk)
        return keys

    def _insert(self, keys: Sequence[bytes], ctx: RequestContext | None) -> list[int]:
        allocate = self._allocate_slot
        chunks = [ChunkStatus(allocate(key)) for key in keys]
        insert: Callable[..., None] = self._policy.insert
        if ctx is not None and self._takes_context(insert):
            for key, chunk in zip(keys, chunks, strict=True):
                insert(key, chunk, ctx)
        else:
            for key, chunk in zip(keys, chunks, strict=True):
                insert(key, chunk)
        return [chunk.chunk_id for chunk in chunks]

    def _takes_context(self, insert: Callable[..., None]) -> bool:
        """Whether the policy's `insert` knows the request context: older ones do not. Looked up again when
        somebody patched it.
        """
        function = getattr(insert, "__func__", insert)
        if function is not self._insert_function:
            kinds = [parameter.kind for parameter in signature(insert).parameters.values()]
            named = kinds.count(Parameter.POSITIONAL_ONLY) + kinds.count(Parameter.POSITIONAL_OR_KEYWORD)
            self._insert_takes_context = named >= 3 or Parameter.VAR_POSITIONAL in kinds
            self._insert_function = function
        return self._insert_takes_context

    def _emit(self, keys: list[bytes], *, removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(ChunkEvent(list(keys), removed))


_MISS, _HIT, _PENDING = Lookup.MISS, Lookup.HIT, Lookup.PENDING


def _not_ready(key: bytes, chunk: ChunkStatus | None) -> ChunkError:
    return ChunkError(f"chunk {key.hex()} is {_describe(chunk)}: look it up before loading it")


def _describe(chunk: ChunkStatus | None) -> str:
    if chunk is None:
        return "absent"
    return "pending" if chunk.ref_cnt < 0 else f"ready with {chunk.ref_cnt} readers"
