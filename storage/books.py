"""What has happened in a store: counted, timed, and told to whoever listens. Loop thread only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from omlxd.storage.figures import FAST_SECONDS, LONG_SECONDS, Histogram
from omlxd.storage.journal import Journal, Tier

if TYPE_CHECKING:
    from omlxd.storage.ram import RamBlock
    from omlxd.storage.reservations import Offer
    from omlxd.storage.ssd_index import Entry
    from omlxd.storage.ssd_plan import CommitOutcome, CommitPlan


class Books:
    """Counters and histograms since the start, and the journal."""

    def __init__(self, elsewhere: Callable[[bytes, Tier], bool], clock: Callable[[], float]) -> None:
        """``elsewhere``: as of :class:`Journal`."""
        self.counts: Counter[tuple[bytes, str]] = Counter()
        """By (namespace id, what): hits, misses, stores, declines, in blocks and in bytes."""
        self.removals: Counter[str] = Counter()
        """Readable blocks that left RAM, by cause."""
        self.histograms = {
            "load_seconds": Histogram(FAST_SECONDS),
            "restore_seconds": Histogram(FAST_SECONDS),
            "commit_seconds": Histogram(FAST_SECONDS),
            "ram_reuse_gap_seconds": Histogram(LONG_SECONDS),
            "ram_eviction_age_seconds": Histogram(LONG_SECONDS),
        }
        """What took how long: loads, restores and commits; what passed between two uses, and between the last and eviction."""
        self.journal = Journal(elsewhere)
        self._clock = clock

    def offered(self, namespace: bytes, offer: Offer) -> None:
        """An engine's offer was answered."""
        self.counts[namespace, "store_present"] += offer.present
        for reason, count in offer.declined.items():
            self.counts[namespace, f"declined_{reason}"] += count

    def stored(self, block: RamBlock) -> None:
        """A block that an engine has written is readable."""
        block.used = self._clock()
        self.journal.tell("stored", "ram", block.meta)
        self.counts[block.meta.namespace, "stored"] += 1
        self.counts[block.meta.namespace, "stored_bytes"] += block.meta.nbytes

    def left_ram(self, block: RamBlock, cause: str) -> None:
        """A readable block is not in RAM any more."""
        self.removals[cause] += 1
        if cause == "evicted" and block.used:
            self.histograms["ram_eviction_age_seconds"].observe(self._clock() - block.used)
        self.journal.tell("removed", "ram", block.meta, cause)

    def committed(self, plan: CommitPlan, outcome: CommitOutcome) -> None:
        """The SSD tier has carried out a plan, or could not."""
        self.histograms["commit_seconds"].observe(outcome.seconds)
        if outcome.stored:
            for encoded, _ in plan.blocks:
                self.journal.tell("spilled", "ssd", encoded.meta)
        if outcome.removed:
            for entry in plan.victims:
                self.journal.tell("removed", "ssd", entry, "evicted")

    def damaged(self, entry: Entry) -> None:
        """A record of the SSD tier is not what was stored."""
        self.journal.tell("removed", "ssd", entry, "damaged")
