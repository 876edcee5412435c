"""A segment of shared memory goes while clients go."""

from __future__ import annotations

import asyncio

from omlxd.server import Server, ServerSettings
from omlxd.storage.arena import Arena, Segment
from omlxd.storage.ram import RamTier
from omlxd.storage.tiers import Store, StoreSettings

PAGE = 1 << 16


class Leaving:
    """A session that ends when it is told something, as one does whose client has gone."""

    def __init__(self, server: Server, number: int, told: list[int]) -> None:
        self._server, self._number, self._told = server, number, told

    def segment_dropped(self, segment: int) -> None:
        self._told.append(self._number)
        del self._server.sessions[self._number]


def test_all_are_told_and_none_in_the_middle_of_making_room() -> None:
    told: list[int] = []

    async def drop() -> None:
        arena = Arena(4 * PAGE, segment_bytes=PAGE)
        callbacks: list[Segment] = []
        arena.on_segment(lambda segment, added: None if added else callbacks.append(segment))
        store = Store(RamTier(arena), None, StoreSettings(), clock=lambda: 0.0)
        server = Server(store, ServerSettings(), on_shutdown=lambda: None)
        for number in (1, 2, 3):
            server.sessions[number] = Leaving(server, number, told)  # type: ignore[assignment]
        extent = arena.allocate(PAGE)
        assert extent is not None
        arena.free(extent)
        arena.release_empty()
        assert callbacks, "the segment has gone"
        assert told == []
        await asyncio.sleep(0)

    asyncio.run(drop())
    assert told == [1, 2, 3]
