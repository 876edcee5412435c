"""What is on the SSD, to be looked at: records, namespaces, numbers. Loop thread only; nothing here touches the disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from omlxd.storage.ssd_index import Entry, SpaceTotals
from omlxd.storage.ssd_plan import Forecast, State

if TYPE_CHECKING:
    from omlxd.storage.ssd_ledger import Ledger
    from omlxd.storage.ssd_reader import Reader


class SsdContents:
    """The part of ``SsdTier`` that changes nothing."""

    counts: Counter[str]
    """Since the start, by what happened: ``evicted``, ``damaged``, ``declined_<reason>``, ``written_bytes``, ..."""
    lifetime: Counter[str]
    """As ``counts``, of all owners of this store until this one."""
    state: State
    reason: str
    """Why ``state`` is not ``ok``; empty when it is."""
    aside: str
    """Why a former store was moved aside; empty when none was."""
    _ledger: Ledger
    _reader: Reader

    # -- records

    def __contains__(self, key: bytes) -> bool:
        """Loop. Whether a restore of ``key`` may be tried."""
        return key in self._ledger.index.entries and self.state != "gone"

    def __len__(self) -> int:
        """Loop. Number of records."""
        return len(self._ledger.index.entries)

    def meta(self, key: bytes) -> Entry | None:
        """Loop. A record, read-only: ``namespace, nbytes, stored_bytes, parent, position, layout, ref_cnt``; or None."""
        return self._ledger.index.entries.get(key)

    @property
    def entries(self) -> Mapping[bytes, Entry]:
        """Loop. All records by key, read-only."""
        return self._ledger.index.entries

    def chain(self, key: bytes) -> list[bytes]:
        """Loop. The keys from the head of ``key``'s chain (or from where it is broken) to ``key``; empty when it is not here."""
        entry = self._ledger.index.entries.get(key)
        if entry is None:
            return []
        return [*reversed([found.key for found in self._ledger.index.ancestors(entry)]), key]

    # -- namespaces

    def namespaces(self) -> list[SpaceTotals]:
        """Loop. Every namespace that was registered or has blocks, with its exact totals; read-only."""
        return list(self._ledger.index.spaces.values())

    def totals(self, namespace: bytes) -> SpaceTotals | None:
        """Loop. A namespace's totals, read-only; None for one that was never registered and has no blocks."""
        return self._ledger.index.spaces.get(namespace)

    # -- what may be done

    @property
    def writable(self) -> bool:
        """Loop. Whether a spill may be tried now."""
        return self.state == "ok"

    @property
    def group_bytes(self) -> int:
        """Loop. Stored bytes that one plan should carry; more of them need further transactions at the limit."""
        return self._ledger.room.group_bytes

    @property
    def has_chores(self) -> bool:
        """Loop. Whether ``plan([])`` has something to do: discarded records, a lowered limit, uses to write down."""
        return self.writable and self._ledger.has_chores

    def forecast(self) -> Forecast:
        """Loop. Which records would leave for the limit as it is, and how much disk that would give back."""
        return self._ledger.forecast()

    # -- numbers

    @property
    def used_bytes(self) -> int:
        """Loop. What the store's directory takes on the disk, all files together, as ``du`` counts it."""
        return self._ledger.room.allocated_bytes + self._ledger.room.other_bytes

    @property
    def file_bytes(self) -> int:
        """Loop. What the data file takes on the disk."""
        return self._ledger.room.allocated_bytes

    @property
    def live_bytes(self) -> int:
        """Loop. What of it is in use, trees included."""
        return self._ledger.room.pages.live * self._ledger.room.page_bytes

    @property
    def free_bytes(self) -> int:
        """Loop. Bytes free on the volume, as last seen."""
        return self._ledger.room.free_bytes

    @property
    def over_limit_bytes(self) -> int:
        """Loop. What has to leave for the limit as it is; 0 when nothing has to."""
        return self._ledger.room.over_pages * self._ledger.room.page_bytes

    def stats(self) -> dict[str, object]:
        """Loop. Numbers for ``status`` and metrics; sizes in bytes."""
        index, room = self._ledger.index, self._ledger.room
        page_bytes = room.page_bytes
        return {
            "state": self.state,
            "reason": self.reason,
            "aside": self.aside,
            "blocks": len(index.entries),
            "payload_bytes": index.nbytes,
            "stored_bytes": index.stored_bytes,
            "used_bytes": self.used_bytes,
            "limit": room.limit,
            "min_free": room.min_free,
            "allowed_bytes": room.allowed_bytes + room.other_bytes,
            "live_bytes": self.live_bytes,
            "free_page_bytes": (room.pages.total - room.pages.live) * page_bytes,
            "other_bytes": room.other_bytes,
            "over_limit_bytes": self.over_limit_bytes,
            "pinned_bytes": index.pinned_pages * page_bytes,
            "waiting_for_parent": sum(len(children) for children in index.waiting.values()),
            "read_bytes_per_second": self._reader.rate,
            "margin": room.margin,
            "counts": dict(self.counts),
            "lifetime": dict(self.lifetime),
        }
