"""Slots that engines write into: given for an offer of blocks, then completed, given up, or withdrawn.

Runs on the event loop's thread; nothing here waits for the disk, only for room.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omlxd.policy.base import RequestContext
from omlxd.storage.blocks import BlockMeta
from omlxd.storage.owners import Owners, Reservation
from omlxd.storage.requests import request
from omlxd.storage.where import Where

if TYPE_CHECKING:
    from omlxd.storage.ram import RamBlock, RamTier
    from omlxd.storage.spill import Spiller


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


class Reservations:
    """Gives slots and takes them back."""

    def __init__(
        self,
        ram: RamTier,
        owners: Owners,
        ids: Iterator[int],
        *,
        where: Callable[[bytes], Where],
        clock: Callable[[], float],
        max_owner_bytes: int,
    ) -> None:
        """``ids`` numbers the reservations; ``max_owner_bytes``: payload bytes that one owner may have reserved at once."""
        self.max_owner_bytes = max_owner_bytes
        self.spiller: Spiller | None = None
        self.closing = False
        self.waiting = 0
        """Stores that wait for room."""
        self.too_large: dict[bytes, int] = {}
        """By namespace: payload bytes of the smallest block that was declined since the RAM tier can never hold it."""
        self._ram = ram
        self._owners = owners
        self._ids = ids
        self._where = where
        self._clock = clock
        self._room = asyncio.Event()
        self._requests = itertools.count(1)

    async def reserve(
        self,
        owner: Hashable,
        chain: Sequence[bytes],
        metas: Sequence[BlockMeta],
        *,
        block_tokens: int,
        timeout: float,
        running: RequestContext | None = None,
    ) -> tuple[Offer, RequestContext]:
        """Reserve slots for ``metas``, the last blocks of ``chain``; see ``Store.prepare_store``.

        ``running``: the request that stores them, where it has loaded or stored before. Returns also the
        request's context.
        """
        ctx = request(f"store-{next(self._requests)}", chain, block_tokens, running)
        # What RAM declined would not come to the SSD either, whose policy is asked when the block leaves RAM.
        ctx.may_be_declined = self.spiller is None
        deadline = self._clock() + timeout
        offer = Offer()
        wanted = self._sort(metas, offer)
        held = [key for key in chain if self._ram.is_ready(key)]
        while True:
            blocks = self._slots(owner, [meta for _, meta in wanted], held, ctx)
            if blocks is not None:
                break
            if self.closing:
                offer.declined["shutting_down"] += len(wanted)
                wanted, blocks = [], []
                break
            left = deadline - self._clock()
            if left <= 0 or self._ram.declined or not self._can_wait():
                self._ram.note_access(held, ctx)
                # Blocks of this very chain may be in the way. On the SSD they can be had again, so they may leave for their tail.
                protected = held if self.spiller is None else []
                wanted, blocks = self._some_slots(owner, wanted, protected, ctx, offer)
                break
            if self.spiller is not None:
                self.spiller.press()
            self._room.clear()
            self.waiting += 1
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._room.wait(), left)
            finally:
                self.waiting -= 1
            offer = Offer()
            wanted = self._sort(metas, offer)
            held = [key for key in held if self._ram.is_ready(key)]
        state = self._owners.of(owner)
        now = self._clock()
        for (index, _), block in zip(wanted, blocks, strict=True):
            reservation = next(self._ids)
            state.reservations[reservation] = Reservation(block, now)
            state.reserved_bytes += block.meta.nbytes
            offer.reserved.append(Reserved(index, reservation, block))
        return offer, ctx

    def room_may_be(self) -> None:
        """Something gave room: who waits for some tries again."""
        self._room.set()

    def overdue(self, seconds: float) -> list[RamBlock]:
        """Blocks that have been reserved for longer than ``seconds`` and are not written yet, each of them once.

        They count no longer as bytes that will have to be written: others may store as much.
        """
        then = self._clock() - seconds
        return [block for owner in self._owners for block in owner.withdraw_older(then)]

    def _sort(self, metas: Sequence[BlockMeta], offer: Offer) -> list[tuple[int, BlockMeta]]:
        """What has to be written; what is here, or cannot be, is noted in ``offer``."""
        wanted: list[tuple[int, BlockMeta]] = []
        for index, meta in enumerate(metas):
            where = self._where(meta.key)
            coming = where is Where.REMOTE and meta.key in self._ram.blocks
            if where is Where.RAM or where is Where.SSD or coming:
                offer.present += 1
            elif where is Where.PENDING:
                offer.declined["pending"] += 1
            elif not self._ram.could_ever_fit(meta.nbytes):
                offer.declined["too_large"] += 1
                least = self.too_large.get(meta.namespace, meta.nbytes)
                self.too_large[meta.namespace] = min(least, meta.nbytes)
            else:
                wanted.append((index, meta))
        return wanted

    def _slots(
        self, owner: Hashable, metas: Sequence[BlockMeta], held: Sequence[bytes], ctx: RequestContext
    ) -> list[RamBlock] | None:
        """Slots for all of ``metas``, or None."""
        if not metas:
            self._ram.note_access(held, ctx)
            return []
        nbytes = sum(meta.nbytes for meta in metas)
        if self._refusal(owner, nbytes, len(metas), 0):
            self._ram.declined = False
            return None
        return self._ram.reserve(metas, held, ctx)

    def _refusal(self, owner: Hashable, nbytes: int, blocks: int, taken: int) -> str:
        """Why ``nbytes`` more, beside ``taken`` of the same request, can't be given now whatever room there is; empty: they can.

        ``no_room``: the owner has reserved as much as it may; ``ssd_behind``: as much as may be dirty is. One block of any
        size may come when nothing else is there.
        """
        has = self._owners.known(owner).reserved_bytes + taken
        if has + nbytes > self.max_owner_bytes and (has or blocks > 1):
            return "no_room"
        if self.spiller is None:
            return ""
        waiting = self.spiller.dirty_bytes + self._owners.coming_bytes() + taken
        kept = waiting + nbytes <= self.spiller.settings.max_dirty_bytes or (not waiting and blocks == 1)
        return "" if kept else "ssd_behind"

    def _can_wait(self) -> bool:
        """Is anything going to give room?"""
        if self.spiller is not None and (self.spiller.dirty_blocks or self.spiller.busy):
            return True
        return any(owner.reservations or owner.leases for owner in self._owners)

    def _some_slots(
        self,
        owner: Hashable,
        wanted: list[tuple[int, BlockMeta]],
        held: Sequence[bytes],
        ctx: RequestContext,
        offer: Offer,
    ) -> tuple[list[tuple[int, BlockMeta]], list[RamBlock]]:
        """As many as there is room for, heads first; the rest is declined.

        Halves are tried, not blocks one by one: each try looks at all that was given so far.
        """
        blocks: list[RamBlock] = []
        nbytes = 0
        step = len(wanted)
        while left := wanted[len(blocks) : len(blocks) + step]:
            metas = [meta for _, meta in left]
            size = sum(meta.nbytes for meta in metas)
            refusal = self._refusal(owner, size, len(metas), nbytes)
            some = None if refusal else self._ram.reserve(metas, [*held, *(block.meta.key for block in blocks)], ctx)
            if some:
                blocks += some
                nbytes += size
            elif len(metas) > 1:
                step = len(metas) // 2
            else:
                reason = refusal or ("less_worth" if self._ram.declined else "no_room")
                offer.declined[reason] += len(wanted) - len(blocks)
                break
        return wanted[: len(blocks)], blocks
