"""What a cache policy is, and the records that it shares with the tiers.

A policy both holds a tier's chunks and says which of them leave when room is needed. It does no I/O and takes
no locks: one thread at a time calls it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

Victims: TypeAlias = "list[tuple[bytes, ChunkStatus]]"


class ChunkStatus:
    """State of one slot of a tier.

    `ref_cnt` counts the transfers that read the chunk; -1 means allocated and not readable yet (a writer is
    never counted). `chunk_id` is the index of the physical slot. Slotted, since tiers hold these by the
    million: 64 bytes with the collector's header.
    """

    __slots__ = ("chunk_id", "ref_cnt")

    ref_cnt: int
    chunk_id: int

    def __init__(self, chunk_id: int) -> None:
        self.ref_cnt = -1
        self.chunk_id = chunk_id

    @property
    def is_ready(self) -> bool:
        """Whether the chunk's bytes may be read."""
        return self.ref_cnt >= 0

    def __repr__(self) -> str:
        return f"ChunkStatus(chunk_id={self.chunk_id}, ref_cnt={self.ref_cnt})"


class RequestContext:
    """What is known of one request: its id, where its keys lie in the prompt, and a scratch state for whoever
    drives it.

    The caller keeps one context for as long as the request runs and passes it with each call; state is found
    by the object, not by `req_id`. `scratch` has one entry per owner. The owner is its type, or the instance
    itself where several of one type may see the same request (two tiers with the same policy).
    """

    def __init__(self, req_id: str = "") -> None:
        self.req_id = req_id
        self.may_be_declined = False
        """Whether a policy may refuse what this request stores because it has better use for the room. A restore
        must not be refused for that: its block is being asked for."""
        self.scratch: dict[object, object] = {}
        self.positions: dict[bytes, int] = {}

    def set_offload_key_position(self, key: bytes, pos: int) -> None:
        """Say that the block of `key` ends at token `pos` of the request."""
        self.positions[key] = pos

    def get_offload_key_position(self, key: bytes) -> int | None:
        """Token position at which the block of `key` ends, or None where nobody said."""
        return self.positions.get(key)

    def __repr__(self) -> str:
        return f"RequestContext({self.req_id!r}, {len(self.positions)} positions)"


def order_request_keys(key_groups: Iterable[Iterable[bytes]], ctx: RequestContext | None) -> list[bytes]:
    """Flatten a request's KV groups into one list, heads first.

    With a position for every key the list is sorted by it (stable), so that all groups' tails leave before
    any group's head. With one position missing the flattened order stays.
    """
    keys: list[bytes] = []
    for group in key_groups:
        keys.extend(group)
    if ctx is not None:
        positions = ctx.positions
        if positions and all(key in positions for key in keys):
            keys.sort(key=positions.__getitem__)
    return keys


class CachePolicy(ABC):
    """Holds chunks by key and picks victims.

    `cache_capacity` is in chunks. The methods have no other caller than the tier, which announces each change
    of a chunk's `ref_cnt` from and to 0 with `mark_non_evictable` and `mark_evictable`. Instances have a
    `__dict__` on purpose: engines patch them.
    """

    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = cache_capacity

    @abstractmethod
    def get(self, key: bytes) -> ChunkStatus | None:
        """The chunk of `key`, or None. No effect on recency."""

    @abstractmethod
    def insert(self, key: bytes, chunk: ChunkStatus, req_context: RequestContext | None = None) -> None:
        """Take in a newly allocated chunk. One that is ready already is evictable at once."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Forget `key`, to undo a store that failed: makes no ghost."""

    @abstractmethod
    def touch(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> None:
        """Note a use of `keys`, handled in reverse, so that the head of a prefix ends up most recent."""

    @abstractmethod
    def evict(self, n: int, protected: Collection[bytes]) -> Victims | None:
        """Remove exactly `n` chunks and return them in victim order, or None, and then nothing has changed.

        Skips `protected` and every chunk with `ref_cnt != 0`.
        """

    @abstractmethod
    def clear(self) -> None:
        """Drop everything, whatever its `ref_cnt`, ghosts and learned state included."""

    def on_store_miss(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> None:
        """Misses of a store, reported once per request and key, before they are inserted."""
        self.touch(keys, ctx)

    def on_request_access(self, keys: Sequence[bytes], ctx: RequestContext) -> None:  # noqa: B027 - optional hook
        """Keys that a running request sees for the first time, resident or not."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: Collection[bytes],
        reused_keys: Collection[bytes],
        ctx: RequestContext | None = None,
    ) -> None:
        """One logical access per request. `key_groups`: all keys that it observed, per KV group, heads first."""
        for group in key_groups:
            self.touch(group, ctx)

    def mark_evictable(self, key: bytes) -> None:  # noqa: B027 - optional hook
        """The chunk's `ref_cnt` has become 0."""

    def mark_non_evictable(self, key: bytes) -> None:  # noqa: B027 - optional hook
        """The chunk's `ref_cnt` has left 0: it is being read."""

    # What follows is this project's own addition. The defaults keep policies working that were written
    # without it.

    def evict_until(self, enough: Callable[[bytes, ChunkStatus], bool], protected: Collection[bytes]) -> Victims | None:
        """Remove victims, in the order of `evict`, until `enough(key, chunk)`, asked once for each, says that
        they suffice.

        For tiers whose budget is bytes. The policies of this project are atomic here as well: None means that
        nothing changed. This default can only take one victim after the other and is not; tiers therefore
        check first that the evictable bytes suffice.
        """
        victims: Victims = []
        while True:
            one = self.evict(1, protected)
            if one is None:
                return None
            victims += one
            if enough(*one[0]):
                return victims

    @property
    def declined(self) -> bool:
        """Whether the last `evict` or `evict_until` gave None because what would leave is worth more than what would
        come: waiting for room is of no use then. Only for requests that `may_be_declined`.
        """
        return False

    keeps_heads = False
    """Whether the policy itself sees to it that a block does not leave before what continues it. Of others a tier
    touches the blocks before each one that it stores.
    """

    def worth_writing(self, key: bytes) -> bool:
        """Asked of the SSD tier's policy before a block is written there: is it likely enough to be asked for again?"""
        return True

    def chunks(self) -> Iterator[tuple[bytes, ChunkStatus]]:
        """All resident keys with their chunks, least valuable first. Raises NotImplementedError where a
        policy cannot tell.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot list its chunks; define chunks() to switch or persist it"
        )

    def state(self) -> dict[str, object]:
        """What must survive a restart, as a value that msgpack can pack. `order` has the resident keys, least
        valuable first.
        """
        return {"order": [key for key, _ in self.chunks()]}

    def restore_state(self, state: Mapping[str, object], residents: Mapping[bytes, ChunkStatus]) -> None:
        """Replace the contents by `residents`, arranged as `state` (this policy's or another's) says.

        Keys of the state that are gone are skipped; residents that it does not know are taken as the most
        recent. Raises ValueError, with nothing changed, where the state has not the shape that `state` gives.
        """
        order = state_keys(state, "order")
        self.clear()
        for key in arrange(order, residents):
            self.insert(key, residents[key])


def state_keys(state: Mapping[str, object], field: str) -> list[bytes]:
    """The list of keys in `state[field]`; empty where it is absent; ValueError where it is anything else."""
    keys = state.get(field, [])
    if not isinstance(keys, list | tuple) or not all(isinstance(key, bytes) for key in keys):
        raise ValueError(
            f"policy state: {field!r} must be a list of keys (bytes); discard the state to start without it"
        )
    return list(keys)


def arrange(order: Iterable[bytes], residents: Mapping[bytes, ChunkStatus]) -> list[bytes]:
    """The resident keys as `order` has them, then those that it does not know, in the mapping's order."""
    known = dict.fromkeys(key for key in order if key in residents)
    known.update(dict.fromkeys(residents))
    return list(known)
