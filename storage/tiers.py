"""The two tiers as one store.

Owners (connections) lease blocks and reserve slots; what an owner holds ends with it. All methods run on the event
loop's thread; nothing here waits for the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import IntEnum

from omlxd.policy.base import RequestContext
from omlxd.storage.blocks import BlockMeta
from omlxd.storage.figures import FAST_SECONDS, LONG_SECONDS, Histogram
from omlxd.storage.journal import Journal, Tier
from omlxd.storage.loads import Load, Part
from omlxd.storage.ram import RamBlock, RamTier
from omlxd.storage.restore import Restorer
from omlxd.storage.spill import Spiller, SpillSettings
from omlxd.storage.ssd import SsdTier
from omlxd.storage.ssd_plan import CommitOutcome, CommitPlan

log = logging.getLogger(__name__)


class Where(IntEnum):
    """Where a block is. The numbers are the protocol's."""

    MISS = 0
    PENDING = 1
    """Being stored by an engine at this moment."""
    RAM = 2
    SSD = 3
    """On the SSD, or on its way from it."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What the store may use."""

    spill: SpillSettings = field(default_factory=SpillSettings)
    restore_parallel: int = 4
    """Blocks read from the SSD at once."""
    restore_ahead: int = 16
    """Blocks asked for beyond what a load has; bounds what one load can claim at once."""
    max_reserved_bytes: int = 1 << 30
    """Payload bytes that one owner may have reserved at once."""
    seize_seconds: float = 30.0
    """How long memory that a vanished owner could still be writing to is kept from others."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """A slot to be written: index in the offer, reservation id, the block."""

    index: int
    reservation: int
    block: RamBlock


@dataclass(slots=True)
class Offer:
    """What became of a store's offer, before its bytes are written."""

    reserved: list[Reserved] = field(default_factory=list)
    present: int = 0
    declined: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Owner:
    leases: dict[int, Load] = field(default_factory=dict)
    reservations: dict[int, RamBlock] = field(default_factory=dict)
    reserved_bytes: int = 0


class UnknownId(LookupError):
    """A lease or reservation that this owner does not have."""


class Store:
    """RAM tier and, where there is one, SSD tier."""

    def __init__(
        self,
        ram: RamTier,
        ssd: SsdTier | None,
        settings: StoreSettings,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.ram = ram
        self.ssd = ssd
        self.settings = settings
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
        self.journal = Journal(self._is_in_other_tier)
        self.closing = False
        self._clock = clock
        self._owners: dict[Hashable, _Owner] = {}
        self._ids = itertools.count(1)
        self._filling: set[Load] = set()
        self._awaited: dict[bytes, list[Callable[[RamBlock | None], None]]] = {}
        self._room = asyncio.Event()
        self._seized: set[RamBlock] = set()
        self._writer = ThreadPoolExecutor(1, "omlxd-writer")
        self._coders = ThreadPoolExecutor(2, "omlxd-coder")
        self._readers = ThreadPoolExecutor(settings.restore_parallel, "omlxd-restore")
        ram.on_removed = self._removed
        self.spiller: Spiller | None = None
        self.restorer: Restorer | None = None
        if ssd is not None:
            ssd.elsewhere = self.ram.blocks.__contains__
            self.spiller = Spiller(
                ram,
                ssd,
                settings.spill,
                clock=clock,
                writer=self._writer,
                coders=self._coders,
                on_progress=self.progress,
                on_commit=self._committed,
            )
            self.restorer = Restorer(
                ram,
                ssd,
                self._readers,
                parallel=settings.restore_parallel,
                on_damage=self._damaged,
                on_progress=self.progress,
                on_restored=self.histograms["restore_seconds"].observe,
            )

    # -- life

    def start(self) -> None:
        """Start the writer on the running loop."""
        if self.spiller is not None:
            self.spiller.start()

    async def stop(self, progress: Callable[[int], None] | None = None) -> None:
        """Write what is dirty (``progress`` is told the bytes to go), then close both tiers."""
        self.closing = True
        if self.spiller is not None:
            await self.spiller.drain(progress)
            await self.spiller.stop()
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._coders.shutdown(wait=True)
        if self.ssd is not None:
            await asyncio.get_running_loop().run_in_executor(self._writer, self.ssd.close)
        self._writer.shutdown(wait=True)
        self.ram.arena.close()

    # -- looking

    def where(self, key: bytes) -> Where:
        """Where the block is. No effect on recency."""
        block = self.ram.blocks.get(key)
        if block is not None:
            if block.chunk.ref_cnt >= 0:
                return Where.RAM
            return Where.SSD if block.restoring else Where.PENDING
        return Where.SSD if self.ssd is not None and key in self.ssd else Where.MISS

    def lookup(self, keys: Sequence[bytes], *, prefix: bool = False) -> bytes:
        """One byte of :class:`Where` for each key; with ``prefix`` it ends with the first miss."""
        blocks = self.ram.blocks
        ssd = self.ssd
        found = bytearray()
        for key in keys:
            block = blocks.get(key)
            if block is not None:
                found.append(2 if block.chunk.ref_cnt >= 0 else 3 if block.restoring else 1)
            elif ssd is not None and key in ssd:
                found.append(3)
            elif prefix:
                found.append(0)
                break
            else:
                found.append(0)
        return bytes(found)

    # -- loading

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
        """Lease the longest prefix of ``keys`` that can be had.

        ``timeout``: seconds to wait for what is not in RAM; None: take what is there. ``prefill_tokens_per_s``: blocks whose
        restore is measurably slower than computing them at this rate are left. ``counted``: it is an engine's, so what
        it gets are hits; ``misses_of``: what it does not get are misses of this namespace.
        """
        ctx = RequestContext(f"load-{next(self._ids)}")
        for index, key in enumerate(keys):
            ctx.set_offload_key_position(key, (index + 1) * block_tokens)
        load = Load(
            next(self._ids),
            owner,
            keys,
            ctx,
            self,
            window=self.settings.restore_ahead,
            since=self._clock(),
            compute_blocks_per_s=(prefill_tokens_per_s or 0.0) / block_tokens,
            counted=counted,
            misses_of=misses_of,
        )
        self._filling.add(load)
        self._owners.setdefault(owner, _Owner()).leases[load.id] = load
        load.begin(timeout, emit)
        return load

    def release(self, owner: Hashable, lease_id: int) -> None:
        """End a lease. Raises UnknownId when the owner has no such lease (a second release, too)."""
        state = self._owners.get(owner)
        load = state.leases.pop(lease_id, None) if state is not None else None
        if load is None:
            raise UnknownId(f"lease {lease_id} is not held by this connection: it was released before, or never given")
        load.release()
        self.progress()

    # Source, for Load

    def take_ready(self, load: Load, index: int) -> RamBlock | None:
        """Pin and return the block when it is readable in RAM."""
        key = load.keys[index]
        block = self.ram.blocks.get(key)
        if block is None or block.chunk.ref_cnt < 0:
            return None
        self.ram.prepare_load([key], load.ctx)
        return block

    def ask_for(self, load: Load, index: int) -> str | None:
        """Restore the block, or wait for whoever is storing it."""
        key = load.keys[index]
        block = self.ram.blocks.get(key)
        if block is not None and not block.restoring:
            self._awaited.setdefault(key, []).append(
                lambda ready: self._arrived(load, index, ready, "store_failed", restored=False)
            )
            return None
        if self.restorer is None or self.ssd is None:
            return "miss"
        if key not in self.restorer:
            record = self.ssd.meta(key)
            if record is None:
                return "miss"
            if self._slower_than_computing(load, record.nbytes):
                self.counts[record.namespace, "restores_skipped"] += 1
                return "restore_slower_than_prefill"
            if len(self.restorer) >= 4 * self.restorer.parallel:
                return "wait"

        def arrived(ready: RamBlock | None, reason: str) -> None:
            self._arrived(load, index, ready, reason, restored=True)

        if self.restorer.start(key, arrived, load.ctx):
            return None
        if self._can_get_room(load):
            if self.spiller is not None:
                self.spiller.press()
            return "wait"
        return "no_room"

    def _slower_than_computing(self, load: Load, nbytes: int) -> bool:
        if not load.compute_blocks_per_s or self.restorer is None or not self.restorer.bytes_per_second:
            return False
        seconds = nbytes / (self.restorer.bytes_per_second * self.restorer.parallel)
        return seconds > 1 / load.compute_blocks_per_s

    def _can_get_room(self, load: Load) -> bool:
        """Is anything going to give its slot back, other than this load itself?"""
        if self.spiller is not None and self.spiller.dirty_blocks:
            return True
        if self.restorer is not None and len(self.restorer):
            return True
        return any(
            state.reservations or any(other is not load and other.blocks for other in state.leases.values())
            for state in self._owners.values()
        )

    def _arrived(self, load: Load, index: int, block: RamBlock | None, reason: str, *, restored: bool) -> None:
        if block is None:
            load.failed(index, reason)
            return
        if load.finished:
            return
        self.ram.prepare_load([block.meta.key], load.ctx)
        if restored:
            load.restored.add(block.meta.key)
        load.arrived(index, block)

    def give_back(self, load: Load, blocks: Sequence[RamBlock]) -> None:
        """Unpin."""
        for block in blocks:
            self.ram.complete_read(block)

    def load_finished(self, load: Load) -> None:
        """Count what the engine got, and note the request's accesses in both tiers."""
        self._filling.discard(load)
        if not load.counted:
            self.ram.on_request_finished(load.ctx)
            return
        keys = [block.meta.key for block in load.blocks]
        now = self._clock()
        self.histograms["load_seconds"].observe(now - load.since)
        for block in load.blocks:
            if block.used:
                self.histograms["ram_reuse_gap_seconds"].observe(now - block.used)
            block.used = now
            namespace = block.meta.namespace
            tier = "ssd" if block.meta.key in load.restored else "ram"
            self.counts[namespace, f"hits_{tier}"] += 1
            self.counts[namespace, f"hit_bytes_{tier}"] += block.meta.nbytes
            if self.spiller is not None and not block.clean:
                self.spiller.add(block, asked_again=True)
        if load.misses_of is not None:
            self.counts[load.misses_of, "misses"] += len(load.keys) - len(keys)
        self._accessed(keys, load.ctx)

    def _accessed(self, keys: Sequence[bytes], ctx: RequestContext) -> None:
        self.ram.on_request_finished(ctx)
        if self.spiller is not None:
            self.spiller.touch(keys)
        if self.ssd is not None and keys:
            self.ssd.touch(keys, ctx)

    def touch(self, keys: Sequence[bytes], *, block_tokens: int) -> None:
        """An engine used its own copy of these blocks (head to tail)."""
        ctx = RequestContext(f"touch-{next(self._ids)}")
        for index, key in enumerate(keys):
            ctx.set_offload_key_position(key, (index + 1) * block_tokens)
        self.ram.note_access(keys, ctx)
        self._accessed(keys, ctx)

    def prefetch(self, keys: Sequence[bytes], *, block_tokens: int) -> int:
        """Start restoring the prefix; how many blocks are on their way. Bounded: what finds no slot is left."""
        if self.restorer is None:
            return 0
        ctx = RequestContext(f"prefetch-{next(self._ids)}")
        started = 0
        for index, key in enumerate(keys):
            where = self.where(key)
            if where is Where.MISS or len(self.restorer) >= 4 * self.restorer.parallel:
                break
            ctx.set_offload_key_position(key, (index + 1) * block_tokens)
            if where is Where.SSD and key not in self.restorer:
                if not self.restorer.start(key, None, ctx):
                    break
                started += 1
        self.ram.on_request_finished(ctx)
        return started

    # -- storing

    async def prepare_store(
        self,
        owner: Hashable,
        ancestors: Sequence[bytes],
        metas: Sequence[BlockMeta],
        *,
        block_tokens: int,
        timeout: float,
    ) -> Offer:
        """Reserve slots for ``metas``, the blocks behind ``ancestors`` in one chain.

        Waits at most ``timeout`` seconds for room. Heads get their slots first; what finds none is declined with the reason.
        """
        ctx = RequestContext(f"store-{next(self._ids)}")
        for index, key in enumerate(itertools.chain(ancestors, (meta.key for meta in metas))):
            ctx.set_offload_key_position(key, (index + 1) * block_tokens)
        deadline = self._clock() + timeout
        offer = Offer()
        wanted = self._sort_offer(metas, offer)
        held = [key for key in (*ancestors, *(meta.key for meta in metas)) if self._is_ready(key)]
        while True:
            blocks = self._reserve(owner, [meta for _, meta in wanted], held, ctx)
            if blocks is not None:
                break
            if self.closing:
                offer.declined["shutting_down"] += len(wanted)
                wanted, blocks = [], []
                break
            left = deadline - self._clock()
            if left <= 0 or not self._can_wait_for_room():
                wanted, blocks = self._reserve_some(owner, wanted, held, ctx, offer)
                break
            if self.spiller is not None:
                self.spiller.press()
            self._room.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._room.wait(), left)
            offer = Offer()
            wanted = self._sort_offer(metas, offer)
            held = [key for key in held if self._is_ready(key)]
        state = self._owners.setdefault(owner, _Owner())
        for (index, _), block in zip(wanted, blocks, strict=True):
            reservation = next(self._ids)
            state.reservations[reservation] = block
            state.reserved_bytes += block.meta.nbytes
            offer.reserved.append(Reserved(index, reservation, block))
        self._accessed(held, ctx)
        if metas:
            namespace = metas[0].namespace
            self.counts[namespace, "store_present"] += offer.present
            for reason, count in offer.declined.items():
                self.counts[namespace, f"declined_{reason}"] += count
        return offer

    def _is_ready(self, key: bytes) -> bool:
        block = self.ram.blocks.get(key)
        return block is not None and block.chunk.ref_cnt >= 0

    def _sort_offer(self, metas: Sequence[BlockMeta], offer: Offer) -> list[tuple[int, BlockMeta]]:
        wanted: list[tuple[int, BlockMeta]] = []
        for index, meta in enumerate(metas):
            where = self.where(meta.key)
            if where is Where.RAM or where is Where.SSD:
                offer.present += 1
            elif where is Where.PENDING:
                offer.declined["pending"] += 1
            elif not self.ram.could_ever_fit(meta.nbytes):
                offer.declined["too_large"] += 1
            else:
                wanted.append((index, meta))
        return wanted

    def _reserve(
        self, owner: Hashable, metas: Sequence[BlockMeta], held: Sequence[bytes], ctx: RequestContext
    ) -> list[RamBlock] | None:
        if not metas:
            self.ram.note_access(held, ctx)
            return []
        nbytes = sum(meta.nbytes for meta in metas)
        state = self._owners.get(owner)
        if (
            state is not None
            and state.reserved_bytes
            and state.reserved_bytes + nbytes > self.settings.max_reserved_bytes
        ):
            return None
        if self.spiller is not None and not self.spiller.takes(nbytes + self._reserved_bytes()):
            return None
        return self.ram.reserve(metas, held, ctx)

    def _reserved_bytes(self) -> int:
        return sum(state.reserved_bytes for state in self._owners.values())

    def _can_wait_for_room(self) -> bool:
        if self.spiller is not None and (self.spiller.dirty_blocks or self.spiller.busy):
            return True
        return any(state.reservations or state.leases for state in self._owners.values())

    def _reserve_some(
        self,
        owner: Hashable,
        wanted: list[tuple[int, BlockMeta]],
        held: Sequence[bytes],
        ctx: RequestContext,
        offer: Offer,
    ) -> tuple[list[tuple[int, BlockMeta]], list[RamBlock]]:
        """As many as there is room for, heads first; the rest is declined."""
        got: list[tuple[int, BlockMeta]] = []
        blocks: list[RamBlock] = []
        for index, meta in wanted:
            one = self._reserve(owner, [meta], [*held, *(block.meta.key for block in blocks)], ctx)
            if not one:
                offer.declined["no_room"] += len(wanted) - len(got)
                break
            got.append((index, meta))
            blocks += one
        return got, blocks

    def complete_store(self, owner: Hashable, reservations: Sequence[int], *, success: bool) -> int:
        """The bytes of these reservations are written, or are not coming; how many blocks became readable.

        Raises:
            UnknownId: one of them is not this owner's (a second completion, too); then none is changed.
        """
        state = self._owners.get(owner, _Owner())
        unknown = [one for one in reservations if one not in state.reservations]
        if unknown or len(set(reservations)) != len(reservations):
            raise UnknownId(
                f"reservation {unknown[0] if unknown else reservations[0]} is not open on this connection: "
                "it was completed before, or never given; nothing was changed"
            )
        stored = 0
        for reservation in reservations:
            block = state.reservations.pop(reservation)
            state.reserved_bytes -= block.meta.nbytes
            stored += self._complete(block, success)
        self.progress()
        return stored

    def _complete(self, block: RamBlock, success: bool) -> bool:
        key = block.meta.key
        readable = self.ram.complete(block, success=success)
        if readable:
            block.used = self._clock()
            self.journal.tell("stored", "ram", block.meta)
            self.counts[block.meta.namespace, "stored"] += 1
            self.counts[block.meta.namespace, "stored_bytes"] += block.meta.nbytes
            if self.spiller is not None:
                self.spiller.add(block)
        for waiting in self._awaited.pop(key, ()):
            waiting(block if readable else None)
        return readable

    async def get(self, key: bytes, *, timeout: float, counted: bool = True) -> bytes | None:
        """One block's payload, copied; None when it can't be had in time."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def emit(part: Part) -> None:
            if part.last and not done.done():
                done.set_result(None)

        owner = object()
        load = self.load(owner, [key], block_tokens=1, timeout=timeout, emit=emit, counted=counted)
        try:
            await done
            return bytes(self.ram.view(load.blocks[0])) if load.blocks else None
        finally:
            self.owner_gone(owner, may_still_write=False)

    # -- what ends

    def owner_gone(self, owner: Hashable, *, may_still_write: bool) -> None:
        """Release all that ``owner`` held.

        ``may_still_write``: its process may live on and have the memory mapped; slots that it was writing, and blocks
        that it was reading, then are kept from others for a while.
        """
        state = self._owners.pop(owner, None)
        if state is None:
            return
        for load in list(state.leases.values()):
            load.release()
        for block in state.reservations.values():
            if may_still_write:
                self._seize(block)
            self._complete(block, success=False)
        self.progress()

    def _seize(self, block: RamBlock) -> None:
        self.ram.detach(block)
        self.ram.hold(block)
        self._seized.add(block)
        asyncio.get_running_loop().call_later(self.settings.seize_seconds, self._unseize, block)

    def _unseize(self, block: RamBlock) -> None:
        if block in self._seized:
            self._seized.discard(block)
            self.ram.unhold(block)
            self.progress()

    def progress(self) -> None:
        """Something gave room: whoever waits for some tries again."""
        if self.ram.arena.used > self.ram.arena.budget and self.ram.shrink() and self.spiller is not None:
            self.spiller.press()
        self._room.set()
        for load in list(self._filling):
            load.advance()

    def _removed(self, block: RamBlock, cause: str) -> None:
        self.removals[cause] += 1
        if cause == "evicted" and block.used:
            self.histograms["ram_eviction_age_seconds"].observe(self._clock() - block.used)
        self.journal.tell("removed", "ram", block.meta, cause)
        if self.spiller is not None:
            self.spiller.left_ram(block)

    def _committed(self, plan: CommitPlan, outcome: CommitOutcome) -> None:
        self.histograms["commit_seconds"].observe(outcome.seconds)
        if outcome.stored:
            for encoded, _ in plan.blocks:
                self.journal.tell("spilled", "ssd", encoded.meta)
        if outcome.removed:
            for cause, entries in (("evicted", plan.victims), ("removed", plan.doomed)):
                for entry in entries:
                    self.journal.tell("removed", "ssd", entry, cause)

    def _is_in_other_tier(self, key: bytes, tier: Tier) -> bool:
        if tier == "ssd":
            return key in self.ram.blocks
        return self.ssd is not None and key in self.ssd

    def _damaged(self, key: bytes, reason: str) -> None:
        assert self.ssd is not None
        log.warning("block %s on the SSD is damaged (%s); it is a miss from now on", key[:8].hex(), reason)
        self.ssd.damaged(key, reason)

    # -- for operators

    def now(self) -> float:
        """The clock that ages are measured with, in seconds."""
        return self._clock()

    def leases_of(self, owner: Hashable) -> list[Load]:
        """The leases that ``owner`` holds."""
        state = self._owners.get(owner)
        return list(state.leases.values()) if state is not None else []

    def lease_count(self, owner: Hashable) -> int:
        """How many leases ``owner`` holds."""
        state = self._owners.get(owner)
        return len(state.leases) if state is not None else 0

    def reserved_bytes_of(self, owner: Hashable) -> int:
        """Payload bytes that ``owner`` has reserved and not completed."""
        state = self._owners.get(owner)
        return state.reserved_bytes if state is not None else 0

    def nbytes_of(self, key: bytes) -> int | None:
        """Payload bytes of a block; None when it is in neither tier."""
        block = self.ram.blocks.get(key)
        if block is not None:
            return block.meta.nbytes
        record = self.ssd.meta(key) if self.ssd is not None else None
        return record.nbytes if record is not None else None

    def held(self) -> dict[str, int]:
        """Gauges: leases, leased blocks, reservations, reserved bytes, memory kept from a vanished writer."""
        owners = self._owners.values()
        return {
            "leases": sum(len(state.leases) for state in owners),
            "leased_bytes": sum(load.nbytes for state in owners for load in state.leases.values()),
            "leased_blocks": sum(len(load.blocks) for state in owners for load in state.leases.values()),
            "reservations": sum(len(state.reservations) for state in owners),
            "reserved_bytes": self._reserved_bytes(),
            "seized_blocks": len(self._seized),
            "loads_filling": len(self._filling),
        }

    def register_namespace(self, namespace: bytes, descriptor: Mapping[str, object]) -> None:
        """Know a namespace from now on; the SSD tier writes it down with the next commit."""
        if self.ssd is not None:
            self.ssd.register_namespace(namespace, dict(descriptor))

    async def settle_ssd(self) -> None:
        """Have what was removed from the SSD tier's index also removed from the disk."""
        if self.spiller is not None:
            await self.spiller.commit_pending()

    def resize_ram(self, budget: int) -> int:
        """Change the RAM budget; how many bytes are still over it. Blocks leave as they become clean and unread."""
        over = self.ram.resize(budget)
        if over and self.spiller is not None:
            self.spiller.press()
        return over

    # -- settings

    def apply(self, settings: StoreSettings) -> None:
        """Use other settings from now on (what is bounded by thread counts needs a restart)."""
        self.settings = replace(settings, restore_parallel=self.settings.restore_parallel)
        if self.spiller is not None:
            self.spiller.settings = settings.spill
            self.spiller.press()
