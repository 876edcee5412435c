"""What changes in the store, told to whoever listens: enough to keep an index of it elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from omlxd.storage.blocks import Described

Event = Literal["stored", "spilled", "removed"]
Tier = Literal["ram", "ssd"]


@dataclass(frozen=True, slots=True)
class StoreChange:
    """One change. ``stored``: readable in RAM, new; ``spilled``: on the SSD too; ``removed``: gone from one tier."""

    event: Event
    tier: Tier
    key: bytes
    namespace: bytes
    nbytes: int
    parent: bytes | None
    position: int
    cause: str
    """Of a removal: ``evicted``, ``removed``, ``cleared``, ``damaged``, ..."""
    gone: bool
    """Is the block in neither tier now?"""


Listener = Callable[[StoreChange], None]


class Journal:
    """Tells its listeners; costs next to nothing while there are none."""

    def __init__(self, elsewhere: Callable[[bytes, Tier], bool]) -> None:
        """``elsewhere(key, tier)``: is the block in the tier that is not ``tier``?"""
        self.listeners: list[Listener] = []
        self._elsewhere = elsewhere

    def tell(self, event: Event, tier: Tier, block: Described, cause: str = "") -> None:
        """Something happened to ``block`` in ``tier``."""
        if not self.listeners:
            return
        gone = event == "removed" and not self._elsewhere(block.key, tier)
        change = StoreChange(
            event, tier, block.key, block.namespace, block.nbytes, block.parent, block.position, cause, gone
        )
        for listener in list(self.listeners):
            listener(change)
