"""Leases: the longest prefix that can be had, from RAM at once and from lower tiers as it comes.

Runs on the event loop's thread; nothing here waits.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from omlxd.policy.base import RequestContext
from omlxd.storage.asking import Asking
from omlxd.storage.figures import Histogram
from omlxd.storage.loads import WAIT, Load, Part
from omlxd.storage.lower import Lower, Lowers
from omlxd.storage.owners import Owners
from omlxd.storage.requests import request

if TYPE_CHECKING:
    from omlxd.storage.ram import RamBlock, RamTier
    from omlxd.storage.spill import Spiller
    from omlxd.storage.tier import OuterTier

PREFETCH_SECONDS = 60.0
MAX_PREFETCHES = 8
ASK_SECONDS = 1.0
"""The most that a lower tier may take to say what it has; most take less."""


class Leasing:
    """Makes loads, feeds them, counts what they got. The ``Source`` of every load."""

    def __init__(
        self,
        ram: RamTier,
        owners: Owners,
        ids: Iterator[int],
        *,
        clock: Callable[[], float],
        counts: Counter[tuple[bytes, str]],
        load_seconds: Histogram,
        reuse_gap_seconds: Histogram,
        window: int,
    ) -> None:
        """``window``: how many blocks one load may have under way from lower tiers at once."""
        self.window = window
        self.lower = Lowers()
        self.outer: Sequence[OuterTier] = ()
        self.asking: Asking | None = None
        """Where there are outer tiers: the questions to them."""
        self.spiller: Spiller | None = None
        self.filling: set[Load] = set()
        """Loads that are not finished."""
        self._ram = ram
        self._owners = owners
        self._ids = ids
        self._clock = clock
        self._counts = counts
        self._load_seconds = load_seconds
        self._reuse_gap_seconds = reuse_gap_seconds
        self._awaited: dict[bytes, list[tuple[Load, int]]] = {}
        self._prefetches: dict[bytes, Load] = {}
        self._requests = itertools.count(1)

    # -- from outside

    def load(
        self,
        owner: Hashable,
        keys: Sequence[bytes],
        *,
        block_tokens: int,
        timeout: float | None,
        emit: Callable[[Part], None],
        prefill_tokens_per_s: float | None = None,
        counted: bool = True,
        misses_of: bytes | None = None,
    ) -> Load:
        """See ``Store.load``."""
        ctx = request(f"load-{next(self._requests)}", keys, block_tokens)
        state = self._owners.of(owner)
        if counted:
            state.requests.append(ctx)
        load = Load(
            next(self._ids),
            owner,
            keys,
            ctx,
            self,
            window=self.window,
            since=self._clock(),
            compute_blocks_per_s=(prefill_tokens_per_s or 0.0) / block_tokens,
            counted=counted,
            misses_of=misses_of,
        )
        self.filling.add(load)
        state.leases[load.id] = load
        load.begin(timeout, emit)
        return load

    def prefetch(self, keys: Sequence[bytes], *, block_tokens: int) -> int:
        """Start restoring the prefix, as far as half of the RAM tier; how many blocks are to come from lower tiers."""
        if not self.lower or not keys:
            return 0
        wanted: list[bytes] = []
        missing = 0
        room = self._ram.arena.budget // 2
        for key in keys:
            block = self._ram.blocks.get(key)
            lower = self.lower.having(key) if block is None else None
            meta = block.meta if block is not None else lower.tier.meta(key) if lower is not None else None
            if meta is None or meta.nbytes > room:
                break
            room -= meta.nbytes
            missing += block is None or block.restoring
            wanted.append(key)
        if not missing or len(self._prefetches) >= MAX_PREFETCHES or wanted[-1] in self._prefetches:
            return missing
        name = ("prefetch", wanted[-1])

        def emit(part: Part) -> None:
            if part.last and self._prefetches.pop(wanted[-1], None) is not None:
                self._end_prefetch(name)

        load = self.load(name, wanted, block_tokens=block_tokens, timeout=PREFETCH_SECONDS, emit=emit, counted=False)
        if load.finished:
            self._end_prefetch(name)
        else:
            self._prefetches[wanted[-1]] = load
        return missing

    def written(self, key: bytes, block: RamBlock | None) -> None:
        """A store of ``key`` has ended: whoever waits for it is told; None: it failed."""
        for load, index in self._awaited.pop(key, ()):
            self._arrived(load, index, block, "store_failed")

    def advance(self) -> None:
        """There may be room: loads that wait for some go on."""
        for load in list(self.filling):
            load.advance()

    def stop(self) -> None:
        """End all loads that are not finished."""
        for load in list(self.filling):
            load.end("shutting_down")

    # -- Source, for Load

    def take_ready(self, load: Load, keys: Sequence[bytes], *, past_holes: bool = False) -> list[RamBlock | None]:
        """Pin and return the blocks of ``keys`` that are readable in RAM, up to the first that is not."""
        blocks = self._ram.blocks
        found: list[RamBlock | None] = []
        ready: list[RamBlock] = []
        for key in keys:
            block = blocks.get(key)
            if block is not None and block.chunk.ref_cnt >= 0:
                ready.append(block)
                found.append(block)
            elif past_holes and (block is not None or self.lower.having(key) is not None):
                found.append(None)
            else:
                break
        if ready:
            self._ram.begin_reads(ready)
            load.noted = len(ready) < len(load.keys)  # when all is there the answer goes out first
            if load.noted:
                self._ram.note_reads(ready, load.ctx)
        return found

    def ask_for(self, load: Load, index: int) -> str | None:
        """Restore the block, or wait for whoever is storing it."""
        key = load.keys[index]
        block = self._ram.blocks.get(key)
        if block is not None and not block.restoring:
            self._awaited.setdefault(key, []).append((load, index))
            return None
        lower = self.lower.having(key)
        if lower is None:
            return WAIT if self._is_asked_for(load, index) else "miss"
        if key not in lower.restorer:
            record = lower.tier.meta(key)
            if record is None:
                return "miss"
            if self._slower_than_computing(load, index, lower, record.nbytes):
                self._counts[record.namespace, "restores_skipped"] += load.counted
                return "restore_slower_than_prefill"
            if lower.restorer.busy:
                return WAIT

        def arrived(ready: RamBlock | None, reason: str) -> None:
            self._arrived(load, index, ready, reason, came_from=lower.name)

        if lower.restorer.start(key, arrived, load.ctx):
            return None
        if load.give_up_tail(index) and lower.restorer.start(key, arrived, load.ctx):
            return None
        load.starved = True
        if self._can_get_room(load):
            if self.spiller is not None:
                self.spiller.press()
            return WAIT
        return "no_room"

    def give_back(self, load: Load, blocks: Sequence[RamBlock]) -> None:
        """Unpin."""
        self._ram.complete_reads(blocks)

    def load_finished(self, load: Load) -> None:
        """Count what the engine got, and note the request's accesses in all tiers."""
        self.filling.discard(load)
        if not load.noted:
            self._ram.note_reads(load.blocks, load.ctx)
        if not load.counted:
            self._ram.on_request_finished(load.ctx)
            return
        now = self._clock()
        self._load_seconds.observe(now - load.since)
        gaps: Counter[float] = Counter()
        hits: Counter[tuple[bytes, str]] = Counter()
        nbytes: Counter[tuple[bytes, str]] = Counter()
        restored, spiller = load.restored, self.spiller
        for block in load.blocks:
            gaps[block.used] += 1
            block.used = now
            meta = block.meta
            kind = (meta.namespace, restored.get(meta.key, "ram") if restored else "ram")
            hits[kind] += 1
            nbytes[kind] += meta.nbytes
            if spiller is not None and not block.clean:
                spiller.add(block, asked_again=True)
        for used, times in gaps.items():
            if used:
                self._reuse_gap_seconds.observe(now - used, times)
        for (namespace, tier), count in hits.items():
            self._counts[namespace, f"hits_{tier}"] += count
            self._counts[namespace, f"hit_bytes_{tier}"] += nbytes[namespace, tier]
        for outer in self.outer:
            outer.offer_again([block.meta for block in load.blocks])
        if load.misses_of is not None:
            self._counts[load.misses_of, "misses"] += len(load.keys) - len(load.blocks)
        self.note_use([block.meta.key for block in load.blocks], load.ctx)

    def note_use(self, keys: Sequence[bytes], ctx: RequestContext) -> None:
        """The request of ``ctx`` has used ``keys``, head to tail, wherever they are."""
        self._ram.on_request_finished(ctx)
        if self.spiller is not None:
            self.spiller.touch(keys)
        if keys:
            for lower in self.lower:
                lower.tier.touch(keys, ctx)

    # -- inside

    def _is_asked_for(self, load: Load, index: int) -> bool:
        """Does somebody find out whether an outer tier has the block? Asks for the rest of the load with it."""
        key = load.keys[index]
        if self.asking is None:
            return False
        if key in self.asking:
            return True
        if not any(outer.unasked([key]) for outer in self.outer):
            return False
        blocks = self._ram.blocks
        rest = [key for key in load.keys[index:] if key not in blocks and self.lower.having(key) is None]
        self.asking.begin(rest, ASK_SECONDS)
        return key in self.asking

    def _slower_than_computing(self, load: Load, index: int, lower: Lower, nbytes: int) -> bool:
        """Would the engine, computing from where the load is now, have this block before its restore brings it?"""
        if not load.compute_blocks_per_s:
            return False
        to_compute = (index + 1 - len(load.blocks)) / load.compute_blocks_per_s
        return lower.restorer.seconds_for(nbytes) > to_compute

    def _can_get_room(self, load: Load) -> bool:
        """Is anything going to give its slot back, other than this load and those that starve as it does?"""
        if self.spiller is not None and self.spiller.dirty_blocks:
            return True
        if self.lower.restoring:
            return True
        return any(
            owner.reservations
            or any(other is not load and other.blocks and not other.starved for other in owner.leases.values())
            for owner in self._owners
        )

    def _arrived(self, load: Load, index: int, block: RamBlock | None, reason: str, *, came_from: str = "") -> None:
        if block is None:
            load.failed(index, reason)
            return
        if load.finished:
            return
        self._ram.begin_reads([block])
        self._ram.note_reads([block], load.ctx)
        if came_from:
            load.restored[block.meta.key] = came_from
        load.arrived(index, block)

    def _end_prefetch(self, name: Hashable) -> None:
        owner = self._owners.pop(name)
        for load in owner.leases.values() if owner is not None else ():
            load.release()
