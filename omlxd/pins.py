"""Blocks that an operator wants to stay in RAM for a while: leases that the daemon itself holds.

A pin is all or nothing: a chain from its head to the named block, since a block without what comes before it is of no
use. All pins together may hold half of the RAM tier, each ends by itself.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from omlxd.protocol import Code, RequestError
from omlxd.storage.loads import Load, Part
from omlxd.storage.sizes import format_size
from omlxd.storage.tiers import Store

BUDGET_SHARE = 0.5
MAX_TTL_SECONDS = 30 * 86_400.0
LOAD_SECONDS = 60.0


@dataclass(slots=True)
class Pin:
    """One pinned chain."""

    id: int
    load: Load
    until: float
    """On the store's clock."""
    timer: asyncio.TimerHandle

    def owns(self, key: bytes) -> bool:
        """Is ``key`` one of its blocks?"""
        return key in self.load.keys


class Pins:
    """All of them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pins: dict[int, Pin] = {}
        self._ids = itertools.count(1)

    @property
    def nbytes(self) -> int:
        """Payload bytes that are pinned."""
        return sum(pin.load.nbytes for pin in self._pins.values())

    async def pin(self, key: bytes, ttl: float) -> Pin:
        """Hold the chain that ends with ``key`` for ``ttl`` seconds; from the SSD where it has to come from there.

        Raises RequestError: no such block, a part of its chain missing, over the budget.
        """
        keys = chain_to(self._store, key)
        asked = sum(self._store.nbytes_of(one) or 0 for one in keys)
        budget = int(self._store.ram.arena.budget * BUDGET_SHARE)
        if self.nbytes + asked > budget:
            raise RequestError(
                Code.REFUSED,
                f"{format_size(asked)} more would make {format_size(self.nbytes + asked)} pinned; "
                f"at most {format_size(budget)} of the RAM tier may be: unpin something, or wait",
            )
        number = next(self._ids)
        owner = ("pin", number)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def emit(part: Part) -> None:
            if part.last and not done.done():
                done.set_result(None)

        load = self._store.load(owner, keys, block_tokens=1, timeout=LOAD_SECONDS, emit=emit, counted=False)
        try:
            await done
        except asyncio.CancelledError:
            self._store.owner_gone(owner, may_still_write=False)
            raise
        if len(load.blocks) < len(keys):
            self._store.owner_gone(owner, may_still_write=False)
            raise RequestError(
                Code.REFUSED, f"block {len(load.blocks)} of {len(keys)} cannot be had in RAM now: {load.stopped}"
            )
        timer = asyncio.get_running_loop().call_later(ttl, self._end, number)
        self._pins[number] = Pin(number, load, self._store.now() + ttl, timer)
        return self._pins[number]

    def unpin(self, key: bytes | None) -> int:
        """End the pins that hold ``key`` (None: all); how many there were."""
        found = [number for number, pin in self._pins.items() if key is None or pin.owns(key)]
        for number in found:
            self._end(number)
        return len(found)

    def holding(self) -> Counter[bytes]:
        """How many pins hold each block, by key."""
        return Counter(key for pin in self._pins.values() for key in pin.load.keys)

    def sweep(self) -> None:
        """End pins whose blocks have all been removed meanwhile: they would only keep memory."""
        for number, pin in list(self._pins.items()):
            if all(block.detached for block in pin.load.blocks):
                self._end(number)

    def rows(self) -> list[dict[str, object]]:
        """For ``stats``."""
        now = self._store.now()
        return [
            {
                "pin": pin.id,
                "key": pin.load.keys[-1],
                "blocks": len(pin.load.blocks),
                "bytes": pin.load.nbytes,
                "seconds_left": max(0.0, pin.until - now),
            }
            for pin in self._pins.values()
        ]

    def _end(self, number: int) -> None:
        pin = self._pins.pop(number)
        pin.timer.cancel()
        self._store.owner_gone(("pin", number), may_still_write=False)


def chain_to(store: Store, key: bytes) -> Sequence[bytes]:
    """The keys from the head of the chain to ``key``. RequestError when one is in neither tier."""
    chain: list[bytes] = []
    wanted: bytes | None = key
    while wanted is not None:
        block = store.ram.blocks.get(wanted)
        meta = block.meta if block is not None else store.ssd.meta(wanted) if store.ssd is not None else None
        if meta is None:
            what = "no such block" if not chain else f"its chain is broken: {wanted.hex()[:16]} is in neither tier"
            raise RequestError(Code.NOT_FOUND, f"{key.hex()[:16]}: {what}")
        chain.append(wanted)
        wanted = meta.parent
    chain.reverse()
    return chain
