"""The RAM tier: a `ChunkManager` whose room is bytes of shared memory.

A chunk's life is the manager's; this adds where its bytes are. A block can be *detached*: no longer found under its key
(removed, cleared, or its writer has vanished), while its memory stays as it is until nobody reads, writes or holds it.
That is how ``clear`` works on blocks that are leased, and why no reader ever sees another block's bytes.

Runs on the event loop's thread. Views may be read and written by any thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from omlxd.policy.base import ChunkStatus, RequestContext, Victims
from omlxd.storage import metal
from omlxd.storage.arena import STEP_BYTES, Arena, Extent
from omlxd.storage.blocks import BlockMeta
from omlxd.storage.chunks import ChunkManager

if TYPE_CHECKING:
    import mlx.core as mx

__all__ = ["ChunkManager", "RamBlock", "RamTier"]

Removed = Callable[["RamBlock", str], None]


class RamBlock:
    """A block in RAM."""

    __slots__ = ("_array", "chunk", "clean", "detached", "extent", "holds", "meta", "restoring", "used", "writing")

    def __init__(self, meta: BlockMeta, extent: Extent) -> None:
        self.meta = meta
        self.extent: Extent | None = extent
        """Where its bytes are; None once they are given back."""
        self.chunk: ChunkStatus
        """Its status: -1 being written, 0 ready, n read by n."""
        self.clean = False
        """Is it on the SSD too, or has a tier it came from and need not go there?"""
        self.restoring = False
        """Is it the SSD that writes it (rather than an engine)?"""
        self.writing = True
        self.detached = False
        self.holds = 0
        """Reasons beyond reading to keep the memory of a detached block."""
        self.used = 0.0
        """When an engine last stored or had it (the store's clock); 0 when that is not known."""
        self._array: mx.array | None = None

    def __repr__(self) -> str:
        return f"<RamBlock {self.meta.key[:4].hex()} ref_cnt={self.chunk.ref_cnt} {self.meta.nbytes} bytes>"


class RamTier(ChunkManager):
    """Blocks in an arena, evicted by a policy when the arena has no room.

    ``on_removed(block, cause)`` is told of every readable block that leaves (``evicted``, ``removed``, ``cleared``).
    """

    def __init__(self, arena: Arena, policy: str = "lru", *, on_removed: Removed | None = None) -> None:
        super().__init__(0, policy)
        self.policy_name = policy
        self.arena = arena
        self.blocks: dict[bytes, RamBlock] = {}
        """All that is found under a key, readable or not. Read-only for others."""
        self.on_removed = on_removed
        self.evictable_bytes = 0
        """Bytes (whole pages) that evicting everything would free."""
        self.detached_bytes = 0
        """Bytes (whole pages) of blocks that are gone but still in somebody's hands."""
        self.by_namespace: defaultdict[bytes, list[int]] = defaultdict(lambda: [0, 0])
        """Blocks and payload bytes, by namespace id."""
        self.declined = False
        """Whether the last refusal to reserve came from the policy: what would leave is worth more to it."""
        self._offered: dict[bytes, BlockMeta] = {}
        self._placed: dict[bytes, Extent] = {}

    def could_ever_fit(self, nbytes: int) -> bool:
        """Is the budget large enough for a block of ``nbytes``?"""
        page = self.arena.page_bytes
        return -(-nbytes // page) * page <= self.arena.budget

    def is_ready(self, key: bytes) -> bool:
        """Is the block here and readable?"""
        block = self.blocks.get(key)
        return block is not None and block.chunk.ref_cnt >= 0

    # -- writing

    def reserve(
        self, metas: Sequence[BlockMeta], held: Sequence[bytes], ctx: RequestContext | None
    ) -> list[RamBlock] | None:
        """Slots for ``metas`` (none of which may be here yet), or None when there is no room for all of them.

        ``held``: readable keys that belong to the same request: they are accounted to it and not evicted for it.
        """
        self._offered = {meta.key: meta for meta in metas}
        self.declined = False
        try:
            prepared = self.prepare_store([*held, *self._offered], ctx)
        finally:
            self._offered = {}
        if prepared is None:
            return None
        blocks = [self.blocks[key] for key in prepared.keys_to_store]
        for block in blocks:
            chunk = self._policy.get(block.meta.key)
            assert chunk is not None, "what was just inserted is there"
            block.chunk = chunk
        return blocks

    def complete(self, block: RamBlock, *, success: bool) -> bool:
        """The slot is written, or nobody writes it any more; is the block readable now?"""
        block.writing = False
        if block.detached:
            self._free_if_unused(block)
            return False
        self.complete_store([block.meta.key], success)
        return success

    # -- reading

    def view(self, block: RamBlock) -> memoryview:
        """The payload's memory, writable."""
        assert block.extent is not None, "a block's memory is there as long as anybody has reason to look"
        return self.arena.view(block.extent, block.meta.nbytes)

    def array(self, block: RamBlock) -> mx.array:
        """The payload as a flat ``uint8`` array: over the slot on Metal (kept with the block), a copy elsewhere."""
        if block._array is not None:
            return block._array
        array = metal.adopt(self.view(block).toreadonly())
        if metal.is_zero_copy():
            block._array = array
        return array

    def begin_reads(self, blocks: Sequence[RamBlock]) -> None:
        """Pin readable ``blocks``, none of them detached. With ``note_reads``, in the same step: ``prepare_load`` of their keys."""
        mark_non_evictable = self._policy.mark_non_evictable
        for block in blocks:
            chunk = block.chunk
            assert chunk.ref_cnt >= 0, "only readable blocks are read"
            chunk.ref_cnt = readers = chunk.ref_cnt + 1
            if readers == 1:
                self._num_evictable -= 1
                mark_non_evictable(block.meta.key)
                self.evictable_bytes -= self._size(block)

    def note_reads(self, blocks: Sequence[RamBlock], ctx: RequestContext) -> None:
        """Tell the policy that the request of ``ctx`` reads ``blocks``."""
        self._note_load([block.meta.key for block in blocks], ctx)

    def complete_read(self, block: RamBlock) -> None:
        """Undo one ``begin_reads`` or ``pin_block``, also of a block that has been detached since."""
        self.complete_reads((block,))

    def complete_reads(self, blocks: Sequence[RamBlock]) -> None:
        """As ``complete_read`` for each of ``blocks``, in one step."""
        mark_evictable = self._policy.mark_evictable
        for block in blocks:
            chunk = block.chunk
            assert chunk.ref_cnt > 0, "a read is undone once"
            chunk.ref_cnt = readers = chunk.ref_cnt - 1
            if block.detached:
                self._free_if_unused(block)
            elif not readers:
                self._num_evictable += 1
                mark_evictable(block.meta.key)
                self.evictable_bytes += self._size(block)

    def pin_block(self, block: RamBlock) -> None:
        """Read a readable block without it counting as an access."""
        if block.detached:
            block.chunk.ref_cnt += 1
        else:
            self.pin(block.meta.key)

    def switch_policy(self, name: str) -> None:
        """As the manager's; remembers the name."""
        super().switch_policy(name)
        self.policy_name = name

    def note_access(self, keys: Sequence[bytes], ctx: RequestContext) -> None:
        """``keys`` were used by the request of ``ctx``, here or elsewhere; those that are not readable are left out."""
        ready = [key for key in keys if (block := self.blocks.get(key)) is not None and block.chunk.ref_cnt >= 0]
        if ready:
            state = self._state(ctx)
            state.reused.update(key for key in ready if key not in state.inserted)
            self._see(state, ready, ctx)

    # -- removing

    def detach(self, block: RamBlock, cause: str = "removed") -> None:
        """Make it a miss at once; its memory is given back when nobody uses it any more."""
        if block.detached:
            return
        key, chunk = block.meta.key, block.chunk
        self._policy.remove(key)
        del self.blocks[key]
        if chunk.ref_cnt == 0:
            self._num_evictable -= 1
            self.evictable_bytes -= self._size(block)
        self._free_slots.append(chunk.chunk_id)
        block.detached = True
        self.detached_bytes += self._size(block)
        self._account(block, -1)
        if not block.writing and self.on_removed is not None:
            self.on_removed(block, cause)
        chunk.ref_cnt = max(0, chunk.ref_cnt)
        self._free_if_unused(block)

    def hold(self, block: RamBlock) -> None:
        """Keep the memory of ``block`` even when it is detached and nobody reads it."""
        block.holds += 1

    def unhold(self, block: RamBlock) -> None:
        """Undo one :meth:`hold`."""
        block.holds -= 1
        self._free_if_unused(block)

    def _free_if_unused(self, block: RamBlock) -> None:
        if block.detached and not block.writing and not block.holds and not block.chunk.ref_cnt and block.extent:
            self.detached_bytes -= self._size(block)
            self._give_back(block)

    # -- budget

    def resize(self, budget: int) -> int:
        """Change the budget in bytes. Returns how many bytes are still over it; `shrink`, called again, brings them down."""
        self.arena.resize(budget)
        return self.shrink()

    def shrink(self) -> int:
        """Take a step towards the budget: evict, and give memory back, some 20 ms at most. Returns the bytes still over it.

        Blocks that are read or dirty stay; call it again when some have become free, and while ``shrinks`` says so.
        """
        over = self.arena.used - self.arena.budget
        if over > 0 and self.evictable_bytes:
            goal = min(over, self.evictable_bytes, STEP_BYTES)
            freed = 0

            def enough(key: bytes, chunk: ChunkStatus) -> bool:
                nonlocal freed
                freed += self._size(self.blocks[key])
                return freed >= goal

            victims = self._policy.evict_until(enough, ())
            if victims:
                self._take_out(victims)
        vacating = set(self.arena.to_vacate())
        if vacating:  # where single pages cannot be given back, whole segments have to be emptied
            for block in [block for block in self.blocks.values() if block.extent in vacating]:
                if block.chunk.ref_cnt == 0:
                    self.detach(block, "evicted")
        if self.arena.gives_back:
            self.arena.trim(STEP_BYTES)
            self.arena.resize(self.arena.budget)  # segments that are empty now
        return max(0, self.arena.used - self.arena.budget)

    @property
    def shrinks(self) -> bool:
        """Would another step of `shrink` do something now?"""
        over = self.arena.used > self.arena.budget
        return (over and bool(self.evictable_bytes)) or self.arena.gives_back

    # -- the manager's hooks

    def _make_room(self, keys: Sequence[bytes], protected: Collection[bytes]) -> Victims | None:
        page = self.arena.page_bytes
        sizes = {key: -(-self._offered[key].nbytes // page) * page for key in keys}
        need = sum(sizes.values())
        self._note_capacity()
        placed: dict[bytes, Extent] = {}
        victims: Victims = []
        room_sure = False
        for key in keys:
            extent = self.arena.allocate(self._offered[key].nbytes)
            if extent is None:
                if not room_sure:
                    safe = sum(self._size(b) for k in protected if (b := self.blocks.get(k)) and b.chunk.ref_cnt == 0)
                    if need > self.arena.budget - self.arena.used + self.evictable_bytes - safe:
                        self._refuse(placed, victims)
                        return None
                    room_sure = True
                more = self._victims_for(sizes[key], need, protected)
                if more is None:
                    self.declined = self._policy.declined
                    self._refuse(placed, victims)
                    return None
                for victim, _ in more:
                    self._give_back(self.blocks[victim])
                victims += more
                extent = self.arena.allocate(self._offered[key].nbytes)
                assert extent is not None, "fits_after said so"
            placed[key] = extent
            need -= sizes[key]
        self._placed = placed
        return victims

    def _victims_for(self, size: int, need: int, protected: Collection[bytes]) -> Victims | None:
        """Victims in the policy's order until ``size`` bytes fit in one run, and ``need`` bytes in all."""
        gone: list[Extent] = []
        short = need - (self.arena.budget - self.arena.used)
        freed = 0

        def enough(key: bytes, chunk: ChunkStatus) -> bool:
            nonlocal freed
            extent = self.blocks[key].extent
            assert extent is not None
            gone.append(extent)
            freed += extent.nbytes
            return freed >= short and self.arena.fits_after(gone, size)

        return self._policy.evict_until(enough, protected)

    def _refuse(self, placed: dict[bytes, Extent], victims: Victims) -> None:
        """Undo what was done for room that can't be made."""
        for extent in placed.values():
            self.arena.free(extent)
        # Where pinned blocks scatter the free room, some victims may have left in vain; they are gone all the same.
        self._take_out(victims)

    def _note_capacity(self) -> None:
        """Policies count in chunks: tell them how many of the present mean size the budget holds."""
        if self.blocks and self.arena.used:
            self._policy.cache_capacity = max(1, self.arena.budget * len(self.blocks) // self.arena.used)
        else:
            self._policy.cache_capacity = max(1, self.arena.budget // max(1, self.arena.page_bytes))

    def _allocate_slot(self, key: bytes) -> int:
        block = RamBlock(self._offered[key], self._placed.pop(key))
        self.blocks[key] = block
        self._account(block, 1)
        return self._allocate_used_slot()

    def _free_slot(self, key: bytes, chunk: ChunkStatus) -> None:
        super()._free_slot(key, chunk)
        block = self.blocks.pop(key)
        self._account(block, -1)
        if chunk.ref_cnt == 0:
            self.evictable_bytes -= self._size(block)
            if self.on_removed is not None:
                self.on_removed(block, "evicted")
        if block.extent is not None:
            self._give_back(block)

    def _became_evictable(self, key: bytes, chunk: ChunkStatus) -> None:
        self.evictable_bytes += self._size(self.blocks[key])

    def _became_busy(self, key: bytes, chunk: ChunkStatus) -> None:
        self.evictable_bytes -= self._size(self.blocks[key])

    # -- inside

    def _size(self, block: RamBlock) -> int:
        page = self.arena.page_bytes
        return -(-block.meta.nbytes // page) * page

    def _account(self, block: RamBlock, sign: int) -> None:
        totals = self.by_namespace[block.meta.namespace]
        totals[0] += sign
        totals[1] += sign * block.meta.nbytes

    def _give_back(self, block: RamBlock) -> None:
        assert block.extent is not None
        block._array = None
        self.arena.free(block.extent)
        block.extent = None
