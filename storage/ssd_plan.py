"""What the loop thread asks of the writer's thread, and what it is told afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from omlxd.policy.base import CachePolicy
from omlxd.storage.ssd_index import Entry
from omlxd.storage.ssd_records import EncodedBlock, Record
from omlxd.storage.ssd_space import Pages

State = Literal["ok", "read-only", "gone", "full"]


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A damaged record, on its way to the ``quarantine`` database."""

    key: bytes
    reason: str
    stored_bytes: int
    at: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """One commit. Made on the loop thread, carried out on the writer's, applied on the loop thread again."""

    blocks: tuple[tuple[EncodedBlock, Record], ...]
    victims: tuple[Entry, ...]
    """Taken from the index for room; they come back when the commit fails."""
    doomed: tuple[Entry, ...]
    """Records that were discarded, whatever becomes of this commit."""
    quarantined: tuple[Quarantined, ...]
    descriptors: Mapping[bytes, Mapping[str, object]]
    """Namespaces to be written down, by id."""
    space_numbers: Mapping[bytes, int]
    recency: bytes
    """Record numbers, little-endian 64-bit words, in the order of use."""
    map_bytes: int
    """How far the file may grow, for LMDB."""
    allowed_bytes: int
    """What the file may take on the disk."""
    min_free: int
    """What must stay free on the volume."""
    need_pages: int
    evict_first: bool
    """The room must be freed by a transaction of its own before the blocks fit."""
    give_back: bool
    """Return free pages to the file system afterwards."""
    start_over: bool
    """Begin with an empty file first."""
    next_number: int
    declined: tuple[tuple[bytes, str], ...] = ()
    """Offered blocks that this plan leaves out: (key, "present" | "share" | "too_large" | "no_room" | "over_limit")."""

    @property
    def victim_keys(self) -> list[bytes]:
        """The victims' keys, in victim order."""
        return [entry.key for entry in self.victims]


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """What became of a plan."""

    stored: bool
    """The blocks are on the SSD."""
    removed: bool
    """Victims and doomed records are gone from it."""
    state: State = "ok"
    reason: str = ""
    """Why something failed; empty otherwise."""
    map_full: int = 0
    """How often LMDB had no room where the plan expected some."""
    pages: Pages | None = None
    allocated_bytes: int | None = None
    free_bytes: int | None = None
    written_bytes: int = 0
    returned_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """What would leave now (``gc --dry-run``). Sizes in bytes."""

    blocks: int
    stored_bytes: int
    by_namespace: Mapping[bytes, int]
    """Stored bytes."""
    returned_bytes: int
    """What would go back to the file system."""


@dataclass(frozen=True, slots=True)
class Health:
    """What a look at the disk showed (``SsdTier.probe``)."""

    state: State
    reason: str = ""
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    other_bytes: int | None = None
    pages: Pages | None = None
    synced: bool = False
    """What was committed before is durable now, where commits are not by themselves."""
    loaded: object = field(default=None, repr=False)
    """A store that was found again (``ssd_load.Opened``)."""
    policy: CachePolicy | None = field(default=None, repr=False)
    """The policy of a large store, arranged."""
