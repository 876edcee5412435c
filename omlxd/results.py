"""What the client answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest prefix of a prompt that can be restored now. Nothing is held for it: only a lease holds blocks."""

    tokens: int
    """How many tokens it covers: ``blocks`` times the block size."""
    blocks: int
    """How many blocks, head to tail."""
    ram: int
    """Of these, in shared memory."""
    ssd: int
    """Of these, on the SSD or on their way from it."""
    pending: int
    """Blocks right behind the prefix that another engine is storing at this moment."""
    remote: int = 0
    """Of ``blocks``, on another machine or on their way from it."""

    def __bool__(self) -> bool:
        return self.blocks > 0


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What became of the blocks that were offered, in blocks."""

    stored: int
    """New in the cache, readable by everybody."""
    present: int
    """Were already there."""
    declined: Mapping[str, int] = field(default_factory=dict)
    """Not taken, by reason (``pending``: another engine is storing the same block; ``no_room``; ``ssd_behind``;
    ``too_large``; ...)."""
    nbytes: int = 0
    """Payload bytes of the stored ones."""

    @property
    def complete(self) -> bool:
        """Is every block that was offered in the cache, or about to be?"""
        return all(reason == "pending" for reason in self.declined)
