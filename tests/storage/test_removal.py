"""What is removed while it is being written to the SSD is gone, there too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

from omlxd.storage import upkeep
from omlxd.storage.arena import Arena
from omlxd.storage.ram import RamTier
from omlxd.storage.ssd import CommitOutcome, SsdTier
from omlxd.storage.ssd_plan import CommitPlan
from omlxd.storage.ssd_records import EncodedBlock
from omlxd.storage.tiers import Store, StoreSettings, Where
from tests.storage.ssd_store import NAMESPACE, Clock, chain_of, open_tier

Removing = Callable[[Store, list[bytes]], Awaitable[object]]
SPACE = upkeep.Selection(frozenset([NAMESPACE]))
WAYS: dict[str, Removing] = {
    "by key": lambda store, keys: upkeep.remove(store, keys),
    "its namespace": lambda store, keys: upkeep.clear(store, SPACE),
    "all": lambda store, keys: upkeep.clear(store, upkeep.Selection()),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", ["encode", "commit"])
def test_a_block_that_is_removed_while_it_is_written_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, at: str
) -> None:
    metas = chain_of("x", [5000] * 3)
    keys = [meta.key for meta in metas]
    reached, go_on = threading.Event(), threading.Event()
    commit, encode = SsdTier.commit, SsdTier.encode

    def held_commit(tier: SsdTier, plan: CommitPlan) -> CommitOutcome:
        if at == "commit" and plan.blocks:
            reached.set()
            assert go_on.wait(30)
        return commit(tier, plan)

    def held_encode(tier: SsdTier, *block: object) -> EncodedBlock:
        if at == "encode":
            reached.set()
            assert go_on.wait(30)
        return encode(tier, *block)  # type: ignore[arg-type]

    monkeypatch.setattr(SsdTier, "commit", held_commit)
    monkeypatch.setattr(SsdTier, "encode", held_encode)

    async def work() -> None:
        store = Store(RamTier(Arena(1 << 20)), open_tier(tmp_path), StoreSettings(), clock=Clock())
        store.start()
        assert store.spiller is not None
        offer = await store.prepare_store("w", [], metas, block_tokens=64, timeout=0.0)
        store.complete_store("w", [one.reservation for one in offer.reserved], success=True)
        writing = asyncio.ensure_future(store.spiller.drain())
        await asyncio.get_running_loop().run_in_executor(None, reached.wait, 30)
        removing = asyncio.ensure_future(WAYS[way](store, keys))
        await asyncio.sleep(0)
        assert [store.where(key) for key in keys] == [Where.MISS] * 3
        go_on.set()
        await removing
        await writing
        assert [store.where(key) for key in keys] == [Where.MISS] * 3
        await store.stop()

    asyncio.run(work())
    with closing(open_tier(tmp_path)) as ssd:
        assert not ssd.entries
