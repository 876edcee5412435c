"""What the chunk manager answers, tells and counts, and what it remembers of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from omlxd.storage.blocks import HASH_BYTES


class ChunkError(RuntimeError):
    """A transfer that the chunk's state does not allow: a caller's mistake. Nothing has changed."""


class Lookup(Enum):
    """What a tier has under a key. PENDING: present, not readable yet."""

    MISS = "miss"
    HIT = "hit"
    PENDING = "pending"


@dataclass(frozen=True, slots=True)
class PreparedStore:
    """What to write where: `keys_to_store[i]` into slot `chunk_ids[i]`, and which keys left for it."""

    keys_to_store: list[bytes]
    chunk_ids: list[int]
    evicted_keys: list[bytes]


@dataclass(frozen=True, slots=True)
class ChunkEvent:
    """Keys that became readable, or that were removed to make room."""

    keys: list[bytes]
    removed: bool


@dataclass(slots=True)
class ChunkCounters:
    """Totals since the start or the last `reset`, in chunks; `refused_stores` in calls."""

    allocation_requested: int = 0
    stored: int = 0
    failed: int = 0
    evicted: int = 0
    below_threshold: int = 0
    refused_stores: int = 0


@dataclass(slots=True)
class RequestState:
    """What one request did so far, in the manager's generation of that time."""

    generation: int
    seen: dict[bytes, None] = field(default_factory=dict)
    inserted: set[bytes] = field(default_factory=set)
    reused: set[bytes] = field(default_factory=set)
    missed: set[bytes] = field(default_factory=set)
    finished: bool = False

    def key_groups(self) -> list[list[bytes]]:
        """The keys that it saw, in that order, one list for each KV group."""
        groups: dict[bytes, list[bytes]] = {key[HASH_BYTES:]: [] for key in self.seen}
        if len(groups) == 1:
            return [list(self.seen)]
        for key in self.seen:
            groups[key[HASH_BYTES:]].append(key)
        return list(groups.values())
