"""Where a block can be."""

from __future__ import annotations

from enum import IntEnum


class Where(IntEnum):
    """Where a block is. The numbers are the protocol's."""

    MISS = 0
    PENDING = 1
    """Being stored by an engine at this moment."""
    RAM = 2
    SSD = 3
    """On the SSD, or on its way from it."""
    REMOTE = 4
    """On another machine, as far as is known, or on its way from it."""
