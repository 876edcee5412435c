"""What is on the SSD, in memory: entries, chains, totals per namespace.

Loop thread only (a fresh index is built on a worker before anybody else sees it).

A block is useless without the one before it, so the index knows who continues whom. An entry whose
parent is not on the SSD *waits*: its parent may still be in RAM, or be stored later; when it is in
neither, the entry and all that continues it are orphans, the first to go.

Positions grow along a chain. An entry that says it continues one of its own position or a later one continues nothing
here: whatever a client has named as parents, the index has no loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from omlxd.policy.base import ChunkStatus


@dataclass(slots=True)
class SpaceTotals:
    """A namespace on this SSD. ``number`` is short for its id; sizes in bytes."""

    id: bytes
    number: int
    descriptor: dict[str, object]
    blocks: int = 0
    nbytes: int = 0
    stored_bytes: int = 0
    share: int | None = None
    """Most stored bytes it may have; None: no limit of its own."""
    retired: bool = False
    leaving: list[Entry] = field(default_factory=list)
    """Of a retired namespace: what leaves before anything else, the next one last. Some of it may be gone already."""


class Entry(ChunkStatus):
    """One record. ``chunk_id`` is the record's number; ``ref_cnt`` counts running restores.

    Read-only for everybody but the index; satisfies what callers need of a block's meta data.
    """

    __slots__ = ("children", "key", "layout", "nbytes", "pages", "parent", "position", "space", "stored_bytes")

    def __init__(
        self,
        key: bytes,
        number: int,
        space: SpaceTotals,
        nbytes: int,
        stored_bytes: int,
        pages: int,
        parent: bytes | None,
        position: int,
        layout: bytes | None = None,
    ) -> None:
        self.chunk_id = number
        self.ref_cnt = 0
        self.key = key
        self.space = space
        self.nbytes = nbytes
        self.stored_bytes = stored_bytes
        self.pages = pages
        self.parent = parent
        self.position = position
        self.layout = layout
        self.children: Entry | dict[Entry, None] | None = None  # most chains do not fork: no dict for one

    @property
    def namespace(self) -> bytes:
        """The 32-byte id."""
        return self.space.id

    def continuations(self) -> list[Entry]:
        """The entries whose parent this is."""
        if self.children is None:
            return []
        return list(self.children) if isinstance(self.children, dict) else [self.children]


class Index:
    """Entries by key. All methods are O(1) unless they say otherwise."""

    def __init__(self) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.spaces: dict[bytes, SpaceTotals] = {}
        self.waiting: dict[bytes, dict[Entry, None]] = {}
        """Entries whose parent is not here, by the parent's key."""
        self.pages = 0
        self.pinned_pages = 0
        self.nbytes = 0
        self.stored_bytes = 0

    def space(self, namespace: bytes) -> SpaceTotals:
        """The totals of a namespace, made when it is new."""
        found = self.spaces.get(namespace)
        if found is None:
            number = 1 + max((space.number for space in self.spaces.values()), default=0)
            found = self.spaces[namespace] = SpaceTotals(namespace, number, {})
        return found

    def add(self, entry: Entry) -> None:
        """Take in an entry; its key must be new."""
        key = entry.key
        self.entries[key] = entry
        if entry.parent is not None:
            parent = self.entries.get(entry.parent)
            if parent is None:
                self.waiting.setdefault(entry.parent, {})[entry] = None
            else:
                _adopt(parent, entry)
        if self.waiting and (children := self.waiting.pop(key, None)):
            for child in children:
                _adopt(entry, child)
        self.count(entry, 1)

    def fill(self, entries: Sequence[Entry]) -> None:
        """Take in all entries of a store at once, of spaces that are known; the index must be empty. O(entries)."""
        self.entries = known = {entry.key: entry for entry in entries}
        find = known.get
        for entry in entries:
            if entry.parent is None:
                continue
            parent = find(entry.parent)
            if parent is None:
                self.waiting.setdefault(entry.parent, {})[entry] = None
            else:
                _adopt(parent, entry)
        members: dict[int, list[Entry]] = {space.number: [] for space in self.spaces.values()}
        for entry in entries:
            members[entry.space.number].append(entry)
        for space in self.spaces.values():
            mine = members[space.number]
            space.blocks = len(mine)
            space.nbytes = sum([entry.nbytes for entry in mine])
            space.stored_bytes = sum([entry.stored_bytes for entry in mine])
            self.nbytes += space.nbytes
            self.stored_bytes += space.stored_bytes
            self.pages += sum([entry.pages for entry in mine])

    def count(self, entry: Entry, sign: int) -> None:
        """Add an entry to the totals, or take it out."""
        self.pages += sign * entry.pages
        self.nbytes += sign * entry.nbytes
        self.stored_bytes += sign * entry.stored_bytes
        space = entry.space
        space.blocks += sign
        space.nbytes += sign * entry.nbytes
        space.stored_bytes += sign * entry.stored_bytes

    def remove(self, key: bytes) -> Entry | None:
        """Take an entry out; what continues it waits from now on."""
        entry = self.entries.pop(key, None)
        if entry is None:
            return None
        if entry.parent is not None:
            parent = self.entries.get(entry.parent)
            if parent is not None:
                _abandon(parent, entry)
            elif (siblings := self.waiting.get(entry.parent)) is not None:
                del siblings[entry]
                if not siblings:
                    del self.waiting[entry.parent]
        if entry.children is not None:
            self.waiting[key] = dict.fromkeys(entry.continuations())
            entry.children = None
        if entry.ref_cnt > 0:
            self.pinned_pages -= entry.pages
        self.count(entry, -1)
        return entry

    def pin(self, entry: Entry) -> bool:
        """One more restore reads it; True for the first."""
        entry.ref_cnt += 1
        if entry.ref_cnt == 1:
            self.pinned_pages += entry.pages
        return entry.ref_cnt == 1

    def unpin(self, entry: Entry) -> bool:
        """One restore has ended; True for the last one of an entry that is still here."""
        entry.ref_cnt -= 1
        last = entry.ref_cnt == 0 and self.entries.get(entry.key) is entry
        if last:
            self.pinned_pages -= entry.pages
        return last

    def ancestors(self, entry: Entry) -> Iterator[Entry]:
        """From its parent up to the head, or to where the chain is broken."""
        parent = entry.parent
        while parent is not None:
            found = self.entries.get(parent)
            if found is None:
                return
            yield found
            parent = found.parent


def subtree(roots: Iterable[Entry]) -> list[Entry]:
    """The entries and everything that continues them, tails before heads."""
    found: list[Entry] = list(roots)
    for entry in found:  # grows while it is walked
        found.extend(entry.continuations())
    found.reverse()
    return found


def _adopt(parent: Entry, child: Entry) -> None:
    if parent.position >= child.position:
        child.parent = None
        return
    child.parent = parent.key  # one object for one key
    if parent.children is None:
        parent.children = child
    elif isinstance(parent.children, dict):
        parent.children[child] = None
    else:
        parent.children = {parent.children: None, child: None}


def _abandon(parent: Entry, child: Entry) -> None:
    if parent.children is child:
        parent.children = None
    elif isinstance(parent.children, dict):
        del parent.children[child]
        if len(parent.children) == 1:
            parent.children = next(iter(parent.children))
