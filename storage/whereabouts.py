"""Where blocks are, in all tiers. Looking changes nothing. Loop thread only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omlxd.storage.lower import Lowers
from omlxd.storage.where import Where

if TYPE_CHECKING:
    from omlxd.storage.ram import RamTier

_MISS, _PENDING, _RAM = int(Where.MISS), int(Where.PENDING), int(Where.RAM)


class Whereabouts:
    """Of every block of a store."""

    def __init__(self, ram: RamTier, lower: Lowers) -> None:
        self._ram = ram
        self._lower = lower

    def where(self, key: bytes) -> Where:
        """Where the block is. No effect on recency."""
        block = self._ram.blocks.get(key)
        if block is not None:
            if block.chunk.ref_cnt >= 0:
                return Where.RAM
            if not block.restoring:
                return Where.PENDING
        lower = self._lower.having(key)
        if lower is None:
            return Where.MISS if block is None else Where.SSD
        return lower.where

    def lookup(self, keys: Sequence[bytes], *, prefix: bool = False) -> bytes:
        """One byte of :class:`Where` for each key; with ``prefix`` it ends with the first miss."""
        get = self._ram.blocks.get
        tiers = [(lower.tier, int(lower.where)) for lower in self._lower]
        found: list[int] = []
        append = found.append
        for key in keys:
            block = get(key)
            if block is not None:
                if block.chunk.ref_cnt >= 0:
                    append(_RAM)
                    continue
                if not block.restoring:
                    append(_PENDING)
                    continue
            for tier, code in tiers:
                if key in tier:
                    append(code)
                    break
            else:
                append(_MISS)
                if prefix:
                    break
        return bytes(found)

    def nbytes_of(self, key: bytes) -> int | None:
        """Payload bytes of a block; None when it is in no tier, as far as is known."""
        block = self._ram.blocks.get(key)
        if block is not None:
            return block.meta.nbytes
        lower = self._lower.having(key)
        record = lower.tier.meta(key) if lower is not None else None
        return record.nbytes if record is not None else None
