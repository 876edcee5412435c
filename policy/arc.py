"""ARC, as engines drive it for KV blocks.

Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003), with these differences: a
key that was a ghost enters T1 and not T2; ghosts stay until the insertion, so that a failed store leaves the
adaptation and the ghost; each ghost list is trimmed to the capacity by itself; eviction takes a batch, all or
nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import isfinite

from omlxd.policy.base import CachePolicy, ChunkStatus, RequestContext, Victims, arrange, order_request_keys, state_keys


class ARCCachePolicy(CachePolicy):
    """`t1`: seen once, `t2`: seen again (LRU to MRU); `b1`, `b2`: the ghosts of each; `target_t1_size`: how
    long T1 should be, in chunks.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.t1: OrderedDict[bytes, ChunkStatus] = OrderedDict()
        self.t2: OrderedDict[bytes, ChunkStatus] = OrderedDict()
        self.b1: OrderedDict[bytes, None] = OrderedDict()
        self.b2: OrderedDict[bytes, None] = OrderedDict()
        self.target_t1_size: float = 0.0

    def get(self, key: bytes) -> ChunkStatus | None:
        """The chunk of `key`, or None."""
        chunk = self.t1.get(key)
        return chunk if chunk is not None else self.t2.get(key)

    def insert(self, key: bytes, chunk: ChunkStatus, req_context: RequestContext | None = None) -> None:
        """Enter at T1's MRU end, on a ghost hit too, and drop the ghost."""
        self.t1[key] = chunk
        if key in self.b1:
            del self.b1[key]
        if key in self.b2:
            del self.b2[key]

    def remove(self, key: bytes) -> None:
        """Forget `key`; an unknown one is ignored."""
        if self.t1.pop(key, None) is None:
            self.t2.pop(key, None)

    def touch(self, keys: Iterable[bytes], ctx: RequestContext | None = None) -> None:
        """Ready in T1: to T2. Pending in T1: to its MRU end. In T2: to its MRU end. Else a ghost hit, where
        it is a ghost.
        """
        t1, t2 = self.t1, self.t2
        for key in reversed(list(keys)):
            chunk = t1.get(key)
            if chunk is not None:
                if chunk.ref_cnt >= 0:
                    del t1[key]
                    t2[key] = chunk
                else:
                    t1.move_to_end(key)
            elif key in t2:
                t2.move_to_end(key)
            elif key in self.b1:
                self._grow_t1(key)
            elif key in self.b2:
                self._shrink_t1(key)

    def _grow_t1(self, key: bytes) -> None:
        step = max(1.0, len(self.b2) / len(self.b1))
        self.target_t1_size = min(self.target_t1_size + step, float(self.cache_capacity))
        self.b1.move_to_end(key)

    def _shrink_t1(self, key: bytes) -> None:
        step = max(1.0, len(self.b1) / len(self.b2))
        self.target_t1_size = max(self.target_t1_size - step, 0.0)
        self.b2.move_to_end(key)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: Collection[bytes],
        reused_keys: Collection[bytes],
        ctx: RequestContext | None = None,
    ) -> None:
        """Inserted keys become recent where they are, reused ones go to T2, those that were only seen pending
        stay.
        """
        t1, t2 = self.t1, self.t2
        for key in reversed(order_request_keys(key_groups, ctx)):
            if key in insertion_only_keys:
                if key in t1:
                    t1.move_to_end(key)
                elif key in t2:
                    t2.move_to_end(key)
            elif key in reused_keys:
                chunk = t1.pop(key, None)
                if chunk is not None:
                    t2[key] = chunk
                elif key in t2:
                    t2.move_to_end(key)

    def evict(self, n: int, protected: Collection[bytes]) -> Victims | None:
        """`n` victims and their ghosts, or None and nothing changed."""
        return self._evict(n, None, protected)

    def evict_until(self, enough: Callable[[bytes, ChunkStatus], bool], protected: Collection[bytes]) -> Victims | None:
        """Victims until `enough`, or None and nothing changed."""
        return self._evict(len(self.t1) + len(self.t2), enough, protected)

    def _evict(
        self, n: int, enough: Callable[[bytes, ChunkStatus], bool] | None, protected: Collection[bytes]
    ) -> Victims | None:
        """Choose up to `n` victims; commit when `n` were found, or with `enough` only when it was satisfied."""
        # Each list is walked once: an entry that was passed over as pinned or protected is not looked at
        # again in this call.
        from_t1 = _eligible(self.t1, protected)
        from_t2 = _eligible(self.t2, protected)
        t1_size = len(self.t1)
        target = int(self.target_t1_size)
        victims: Victims = []
        t1_victims: list[bytes] = []
        t2_victims: list[bytes] = []
        satisfied = enough is None
        while len(victims) < n:
            victim = next(from_t1, None) if t1_size >= target else None
            took_t1 = victim is not None
            if victim is None:
                victim = next(from_t2, None)
            if victim is None:
                victim = next(from_t1, None)
                took_t1 = True
            if victim is None:
                return None
            if took_t1:
                t1_size -= 1
                t1_victims.append(victim[0])
            else:
                t2_victims.append(victim[0])
            victims.append(victim)
            if enough is not None and enough(*victim):
                satisfied = True
                break
        if not satisfied:
            return None
        self._to_ghosts(self.t1, t1_victims, self.b1)
        self._to_ghosts(self.t2, t2_victims, self.b2)
        return victims

    def _to_ghosts(
        self, residents: OrderedDict[bytes, ChunkStatus], victims: list[bytes], ghosts: OrderedDict[bytes, None]
    ) -> None:
        for key in victims:
            del residents[key]
            ghosts[key] = None
        for _ in range(len(ghosts) - self.cache_capacity):
            ghosts.popitem(last=False)

    def clear(self) -> None:
        """Drop all chunks and ghosts; the target goes back to 0."""
        for entries in (self.t1, self.t2):
            entries.clear()
        for ghosts in (self.b1, self.b2):
            ghosts.clear()
        self.target_t1_size = 0.0

    def chunks(self) -> Iterator[tuple[bytes, ChunkStatus]]:
        """T1 and then T2, each from LRU to MRU."""
        yield from self.t1.items()
        yield from self.t2.items()

    def state(self) -> dict[str, object]:
        """The four lists and the target. `order` is T1 and T2 in one list, of which the first `t1` keys are
        T1.
        """
        return {
            "order": [*self.t1, *self.t2],
            "t1": len(self.t1),
            "b1": list(self.b1),
            "b2": list(self.b2),
            "target": self.target_t1_size,
        }

    def restore_state(self, state: Mapping[str, object], residents: Mapping[bytes, ChunkStatus]) -> None:
        """As the base class says; a state of another policy fills T1."""
        order = state_keys(state, "order")
        ghosts = state_keys(state, "b1"), state_keys(state, "b2")
        split, target = state.get("t1", len(order)), state.get("target", 0.0)
        if not isinstance(split, int) or not isinstance(target, int | float) or not isfinite(target):
            raise ValueError(f"policy state: t1={split!r} and target={target!r} are no numbers; discard the state")
        if not 0 <= split <= len(order):
            raise ValueError(f"policy state: T1 cannot have {split} of {len(order)} keys; discard the state")
        self.clear()
        second = set(order[split:])
        for key in arrange(order, residents):
            (self.t2 if key in second else self.t1)[key] = residents[key]
        for keys, into in zip(ghosts, (self.b1, self.b2), strict=True):
            fresh = [key for key in keys if key not in residents and key not in self.b1]
            into.update(dict.fromkeys(fresh[-self.cache_capacity :] if self.cache_capacity else ()))
        self.target_t1_size = min(max(float(target), 0.0), float(self.cache_capacity))


def _eligible(
    entries: OrderedDict[bytes, ChunkStatus], protected: Collection[bytes]
) -> Iterator[tuple[bytes, ChunkStatus]]:
    for entry in entries.items():
        if entry[1].ref_cnt == 0 and entry[0] not in protected:
            yield entry
