"""Looking into the store and removing from it, on behalf of an operator. Runs on the event loop's thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omlxd.storage.ram import RamBlock
    from omlxd.storage.ssd_index import Entry
    from omlxd.storage.tiers import Store


@dataclass(frozen=True, slots=True)
class Cleared:
    """What a removal took away; a block that was in both tiers counts in both. Bytes are payload bytes."""

    ram_blocks: int = 0
    ram_bytes: int = 0
    ssd_blocks: int = 0
    ssd_bytes: int = 0


def forget_in_ram(store: Store, block: RamBlock, cause: str) -> None:
    """Make a RAM block a miss, dirty or not, leased or not."""
    dirty = store.spiller is not None and store.spiller.forget(block)
    store.ram.detach(block, cause)
    if dirty:
        store.ram.complete_read(block)  # the writer's pin


def drop_clean(store: Store, namespace: bytes) -> int:
    """Let go of a namespace's RAM blocks that are on the SSD too and that nobody reads; how many went."""
    clean = [
        block
        for block in store.ram.blocks.values()
        if block.meta.namespace == namespace and block.clean and block.chunk.ref_cnt == 0
    ]
    for block in clean:
        forget_in_ram(store, block, "retired")
    store.progress()
    return len(clean)


async def remove(store: Store, keys: Sequence[bytes]) -> int:
    """Remove blocks by key from all tiers; how many were there. What an outer tier has goes in the background."""
    store.outer.forget(keys)
    found = set()
    for key in keys:
        block = store.ram.blocks.get(key)
        if block is not None:
            forget_in_ram(store, block, "removed")
            found.add(key)
    if store.ssd is not None:
        entries = [entry for key in keys if (entry := store.ssd.meta(key)) is not None]
        for entry in entries:
            store.journal.tell("removed", "ssd", entry, "removed")
        found.update(entry.key for entry in entries)
        store.ssd.discard(keys, "removed")  # those that are being written, too
        await store.settle_ssd()
    store.progress()
    return len(found)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which blocks; the default is all."""

    namespaces: frozenset[bytes] | None = None
    """Ids; None: of every namespace."""
    unused_for: float | None = None
    """Seconds since the last use: in RAM as the store has seen it, else since it was written to the SSD."""

    @property
    def is_all(self) -> bool:
        """Does it leave nothing out?"""
        return self.namespaces is None and self.unused_for is None

    def has(self, namespace: bytes) -> bool:
        """Is the namespace one of those?"""
        return self.namespaces is None or namespace in self.namespaces


async def clear(store: Store, selection: Selection, tier: str = "all") -> Cleared:
    """Remove the selected blocks; ``tier``: ``all``, ``ram`` or ``ssd``.

    ``ram`` first writes what is dirty, so that nothing is lost; the memory goes back to the system.
    """
    ram_blocks = ram_bytes = ssd_blocks = ssd_bytes = 0
    if tier == "ram" and store.spiller is not None:
        await store.spiller.drain()
    on_ssd = await _selected_on_ssd(store, selection) if tier != "ram" else []
    forgotten: list[bytes] = []
    if tier in ("all", "ram"):
        now = store.now()
        for block in list(store.ram.blocks.values()):
            recent = selection.unused_for is not None and now - block.used < selection.unused_for
            if selection.has(block.meta.namespace) and not recent:
                ram_blocks += 1
                ram_bytes += block.meta.nbytes
                forget_in_ram(store, block, "cleared")
                forgotten.append(block.meta.key)
        store.ram.arena.release_empty()
        store.ram.arena.trim()
    if tier in ("all", "ssd") and store.ssd is not None:
        for entry in on_ssd:
            ssd_blocks += 1
            ssd_bytes += entry.nbytes
            store.journal.tell("removed", "ssd", entry, "cleared")
        if selection.is_all:
            store.ssd.clear(None)
        else:
            being_written = forgotten if tier == "all" else []
            store.ssd.discard([*(entry.key for entry in on_ssd), *being_written], "cleared")
        for entry in on_ssd:
            _only_in_ram(store, entry.key)
        await store.settle_ssd()
    store.progress()
    return Cleared(ram_blocks, ram_bytes, ssd_blocks, ssd_bytes)


async def _selected_on_ssd(store: Store, selection: Selection) -> list[Entry]:
    ssd = store.ssd
    if ssd is None:
        return []
    entries = [entry for entry in ssd.entries.values() if selection.has(entry.namespace)]
    if selection.unused_for is None:
        return entries
    now = store.now()
    used = {key: block.used for key, block in store.ram.blocks.items() if block.used}
    entries.sort(key=lambda entry: entry.chunk_id)
    keys = [entry.key for entry in entries if entry.key not in used]
    when = time.time() - selection.unused_for
    old = set(await asyncio.get_running_loop().run_in_executor(None, ssd.stored_before, keys, when))
    old.update(key for key, at in used.items() if now - at >= selection.unused_for)
    return [entry for entry in entries if entry.key in old and entry.key in ssd]


def _only_in_ram(store: Store, key: bytes) -> None:
    """A block has gone from the SSD: one that is still in RAM is dirty again."""
    block = store.ram.blocks.get(key)
    if block is not None:
        block.clean = False
        if store.spiller is not None and block.chunk.ref_cnt >= 0:
            store.spiller.add(block)


def listing(
    store: Store, *, namespaces: frozenset[bytes] | None, tier: str, prefix: str, limit: int
) -> tuple[list[dict[str, object]], int]:
    """Rows for blocks, and how many there are in all; only the first ``limit`` are built."""
    rows: list[dict[str, object]] = []
    total = 0
    ssd_keys = store.ssd.entries if store.ssd is not None and tier != "ram" else ()
    ram_keys = store.ram.blocks if tier != "ssd" else {}
    for key in (*ram_keys, *(key for key in ssd_keys if key not in ram_keys)):
        if prefix and not key.hex().startswith(prefix):
            continue
        row = describe(store, key)
        if row is None or (namespaces is not None and row["namespace"] not in namespaces):
            continue
        total += 1
        if len(rows) < limit:
            rows.append(row)
    return rows, total


def describe(store: Store, key: bytes) -> dict[str, object] | None:
    """What is known of one block; None when it is neither in RAM nor on the SSD."""
    block = store.ram.blocks.get(key)
    record = store.ssd.meta(key) if store.ssd is not None else None
    if block is None and record is None:
        return None
    meta = block.meta if block is not None else record
    assert meta is not None
    row: dict[str, object] = {
        "key": key,
        "namespace": meta.namespace,
        "bytes": meta.nbytes,
        "parent": meta.parent,
        "position": meta.position,
        "ram": block is not None,
        "ssd": record is not None,
    }
    if store.outer.tiers:
        row["remote"] = any(key in tier for tier in store.outer.tiers)
    if block is not None:
        row["ref_cnt"] = block.chunk.ref_cnt
        row["chunk_id"] = block.chunk.chunk_id
        row["dirty"] = not block.clean and block.chunk.ref_cnt >= 0 and store.ssd is not None
    if record is not None:
        row["stored_bytes"] = record.stored_bytes
    return row
