"""The tiers as one store: RAM, the SSD, and what is shared with other machines.

Owners (connections) lease blocks and reserve slots; what an owner holds ends with it. All methods run on the event
loop's thread; nothing here waits for the disk.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from omlxd.storage.blocks import BlockMeta
from omlxd.storage.books import Books
from omlxd.storage.departures import Departures
from omlxd.storage.elastic import Elastic
from omlxd.storage.figures import FAST_SECONDS, Histogram
from omlxd.storage.journal import Tier
from omlxd.storage.leasing import Leasing
from omlxd.storage.loads import Load, Part
from omlxd.storage.lower import Lower, Lowers
from omlxd.storage.outer import Outer
from omlxd.storage.owners import Owners, UnknownId
from omlxd.storage.ram import RamBlock, RamTier
from omlxd.storage.readying import Readying
from omlxd.storage.requests import goes_on, request
from omlxd.storage.reservations import Offer, Reservations, Reserved
from omlxd.storage.restore import Restorer
from omlxd.storage.spill import Spiller, SpillSettings
from omlxd.storage.ssd import SsdTier
from omlxd.storage.ssd_index import Entry
from omlxd.storage.tier import OuterTier, TierHost
from omlxd.storage.where import Where
from omlxd.storage.whereabouts import Whereabouts

__all__ = ["Load", "Offer", "Part", "Reserved", "Store", "StoreSettings", "UnknownId", "Where"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What the store may use."""

    spill: SpillSettings = field(default_factory=SpillSettings)
    restore_parallel: int = 4
    """Blocks read from a lower tier at once."""
    restore_ahead: int = 16
    """Blocks asked for beyond what a load has; bounds what one load can claim at once."""
    max_reserved_bytes: int = 1 << 30
    """Payload bytes that one owner may have reserved at once."""
    seize_seconds: float = 30.0
    """How long memory is kept from others that a vanished owner has said it does not use, or that an operator took back."""
    reserve_seconds: float = 60.0
    """How long a reserved slot may stay unwritten before others may store the block."""


class Store:
    """RAM tier, SSD tier where there is one, and the outer tiers that are attached."""

    def __init__(
        self,
        ram: RamTier,
        ssd: SsdTier | None,
        settings: StoreSettings,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.ram = ram
        self.ssd: SsdTier | None = None
        self.settings = settings
        self.books = Books(self._is_in_other_tier, clock)
        self.counts = self.books.counts
        self.removals = self.books.removals
        self.histograms = self.books.histograms
        self.journal = self.books.journal
        self.closing = False
        self._closed = self._started = False
        self._clock = clock
        self._ids = itertools.count(1)
        self._owners = Owners()
        self.lower = Lowers()
        """The tiers below RAM, in the order in which they are tried."""
        self._whereabouts = Whereabouts(ram, self.lower)
        self.where = self._whereabouts.where
        self.lookup = self._whereabouts.lookup
        self.nbytes_of = self._whereabouts.nbytes_of
        self._departures = Departures(
            ram, self._owners, give_up=lambda block: self._complete(block, False), progress=self.progress
        )
        self._reservations = Reservations(
            ram,
            self._owners,
            self._ids,
            where=self.where,
            clock=clock,
            max_owner_bytes=settings.max_reserved_bytes,
        )
        self._leasing = Leasing(
            ram,
            self._owners,
            self._ids,
            clock=clock,
            counts=self.counts,
            load_seconds=self.histograms["load_seconds"],
            reuse_gap_seconds=self.histograms["ram_reuse_gap_seconds"],
            window=settings.restore_ahead,
        )
        self._writer = ThreadPoolExecutor(1, "omlxd-writer")
        self._coders = ThreadPoolExecutor(2, "omlxd-coder")
        ram.on_removed = self._removed
        self._readying = Readying(ram.arena)
        self.elastic = Elastic(ram, press=self._press, clock=clock)
        self.spiller: Spiller | None = None
        self.outer = Outer(ram, ssd, self.lower, on_progress=self.progress)
        self.restorer: Restorer[Entry] | None = None
        self._leasing.lower = self.lower
        if ssd is not None:
            self.adopt_ssd(ssd)

    def adopt_ssd(self, ssd: SsdTier) -> None:
        """Have an SSD tier from now on; also while the store runs, when its disk has come late. The store closes it."""
        self.ssd = ssd
        ssd.elsewhere = self.ram.blocks.__contains__
        self.outer.ssd = ssd
        self.spiller = self._reservations.spiller = self._leasing.spiller = Spiller(
            self.ram,
            ssd,
            self.settings.spill,
            clock=self._clock,
            writer=self._writer,
            coders=self._coders,
            on_progress=self.progress,
            on_commit=self.books.committed,
        )
        self.restorer = Restorer(
            self.ram,
            ssd,
            name="ssd",
            parallel=self.settings.restore_parallel,
            adopt=_is_clean,
            on_damage=self._damaged,
            on_progress=self.progress,
            on_restored=self.histograms["restore_seconds"].observe,
            clock=self._clock,
        )
        self.lower.insert(0, Lower("ssd", Where.SSD, ssd, self.restorer))
        if self._started:
            self.spiller.start()
            for block in self.ram.blocks.values():
                if block.chunk.ref_cnt >= 0:
                    block.clean = block.meta.key in ssd
                    if not block.clean:
                        self.spiller.catch_up(block)

    def attach(self, make: Callable[[TierHost], OuterTier], *, keep: bool = True) -> OuterTier:
        """Add an outer tier, behind the ones that are there; before ``start``.

        ``keep``: what is fetched from it goes to the SSD as well, as ``settings.spill`` says.
        """
        tier = make(TierHost(self.outer.payload, self._clock))
        restorer = Restorer(
            self.ram,
            tier,
            name=tier.name,
            parallel=self.settings.restore_parallel,
            adopt=lambda block: self._fetched(block, keep=keep),
            on_damage=tier.damaged,
            on_progress=self.progress,
            on_restored=self.histograms.setdefault(f"{tier.name}_restore_seconds", Histogram(FAST_SECONDS)).observe,
            clock=self._clock,
        )
        self.outer.tiers.append(tier)
        self.lower.append(Lower(tier.name, Where.REMOTE, tier, restorer))
        self._leasing.outer = self.outer.tiers
        self._leasing.asking = self.outer.asking
        return tier

    # -- life

    def start(self) -> None:
        """Start the writer, and what the outer tiers do, on the running loop."""
        self._started = True
        self.outer.start()
        if self.spiller is not None:
            self.spiller.start()

    async def stop(self, progress: Callable[[int], None] | None = None) -> None:
        """Write what is dirty (``progress`` is told the bytes to go), then close all tiers."""
        self.closing = self._reservations.closing = True
        self._leasing.stop()
        self.progress()
        while self._reservations.waiting:  # they learn that there will be no room
            await asyncio.sleep(0)
        for lower in self.lower:
            await lower.restorer.stop()
        await self.outer.stop()
        if self.spiller is not None:
            left = -1
            while self.spiller.dirty_blocks and self.spiller.dirty_blocks != left:  # stores that end now add some
                left = self.spiller.dirty_blocks
                await self.spiller.drain(progress)
            await self.spiller.stop()
        self._coders.shutdown(wait=True)
        if self.ssd is not None:
            await asyncio.get_running_loop().run_in_executor(self._writer, self.ssd.close)
        self._writer.shutdown(wait=True)
        self._closed = True
        self._readying.stop()
        await self.elastic.stop()
        self.ram.arena.close()

    # -- looking

    def to_ask_for(self, keys: Sequence[bytes], *, prefix: bool = False) -> list[bytes]:
        """Those of ``keys`` for which ``find`` would have to ask an outer tier; none where there is no such tier."""
        return self.outer.to_ask_for(keys, prefix=prefix)

    async def find(self, keys: Sequence[bytes]) -> None:
        """Ask outer tiers for ``keys`` (what ``to_ask_for`` gave); within their deadlines, whatever the outcome."""
        await self.outer.find(keys)

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
        return self._leasing.load(
            owner,
            keys,
            block_tokens=block_tokens,
            timeout=timeout,
            emit=emit,
            prefill_tokens_per_s=prefill_tokens_per_s,
            counted=counted,
            misses_of=misses_of,
        )

    def release(self, owner: Hashable, lease_id: int) -> None:
        """End a lease. Raises UnknownId when the owner has no such lease (a second release, too)."""
        self._owners.known(owner).lease(lease_id).release()
        self.progress()

    def revoke(self, lease_id: int) -> Hashable:
        """An operator ends a lease; returns its owner, who is to be told.

        The blocks stay as they are until the owner gives them back, at most ``seize_seconds`` longer. Raises UnknownId.
        """
        return self._departures.revoke(lease_id, self.settings.seize_seconds)

    def touch(self, keys: Sequence[bytes], *, block_tokens: int) -> None:
        """An engine used its own copy of these blocks (head to tail)."""
        ctx = request("touch", keys, block_tokens)
        self.ram.note_access(keys, ctx)
        self._leasing.note_use(keys, ctx)

    def prefetch(self, keys: Sequence[bytes], *, block_tokens: int) -> int:
        """Start restoring the prefix, as far as half of the RAM tier; how many blocks are to come from the SSD."""
        return 0 if self.closing else self._leasing.prefetch(keys, block_tokens=block_tokens)

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
        chain = [*ancestors, *(meta.key for meta in metas)]
        running = next((ctx for ctx in reversed(self._owners.known(owner).requests) if goes_on(ctx, chain)), None)
        offer, ctx = await self._reservations.reserve(
            owner, chain, metas, block_tokens=block_tokens, timeout=timeout, running=running
        )
        if running is None and not self.closing:
            self._owners.of(owner).requests.append(ctx)
        self._leasing.note_use(chain, ctx)
        if offer.reserved:
            self._readying.go_on()
        if metas:
            self.books.offered(metas[0].namespace, offer)
        return offer

    def complete_store(self, owner: Hashable, reservations: Sequence[int], *, success: bool) -> int:
        """The bytes of these reservations are written, or are not coming; how many blocks became readable.

        Raises:
            UnknownId: one of them is not this owner's (a second completion, too); then none is changed.
        """
        blocks = self._owners.known(owner).take_reservations(reservations)
        stored = sum(self._complete(block, success) for block in blocks)
        self.progress()
        return stored

    def _complete(self, block: RamBlock, success: bool) -> bool:
        key = block.meta.key
        readable = self.ram.complete(block, success=success)
        if readable:
            self.books.stored(block)
            if self.spiller is not None:
                self.spiller.add(block)
            self.outer.offer(block.meta)
        self._leasing.written(key, block if readable else None)
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

    def owner_gone(
        self,
        owner: Hashable,
        *,
        may_still_write: bool,
        may_still_read: bool = False,
        seconds: float | None = None,
    ) -> Callable[[], None] | None:
        """Release all that ``owner`` held.

        ``may_still_write``, ``may_still_read``: its process may live on and have the memory mapped. Slots that it was
        writing, and blocks that it was reading, are then kept from others until what is returned is called, or for at most
        ``seconds``; None is returned when nothing is kept.
        """
        if self._closed:
            return None
        return self._departures.owner_gone(
            owner, may_still_write=may_still_write, may_still_read=may_still_read, seconds=seconds
        )

    def withdraw_overdue(self) -> int:
        """Let others store what has been reserved for too long; how many blocks. The memory stays with the slow writer."""
        overdue = self._reservations.overdue(self.settings.reserve_seconds)
        for block in overdue:
            log.warning(
                "block %s is reserved and not written for too long: others may store it", block.meta.key[:8].hex()
            )
            self.counts[block.meta.namespace, "reservations_withdrawn"] += 1
            self.ram.detach(block)
            self._leasing.written(block.meta.key, None)
        return len(overdue)

    def progress(self) -> None:
        """Something gave room: whoever waits for some tries again."""
        self.elastic.advance()
        self._reservations.room_may_be()
        self._leasing.advance()

    def _press(self) -> None:
        if self.spiller is not None:
            self.spiller.press()

    def _removed(self, block: RamBlock, cause: str) -> None:
        self.books.left_ram(block, cause)
        if self.spiller is not None:
            self.spiller.left_ram(block)

    def _fetched(self, block: RamBlock, *, keep: bool) -> None:
        """A block has come from an outer tier, which will still have it: it may leave RAM unwritten."""
        if not keep:
            block.clean = True  # nothing is to write it
        elif self.spiller is not None and self.spiller.takes(block.meta.nbytes):
            self.spiller.add(block)

    def _is_in_other_tier(self, key: bytes, tier: Tier) -> bool:
        if tier == "ssd":
            return key in self.ram.blocks
        return self.ssd is not None and key in self.ssd

    def _damaged(self, key: bytes, reason: str) -> None:
        assert self.ssd is not None
        log.warning("block %s on the SSD is damaged (%s); it is a miss from now on", key[:8].hex(), reason)
        entry = self.ssd.meta(key)
        if entry is not None:
            self.books.damaged(entry)
        self.ssd.damaged(key, reason)

    # -- for operators

    def now(self) -> float:
        """The clock that ages are measured with, in seconds."""
        return self._clock()

    def leases_of(self, owner: Hashable) -> list[Load]:
        """The leases that ``owner`` holds."""
        return list(self._owners.known(owner).leases.values())

    def lease_count(self, owner: Hashable) -> int:
        """How many leases ``owner`` holds."""
        return len(self._owners.known(owner).leases)

    def reserved_bytes_of(self, owner: Hashable) -> int:
        """Payload bytes that ``owner`` has reserved and not completed."""
        return self._owners.known(owner).reserved_bytes

    def too_large(self) -> dict[bytes, int]:
        """By namespace: payload bytes of the smallest block that was declined and would not fit the RAM tier now either."""
        return {
            space: nbytes
            for space, nbytes in self._reservations.too_large.items()
            if not self.ram.could_ever_fit(nbytes)
        }

    def held(self) -> dict[str, int]:
        """Gauges: leases, leased blocks, reservations, reserved bytes, memory kept from a vanished owner."""
        return {
            **self._owners.held(),
            "seized_blocks": self._departures.seized_blocks,
            "loads_filling": len(self._leasing.filling),
        }

    def register_namespace(self, namespace: bytes, descriptor: Mapping[str, object]) -> None:
        """Know a namespace from now on; the SSD tier writes it down with the next commit."""
        self._readying.go_on()
        self.outer.register_namespace(namespace, descriptor)
        if self.ssd is not None:
            self.ssd.register_namespace(namespace, dict(descriptor))

    async def settle_ssd(self) -> None:
        """Have what was removed from the SSD tier's index also removed from the disk."""
        if self.spiller is not None:
            await self.spiller.commit_pending()

    def resize_ram(self, budget: int) -> int:
        """Configure another RAM budget; how many bytes are still over it. They leave step by step."""
        return self.elastic.configure(budget)

    # -- settings

    def apply(self, settings: StoreSettings) -> None:
        """Use other settings from now on (what is bounded by thread counts needs a restart)."""
        self.settings = replace(settings, restore_parallel=self.settings.restore_parallel)
        self._reservations.max_owner_bytes = settings.max_reserved_bytes
        self._leasing.window = settings.restore_ahead
        if self.spiller is not None:
            self.spiller.settings = settings.spill
            self.spiller.press()


def _is_clean(block: RamBlock) -> None:
    """A block has come from the SSD: it need not go there again."""
    block.clean = True
