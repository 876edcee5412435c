"""The loop thread's side of the SSD tier: what is there, what is to be written, what is to go.

The ledger plans commits and books their outcomes. It never touches the disk, and everything in it
belongs to the loop thread.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from omlxd.policy.base import CachePolicy, RequestContext
from omlxd.storage.ssd_errors import SsdError
from omlxd.storage.ssd_index import Entry, Index
from omlxd.storage.ssd_plan import CommitOutcome, CommitPlan, Forecast, Quarantined
from omlxd.storage.ssd_records import EncodedBlock, Record
from omlxd.storage.ssd_room import PAGES_PER_BLOCK, SLACK_PAGES, Room, VictimSearch, forecast
from omlxd.storage.ssd_warmup import WarmingPolicy

log = logging.getLogger(__name__)

DOOMED_PAGES = 1 << 14
"""Pages that one transaction frees of discarded records or for a lowered limit: trimming is gradual."""


class Ledger:
    """Index, policy, budget, and the work that waits for the writer."""

    def __init__(
        self,
        index: Index,
        policy: CachePolicy,
        room: Room,
        next_number: int,
        *,
        pages_of: Callable[[int], int],
        clock: Callable[[], float],
        elsewhere: Callable[[bytes], bool],
        counts: Counter[str],
    ) -> None:
        """``pages_of``: pages of so many stored bytes; ``elsewhere``: is a key in RAM."""
        self.index = index
        self.policy = policy
        self.room = room
        self.counts = counts
        self.outstanding: CommitPlan | None = None
        self.give_back = False
        """Return free pages to the file system with the next plans."""
        self.start_over = False
        """Begin with an empty file: everything was cleared."""
        self._next_number = next_number
        self._pages_of = pages_of
        self._clock = clock
        self._elsewhere = elsewhere
        self._context = RequestContext("spill")
        self._doomed: list[Entry] = []
        self._dropped: set[bytes] = set()  # discarded while a plan with them was under way
        self._quarantined: list[Quarantined] = []
        self._descriptors: dict[bytes, Mapping[str, object]] = {}
        self._used = array("Q")
        self._persist = False
        self._cannot_give_back = False

    # -- what is used, what goes ------------------------------------------------------------------

    @property
    def has_chores(self) -> bool:
        """Whether a plan without blocks would have something to do."""
        return self._has_paperwork or (self.room.over_pages > 0 and self.index.pages > self.index.pinned_pages)

    @property
    def _has_paperwork(self) -> bool:
        return bool(
            self._doomed
            or self._quarantined
            or self._descriptors
            or self.give_back
            or self.start_over
            or (self._persist and self._used)
            or (self.room.owes_space and not self._cannot_give_back)
        )

    def touch(self, keys: Sequence[bytes], ctx: RequestContext | None) -> None:
        """Note a use of ``keys``, heads first; the next commit writes it down."""
        self.policy.touch(keys, ctx)
        entries = self.index.entries
        self._used.extend(entries[key].chunk_id for key in reversed(keys) if key in entries)

    def persist(self) -> None:
        """Have the uses written down even when nothing is stored."""
        self._persist = True

    def pin(self, key: bytes) -> bool:
        """A restore of ``key`` begins: it stays on the disk. False when it is not here."""
        entry = self.index.entries.get(key)
        if entry is None:
            return False
        if self.index.pin(entry):
            self.policy.mark_non_evictable(key)
        return True

    def unpin(self, entry: Entry) -> None:
        """A restore has ended."""
        if self.index.unpin(entry):
            self.policy.mark_evictable(entry.key)

    def discard(self, keys: Iterable[bytes], cause: str) -> int:
        """Drop records; returns how many there were. They leave the disk with the next plan."""
        dropped = 0
        in_flight = self._in_flight()
        for key in keys:
            entry = self.index.remove(key)
            if entry is not None:
                self.policy.remove(key)
                self._doomed.append(entry)
                dropped += 1
            elif key in in_flight:
                self._dropped.add(key)
                dropped += in_flight[key]
        self.counts[f"discarded_{cause}"] += dropped
        return dropped

    def _in_flight(self) -> dict[bytes, bool]:
        """Keys of the outstanding plan: True for blocks on their way in, False for victims on their way out."""
        if self.outstanding is None:
            return {}
        leaving = dict.fromkeys(self.outstanding.victim_keys, False)
        return leaving | {block.key: True for block, _ in self.outstanding.blocks}

    def damaged(self, key: bytes, reason: str) -> None:
        """The record of ``key`` is not what was stored: it goes, and what happened is kept."""
        entry = self.index.entries.get(key)
        if entry is None:
            return
        self.quarantine(key, reason, entry.stored_bytes)
        self.discard([key], "damaged")

    def quarantine(self, key: bytes, reason: str, stored_bytes: int) -> None:
        """Book damage."""
        self._quarantined.append(Quarantined(key, reason, stored_bytes, self._clock()))
        self.counts["damaged"] += 1
        self.counts["damaged_bytes"] += stored_bytes

    def clear(self, namespace: bytes | None) -> int:
        """Drop all records (of a namespace); returns how many. The space goes back to the file system."""
        if namespace is not None:
            keys = [key for key, entry in self.index.entries.items() if entry.namespace == namespace]
            if self.outstanding is not None:
                keys += [block.key for block, _ in self.outstanding.blocks if block.meta.namespace == namespace]
                keys += [entry.key for entry in self.outstanding.victims if entry.namespace == namespace]
            self.give_back = True
            return self.discard(keys, "cleared")
        dropped = len(self.index.entries)
        self._dropped.update(self._in_flight())
        spaces = self.index.spaces
        self.index = Index()
        self.policy.clear()
        for space in spaces.values():
            fresh = self.index.space(space.id)
            fresh.number, fresh.descriptor, fresh.share = space.number, space.descriptor, space.share
            self._descriptors[space.id] = space.descriptor
        self._doomed.clear()
        del self._used[:]
        self.start_over = True
        self.counts["discarded_cleared"] += dropped
        return dropped

    def register(self, namespace: bytes, descriptor: Mapping[str, object]) -> None:
        """Write a namespace down, if it is new or described differently."""
        space = self.index.space(namespace)
        if space.descriptor != descriptor:
            space.descriptor = dict(descriptor)
            self._descriptors[namespace] = space.descriptor

    def warm(self, built: CachePolicy | None = None) -> None:
        """From now on with the real policy of a large store; ``built`` where a worker has arranged it already."""
        if isinstance(self.policy, WarmingPolicy):
            self.policy = self.policy.finish(built if built is not None else self.policy.build())

    def forecast(self) -> Forecast:
        """Who would leave for the limit as it is now, in the policy's order. O(records that leave)."""
        self.warm()
        return forecast(self.index, self.policy, self.room, self._elsewhere)

    # -- planning ---------------------------------------------------------------------------------

    def plan(self, encoded: Sequence[EncodedBlock]) -> CommitPlan | None:
        """Choose victims for ``encoded`` and make the plan of a commit; None when there is nothing to do.

        What is left out is counted and named in ``declined``. Raises ``SsdError`` when the last plan was not applied.
        """
        if self.outstanding is not None:
            raise SsdError("the last plan was not applied yet: one commit at a time")
        room = self.room
        declined: list[tuple[bytes, str]] = []
        blocks = self._new_ones(encoded, declined)
        if room.over_pages > DOOMED_PAGES and blocks:
            declined += [(block.key, "over_limit") for block in blocks]
            blocks = []
        doomed = self._some_doomed()
        freed = sum(entry.pages for entry in doomed)
        search = self._search(blocks)
        blocks = self._within_shares(blocks, search, declined)
        if blocks and not search.take_pages(self._excess(blocks, freed)):
            declined += [(block.key, "no_room") for block in blocks]
            search.undo()
            blocks = []
        if not blocks:
            search = self._search(blocks)
            over = min(self._excess(blocks, freed) - SLACK_PAGES, DOOMED_PAGES)
            if over > 0 and not search.take_pages(over):
                search.take_pages(self.index.pages - self.index.pinned_pages)
        for _, reason in declined:
            self.counts[f"declined_{reason}"] += 1
        if not blocks and not search.victims and not doomed and not self._has_paperwork:
            return None
        self.counts["evicted"] += len(search.victims)
        self.counts["evicted_orphans"] += search.orphans
        return self._make(blocks, search.victims, doomed, declined)

    def _new_ones(self, encoded: Sequence[EncodedBlock], declined: list[tuple[bytes, str]]) -> list[EncodedBlock]:
        fresh: dict[bytes, EncodedBlock] = {}
        for block in encoded:
            if block.key in self.index.entries or block.key in fresh:
                declined.append((block.key, "present"))
            elif self._pages_of(block.stored_bytes) + SLACK_PAGES > self.room.target_pages:
                declined.append((block.key, "too_large"))
            else:
                fresh[block.key] = block
        return list(fresh.values())

    def _within_shares(
        self, blocks: list[EncodedBlock], search: VictimSearch, declined: list[tuple[bytes, str]]
    ) -> list[EncodedBlock]:
        """Make room within each namespace's own share first; one namespace's excess is not another's loss."""
        by_space: dict[bytes, list[EncodedBlock]] = {}
        for block in blocks:
            by_space.setdefault(block.meta.namespace, []).append(block)
        fitting: list[EncodedBlock] = []
        for namespace, group in by_space.items():
            space = self.index.space(namespace)
            size = sum(block.stored_bytes for block in group)
            if space.share is None or (
                size <= space.share and search.take_share(space, space.stored_bytes + size - space.share)
            ):
                fitting += group
            else:
                declined += [(block.key, "share") for block in group]
        return fitting

    def _search(self, blocks: Sequence[EncodedBlock]) -> VictimSearch:
        if isinstance(self.policy, WarmingPolicy) and self._excess(blocks, 0) > 0:
            self.warm()  # something must leave already: it has to be known what
        if self.index.pages:
            self.policy.cache_capacity = max(1, self.room.target_pages * len(self.index.entries) // self.index.pages)
        parents = (block.meta.parent for block in blocks)
        return VictimSearch(self.index, self.policy, [key for key in parents if key is not None], self._elsewhere)

    def _need(self, blocks: Sequence[EncodedBlock]) -> int:
        return SLACK_PAGES + sum(self._pages_of(block.stored_bytes) + PAGES_PER_BLOCK for block in blocks)

    def _excess(self, blocks: Sequence[EncodedBlock], freed: int) -> int:
        return self.room.pages.live + self._need(blocks) - freed - self.room.target_pages

    def _some_doomed(self) -> list[Entry]:
        taken, pages = 0, 0
        while taken < len(self._doomed) and pages < DOOMED_PAGES:
            pages += self._doomed[taken].pages
            taken += 1
        doomed = self._doomed[:taken]
        del self._doomed[:taken]
        return doomed

    def _make(
        self,
        blocks: list[EncodedBlock],
        victims: list[Entry],
        doomed: list[Entry],
        declined: list[tuple[bytes, str]],
    ) -> CommitPlan:
        room, now = self.room, self._clock()
        pairs = []
        for block in blocks:
            meta = block.meta
            space = self.index.space(meta.namespace)
            record = Record(
                meta.key, self._next_number, space.number, meta.nbytes, block.stored_bytes, block.codec,
                block.frames, block.checksum, meta.parent, meta.position, now, meta.layout,
            )  # fmt: skip
            self._next_number += 1
            pairs.append((block, record))
        used = self._used.tobytes()
        need = self._need(blocks)
        plan = CommitPlan(
            blocks=tuple(pairs),
            victims=tuple(victims),
            doomed=tuple(doomed),
            quarantined=tuple(self._quarantined),
            descriptors=dict(self._descriptors),
            space_numbers={id_: space.number for id_, space in self.index.spaces.items()},
            recency=used,
            map_bytes=room.allowed_bytes,
            allowed_bytes=room.allowed_bytes,
            min_free=room.min_free,
            need_pages=need,
            evict_first=bool(blocks) and not room.fits_at_once(need),
            give_back=self.give_back or room.over_pages > 0 or room.owes_space,
            start_over=self.start_over,
            next_number=self._next_number,
            declined=tuple(declined),
        )
        del self._used[:]
        self._quarantined.clear()
        self._descriptors.clear()
        self._persist = self.start_over = False
        self.outstanding = plan
        return plan

    # -- booking ----------------------------------------------------------------------------------

    def applied(self, plan: CommitPlan, outcome: CommitOutcome) -> None:
        """Book what became of the outstanding plan. ``SsdError`` when it is another one."""
        if self.outstanding is not plan:
            raise SsdError("this plan is not the outstanding one")
        self.outstanding = None
        room = self.room
        if outcome.pages is not None:
            room.pages = outcome.pages
        if outcome.allocated_bytes is not None:
            room.allocated_bytes = outcome.allocated_bytes
        if outcome.free_bytes is not None:
            room.free_bytes = outcome.free_bytes
        for _ in range(outcome.map_full):
            room.map_was_full()
        self.counts["map_full"] += outcome.map_full
        self.counts["returned_bytes"] += outcome.returned_bytes
        self._cannot_give_back = plan.give_back and not outcome.returned_bytes
        if outcome.removed:
            room.unripe_pages = SLACK_PAGES + sum(entry.pages for entry in (*plan.victims, *plan.doomed))
            self.give_back = bool(self._doomed) and plan.give_back
        else:
            self._take_back(plan)
        if outcome.stored:
            self._enter(plan)
            self.counts["written_blocks"] += len(plan.blocks)
            self.counts["written_bytes"] += outcome.written_bytes
        else:
            self.counts["failed_commits"] += 1
            self._used = array("Q", plan.recency) + self._used
            for id_, descriptor in plan.descriptors.items():
                self._descriptors.setdefault(id_, descriptor)
        self._dropped.clear()

    def _take_back(self, plan: CommitPlan) -> None:
        """Nothing was removed: the victims are still on the disk, and readable."""
        for entry in reversed(plan.victims):
            if entry.key in self._dropped:
                self._doomed.append(entry)
            elif entry.key not in self.index.entries:
                self.index.add(entry)
                self.policy.insert(entry.key, entry)
        self._doomed[:0] = plan.doomed
        self._quarantined[:0] = plan.quarantined
        self.give_back = self.give_back or plan.give_back
        self.start_over = self.start_over or plan.start_over
        self.counts["evicted"] -= len(plan.victims)

    def _enter(self, plan: CommitPlan) -> None:
        entries = self.index.entries
        new: list[Entry] = []
        for block, record in plan.blocks:
            meta = block.meta
            entry = Entry(
                meta.key, record.number, self.index.space(meta.namespace), meta.nbytes, block.stored_bytes,
                self._pages_of(block.stored_bytes), meta.parent, meta.position, meta.layout,
            )  # fmt: skip
            if meta.key in self._dropped or meta.key in entries:
                self._doomed.append(entry)
                continue
            new.append(entry)
        self.policy.on_store_miss([entry.key for entry in new], self._context)
        new.sort(key=_position, reverse=True)  # tails first, so that heads are younger
        for entry in new:
            self.index.add(entry)
            self.policy.insert(entry.key, entry)
        if not self.policy.keeps_heads:
            self._touch_heads(new)

    def _touch_heads(self, new: Collection[Entry]) -> None:
        """To store a continuation is a use of what it continues: otherwise heads would look older than their tails."""
        seen = {entry.key for entry in new}
        for entry in new:
            before: list[bytes] = []
            for ancestor in self.index.ancestors(entry):
                if ancestor.key in seen:
                    break
                seen.add(ancestor.key)
                before.append(ancestor.key)
            if before:
                before.reverse()
                self.touch(before, self._context)


def _position(entry: Entry) -> int:
    return entry.position
