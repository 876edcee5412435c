"""Blocks written to the SSD over blocks served from it: a trace through the real store, once for each write mode.

RAM tier, SSD tier, spilling, eviction and restores are the daemon's own; payloads are small (a page), time is the trace's.
RAM has room for 2 % of the trace's distinct blocks and the SSD for 25 %, as a machine with 16 and 200 GB would have.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from itertools import islice
from pathlib import Path

from omlxd.lab.traces import Trace, read_trace
from omlxd.storage.arena import Arena
from omlxd.storage.blocks import BlockMeta, block_key
from omlxd.storage.loads import Part
from omlxd.storage.ram import RamTier
from omlxd.storage.spill import SpillSettings, WriteMode
from omlxd.storage.ssd import MIN_LIMIT, SsdTier
from omlxd.storage.tiers import Store, StoreSettings

NBYTES = 4096
RECORD_BYTES = 4 * NBYTES
"""What a record of so little payload takes on the SSD with its share of the trees, about."""
NAMESPACE = b"w" * 32
PATIENCE = 60.0


def trace_file(given: Path | None) -> Path:
    """The conversation trace: as given, or in ``$OMLXD_TRACES``. FileNotFoundError says what is missing."""
    folder = os.environ.get("OMLXD_TRACES")
    if given is None and not folder:
        raise FileNotFoundError(
            "written_per_served needs the trace mooncake_conversation.jsonl.gz: set OMLXD_TRACES to its folder, or "
            "give --trace FILE (or leave it out: --only restore,spill,ram,durability,churn,open)"
        )
    file = given if given is not None else Path(str(folder)) / "mooncake_conversation.jsonl.gz"
    if not file.exists():
        raise FileNotFoundError(f"the trace {file} is not there: set OMLXD_TRACES to its folder, or give --trace FILE")
    return file


def wear(directory: Path, file: Path, requests: int) -> dict[str, object]:
    """The figures of all modes, for so many requests of the trace from its beginning."""
    whole = read_trace(file)
    trace = Trace(whole.name, whole.block_tokens, list(islice(whole.requests, requests)))
    written: dict[str, float] = {}
    served: dict[str, float] = {}
    for mode in WriteMode:
        one = asyncio.run(_Replay(directory / mode.value, trace, mode).run())
        written[mode.value] = one["written"] / max(1, one["from_ssd"])
        served[mode.value] = one["from_ssd"] / one["asked"]
    return {
        "written_per_served": written,
        "served_from_ssd": served,
        "wear_requests": len(trace.requests),
        "wear_blocks": trace.distinct_blocks,
    }


class _Replay:
    def __init__(self, path: Path, trace: Trace, mode: WriteMode) -> None:
        blocks = trace.distinct_blocks
        self._trace = trace
        self._now = 0.0
        ram = max(64, blocks // 50) * NBYTES
        spill = SpillSettings(mode=mode, max_dirty_bytes=ram // 4, group_bytes=ram // 16)
        ssd = SsdTier.open(
            path,
            limit=max(MIN_LIMIT, blocks // 4 * RECORD_BYTES),
            min_free=0,
            durability="none",
            codec="raw",
            clock=lambda: self._now,
            free_space=lambda where: shutil.disk_usage(where).free,
        )
        arena = Arena(ram, segment_bytes=ram)
        self._store = Store(
            RamTier(arena, "lru"), ssd, StoreSettings(spill=spill, max_reserved_bytes=ram // 2), clock=lambda: self._now
        )

    async def run(self) -> dict[str, int]:
        store = self._store
        store.start()
        asked = 0
        for request in self._trace.requests:
            self._now = request.t_ms / 1e3
            asked += len(request.blocks)
            await self._request([block_key(block.to_bytes(32, "big")) for block in request.blocks])
        found = {
            "asked": asked,
            "written": store.spiller.counts["spilled"] if store.spiller is not None else 0,
            "from_ssd": store.counts[NAMESPACE, "hits_ssd"],
        }
        await store.stop()
        return found

    async def _request(self, keys: list[bytes]) -> None:
        """Load what there is, store the rest."""
        store, owner = self._store, object()
        filled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def emit(part: Part) -> None:
            if part.last and not filled.done():
                filled.set_result(None)

        load = store.load(
            owner, keys, block_tokens=self._trace.block_tokens, timeout=PATIENCE, emit=emit, misses_of=NAMESPACE
        )
        await filled
        have = len(load.blocks)
        store.release(owner, load.id)
        metas = [
            BlockMeta(key, NAMESPACE, NBYTES, keys[at - 1] if at else None, at)
            for at, key in enumerate(keys[have:], have)
        ]
        while metas:
            offer = await store.prepare_store(
                owner, keys[: metas[0].position], metas, block_tokens=self._trace.block_tokens, timeout=PATIENCE
            )
            store.complete_store(owner, [one.reservation for one in offer.reserved], success=True)
            done = len(offer.reserved) + offer.present
            if not done:
                break
            metas = metas[done:]
        store.owner_gone(owner, may_still_write=False)
