"""How much the data file may take, and who leaves so that something fits.

Everything is counted in pages of the file. Of the pages that LMDB has, a few per cent are kept
free: what the last transaction freed cannot be used by the next one, and a value needs neighbouring
pages. That share (``margin``) grows when LMDB ever says that its map is full.

Loop thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from omlxd.policy.base import CachePolicy, ChunkStatus
from omlxd.storage.environment import PIECE_PAGE_BYTES
from omlxd.storage.ssd_index import Entry, Index, SpaceTotals, subtree
from omlxd.storage.ssd_plan import Forecast
from omlxd.storage.ssd_space import Pages

MARGIN = 0.05
MAX_MARGIN = 0.30
MAX_PATIENCE = 4096
LEAST_MARGIN = 4 * PIECE_PAGE_BYTES
SLACK_PAGES = 24
"""Pages of the trees that a transaction copies besides its values."""
PAGES_PER_BLOCK = 2
"""Likewise, per block that it adds."""
LARGEST_GROUP = 32 << 20


@dataclass(slots=True)
class Room:
    """The budget of the data file. Sizes in bytes unless they say pages."""

    limit: int
    """Everything in the store's directory together."""
    min_free: int
    """What must stay free on the volume, whoever uses it."""
    page_bytes: int
    pages: Pages
    allocated_bytes: int
    other_bytes: int
    free_bytes: int
    """Free on the volume when last asked."""
    ceiling: int | None = None
    """No more than this since the disk said that it is full."""
    margin: float = MARGIN
    unripe_pages: int = 0
    """Freed by the last transaction: they can be used after the next one."""
    patience: int = 8
    """Looks at the disk before ``ceiling`` is lifted."""
    _looks_left: int = 0

    @property
    def allowed_bytes(self) -> int:
        """What the data file may take on the disk now, in whole pages."""
        allowed = self.limit - self.other_bytes
        if self.free_bytes < self.min_free + allowed - self.allocated_bytes:
            # Steps of 1/64 of the limit: the map is not to be changed for every file that somebody saves.
            step = max(self.page_bytes, self.limit // 64)
            allowed = (self.allocated_bytes + self.free_bytes - self.min_free) // step * step
        if self.ceiling is not None:
            allowed = min(allowed, self.ceiling)
        return max(0, allowed) // self.page_bytes * self.page_bytes

    @property
    def target_pages(self) -> int:
        """How many pages may be live after a commit."""
        return max(0, self.allowed_bytes - self._margin_bytes) // self.page_bytes

    @property
    def _margin_bytes(self) -> int:
        return max(LEAST_MARGIN, int(self.allowed_bytes * self.margin))

    @property
    def group_bytes(self) -> int:
        """How much one transaction should carry so that it need not free its room beforehand."""
        return min(LARGEST_GROUP, self._margin_bytes // 3)

    @property
    def over_pages(self) -> int:
        """By how many pages the store is over its target; 0 when it is not."""
        return max(0, self.pages.live - self.target_pages)

    @property
    def owes_space(self) -> bool:
        """Whether the file takes more than it may, free pages included."""
        return self.allocated_bytes > self.allowed_bytes

    def fits_at_once(self, need_pages: int) -> bool:
        """Whether ``need_pages`` find room, in long enough runs, before anything is freed."""
        growth = self.allowed_bytes // self.page_bytes - self.pages.total
        if self.pages.in_runs is not None:
            return need_pages * 5 <= (growth + self.pages.in_runs - self.unripe_pages) * 4
        free = growth + self.pages.total - self.pages.live - self.unripe_pages
        return need_pages * 3 <= free * 2

    def disk_was_full(self) -> None:
        """The disk refused a write: stay below what the file has, and try more only after a while, each time longer."""
        self.ceiling = min(self.allocated_bytes, self.ceiling or self.allocated_bytes) // 16 * 15
        self.patience = min(MAX_PATIENCE, 2 * self.patience)
        self._looks_left = self.patience

    def disk_is_well(self) -> None:
        """A look at the disk found nothing wrong (a quota does not show in its free space)."""
        if self.ceiling is not None:
            self._looks_left -= 1
            if self._looks_left <= 0:
                self.ceiling = None

    def map_was_full(self) -> None:
        """LMDB found no room where this plan expected some: keep more free from now on."""
        self.margin = min(MAX_MARGIN, self.margin * 1.25)


def forecast(index: Index, policy: CachePolicy, room: Room, elsewhere: Callable[[bytes], bool]) -> Forecast:
    """Who would leave for the limit as it is now: orphans, then in the policy's order. Changes nothing."""
    over = room.over_pages
    leaving: list[Entry] = []
    for children in (children for parent, children in index.waiting.items() if not elsewhere(parent)):
        leaving += subtree(children)
    known = set(leaving)
    leaving += (index.entries[key] for key, _ in policy.chunks() if index.entries[key] not in known)
    by_namespace: Counter[bytes] = Counter()
    blocks = stored = pages = 0
    for entry in leaving:
        if pages >= over:
            break
        if entry.ref_cnt == 0:
            blocks += 1
            stored += entry.stored_bytes
            pages += entry.pages
            by_namespace[entry.namespace] += entry.stored_bytes
    live = (room.pages.live - pages) * room.page_bytes
    return Forecast(blocks, stored, dict(by_namespace), max(0, room.allocated_bytes - live))


class _Kept(Collection[bytes]):
    """What must not be a victim: some keys, every block that something continues, other namespaces."""

    def __init__(self, index: Index, keys: frozenset[bytes], only: SpaceTotals | None) -> None:
        self._index = index
        self._keys = keys
        self._only = only

    def __contains__(self, key: object) -> bool:
        entry = self._index.entries.get(key)  # type: ignore[call-overload]
        if entry is None:  # taken already, in this very search
            return True
        if self._only is not None and entry.space is not self._only:
            return True
        return entry.children is not None or key in self._keys

    def __iter__(self) -> Iterator[bytes]:
        return (key for key in self._index.entries if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class VictimSearch:
    """Takes victims out of index and policy; ``undo`` puts all of them back."""

    def __init__(
        self, index: Index, policy: CachePolicy, keep: Iterable[bytes], elsewhere: Callable[[bytes], bool]
    ) -> None:
        """``keep``: keys that must stay. ``elsewhere``: is this block in RAM?"""
        self._index = index
        self._policy = policy
        self._keep = frozenset(keep)
        self._elsewhere = elsewhere
        self.victims: list[Entry] = []
        self.orphans = 0
        self.pages = 0

    def take_pages(self, wanted: int) -> bool:
        """Take victims until they have ``wanted`` pages. False, and nothing more taken, when there are not so many."""
        if self.pages >= wanted:
            return True
        index = self._index
        if index.pages - index.pinned_pages < wanted - self.pages:
            return False
        self._take_orphans(wanted)
        self._take_retired(wanted)
        return self.pages >= wanted or self._by_policy(lambda: self.pages >= wanted, None)

    def take_share(self, space: SpaceTotals, stored_bytes: int) -> bool:
        """Take victims of one namespace until they have ``stored_bytes``."""
        target = space.stored_bytes - stored_bytes
        return stored_bytes <= 0 or (target >= 0 and self._by_policy(lambda: space.stored_bytes <= target, space))

    def undo(self) -> None:
        """Put everything back. What the policy knew of their recency is lost."""
        self._put_back(0)

    def _take(self, entry: Entry) -> None:
        self._index.remove(entry.key)
        self.victims.append(entry)
        self.pages += entry.pages

    def _take_orphans(self, wanted: int) -> None:
        broken = [children for parent, children in self._index.waiting.items() if not self._elsewhere(parent)]
        for children in broken:
            for entry in subtree(children):
                if self.pages >= wanted:
                    return
                if entry.ref_cnt == 0 and entry.key not in self._keep and entry.children is None:
                    self._take(entry)
                    self._policy.remove(entry.key)
                    self.orphans += 1

    def _take_retired(self, wanted: int) -> None:
        """What belongs to retired namespaces, tails before heads."""
        for space in self._index.spaces.values():
            while space.leaving and self.pages < wanted:
                entry = space.leaving[-1]
                there = self._index.entries.get(entry.key) is entry
                if there and (entry.ref_cnt or entry.key in self._keep or entry.children is not None):
                    break  # it is read now, or has been continued: the policy decides about the rest
                space.leaving.pop()
                if there:
                    self._take(entry)
                    self._policy.remove(entry.key)

    def _by_policy(self, enough: Callable[[], bool], only: SpaceTotals | None) -> bool:
        """Ask the policy, round by round: a head that it would give first is free to go once its tail was taken."""
        kept = _Kept(self._index, self._keep, only)
        before = len(self.victims)
        while not enough():
            found = self._search(enough, kept)
            if found and not enough():
                # All that there is in this round; none of it was taken, since it does not suffice.
                left = iter(range(found - 1, -1, -1))
                self._search(lambda left=left: next(left) == 0, kept)  # type: ignore[misc]
            elif not found and not enough():
                self._put_back(before)
                return False
        return True

    def _search(self, enough: Callable[[], bool], kept: _Kept) -> int:
        """One round; returns how many victims it found. They are taken if they are enough."""
        before = len(self.victims)

        def one_more(key: bytes, _: ChunkStatus) -> bool:
            # At once, so that this very search finds the block before it free to go.
            self._take(self._index.entries[key])
            return enough()

        satisfied = self._policy.evict_until(one_more, kept) is not None
        found = len(self.victims) - before
        if not satisfied:
            self._put_back(before)
        return found

    def _put_back(self, before: int) -> None:
        """Undo all victims but the first ``before``."""
        for entry in reversed(self.victims[before:]):  # heads first
            self._index.add(entry)
            self.pages -= entry.pages
            if self._policy.get(entry.key) is None:
                self._policy.insert(entry.key, entry)
            if entry.space.retired:
                entry.space.leaving.append(entry)
        del self.victims[before:]
