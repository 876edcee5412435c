"""The eviction policy of a large store is arranged after the store can be used.

To put hundreds of thousands of records in their order takes longer than to find them, and nobody
needs the order before something has to leave. Until then a ``WarmingPolicy`` stands in: it notes what
happens, and the real policy is told afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from omlxd.policy.base import CachePolicy, ChunkStatus, RequestContext, Victims

WARM_AT_ONCE = 20_000
"""Records; fewer are put in order at the start, which takes some ten milliseconds."""


class WarmingPolicy(CachePolicy):
    """Notes everything, gives no victims. Loop thread, but for ``build``."""

    def __init__(self, build: Callable[[], CachePolicy]) -> None:
        super().__init__(0)
        self.build = build
        """Arranges the real policy from what was loaded. Slow, on any thread: it uses nothing that anybody changes."""
        self._notes: list[Callable[[CachePolicy], None]] = []

    def finish(self, built: CachePolicy) -> CachePolicy:
        """Tell ``built`` what happened meanwhile; returns it."""
        for note in self._notes:
            note(built)
        self._notes.clear()
        return built

    def get(self, key: bytes) -> ChunkStatus | None:
        """Not known yet."""
        return None

    def insert(self, key: bytes, chunk: ChunkStatus, req_context: RequestContext | None = None) -> None:
        """Noted."""
        self._notes.append(lambda policy: policy.insert(key, chunk, req_context))

    def remove(self, key: bytes) -> None:
        """Noted."""
        self._notes.append(lambda policy: policy.remove(key))

    def touch(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> None:
        """Noted."""
        self._notes.append(lambda policy: policy.touch(keys, ctx))

    def evict(self, n: int, protected: Collection[bytes]) -> Victims | None:
        """Nothing, as far as is known."""
        return None if n else []

    def clear(self) -> None:
        """Noted."""
        self._notes = [lambda policy: policy.clear()]
