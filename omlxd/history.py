"""What became of blocks that are not here any more: enough to answer "why was my prompt computed again?"."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from omlxd.storage.journal import Journal, StoreChange

REMEMBERED = 65_536
"""Blocks that are remembered, about 15 MB; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class Departure:
    """Why a block is not here."""

    kind: Literal["gone", "refused"]
    """It was here and left; or it was offered and not taken."""
    cause: str
    """``evicted``, ``removed``, ``cleared``, ``damaged``, ...; of a refusal the reason that the engine was given."""
    at: float
    """Seconds since the epoch."""


class History:
    """Remembers the last departures, by key. Lives on the event loop's thread."""

    def __init__(self, journal: Journal, *, most: int = REMEMBERED, clock: Callable[[], float] = time.time) -> None:
        self._departures: OrderedDict[bytes, Departure] = OrderedDict()
        self._most = most
        self._clock = clock
        journal.listeners.append(self._changed)

    def __len__(self) -> int:
        return len(self._departures)

    def get(self, key: bytes) -> Departure | None:
        """Why it is not here; None when that is not known."""
        return self._departures.get(key)

    def refused(self, keys: Iterable[bytes], reason: str) -> None:
        """These were offered and not taken."""
        for key in keys:
            self._remember(key, Departure("refused", reason, self._clock()))

    def _changed(self, change: StoreChange) -> None:
        if change.event == "stored":
            self._departures.pop(change.key, None)
        elif change.event == "removed" and change.gone:
            self._remember(change.key, Departure("gone", change.cause, self._clock()))

    def _remember(self, key: bytes, departure: Departure) -> None:
        self._departures.pop(key, None)
        self._departures[key] = departure
        if len(self._departures) > self._most:
            self._departures.popitem(last=False)
