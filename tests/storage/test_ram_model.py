"""The RAM tier against a simple model: which blocks there are, whose bytes they hold, what may leave."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from omlxd.policy.base import RequestContext
from omlxd.storage.arena import Arena
from omlxd.storage.blocks import BlockMeta
from omlxd.storage.ram import RamBlock, RamTier

PAGE = 4096
NAMESPACE = b"n" * 32
KEYS = [bytes([number]) * 36 for number in range(40)]


def meta(key: bytes, nbytes: int) -> BlockMeta:
    return BlockMeta(key, NAMESPACE, nbytes, None, 0)


def mark(block: RamBlock) -> bytes:
    """The bytes that this block, and no other, holds at its beginning."""
    return id(block).to_bytes(8, "little")


class RamTierMachine(RuleBasedStateMachine):
    """Every block is marked when it is reserved; whoever has a right to it must find its mark."""

    pending = Bundle("pending")
    reading = Bundle("reading")
    held = Bundle("held")

    @initialize(policy=st.sampled_from(["lru", "arc"]), pages=st.integers(8, 48), segment=st.integers(4, 24))
    def begin(self, policy: str, pages: int, segment: int) -> None:
        self.tier = RamTier(Arena(pages * PAGE, segment_bytes=segment * PAGE, page_bytes=PAGE), policy)
        self.readers: dict[RamBlock, int] = {}
        self.writers: set[RamBlock] = set()
        self.holders: dict[RamBlock, int] = {}
        self.removed: list[RamBlock] = []
        self.tier.on_removed = lambda block, cause: self.removed.append(block)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.arena.close()

    @rule(
        target=pending,
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True),
        held=st.lists(st.sampled_from(KEYS), max_size=4, unique=True),
        size=st.integers(1, 6 * PAGE),
    )
    def reserve(self, keys: list[bytes], held: list[bytes], size: int) -> object:
        keys = [key for key in keys if key not in self.tier.blocks]
        if not keys:
            return multiple()
        before = dict(self.tier.blocks)
        protected = [key for key in held if self.tier.is_ready(key)]
        ctx = RequestContext("reserve")
        blocks = self.tier.reserve([meta(key, size) for key in keys], protected, ctx)
        self.tier.on_request_finished(ctx)
        gone = [block for key, block in before.items() if self.tier.blocks.get(key) is not block]
        for block in gone:
            assert not self.readers.get(block), "a block that is read was evicted"
            assert block not in self.writers, "a block that is written was evicted"
            assert block.meta.key not in protected, "a block of the same request was evicted"
            assert block in self.removed
        if blocks is None:
            return multiple()
        assert [block.meta.key for block in blocks] == keys
        for block in blocks:
            view = self.tier.view(block)
            assert len(view) == size
            view[: min(8, size)] = mark(block)[: min(8, size)]
            self.writers.add(block)
        return multiple(*blocks)

    @rule(block=consumes(pending), success=st.booleans())
    def complete(self, block: RamBlock, success: bool) -> None:
        self.writers.discard(block)
        detached = block.detached
        assert self.tier.complete(block, success=success) is (success and not detached)
        assert self.tier.is_ready(block.meta.key) is (success and not detached) or detached

    @rule(target=reading, key=st.sampled_from(KEYS), counted=st.booleans())
    def read(self, key: bytes, counted: bool) -> object:
        if not self.tier.is_ready(key):
            return multiple()
        block = self.tier.blocks[key]
        if counted:
            self.tier.prepare_load([key], RequestContext("read"))
        else:
            self.tier.pin_block(block)
        self.readers[block] = self.readers.get(block, 0) + 1
        return block

    @rule(blocks=st.lists(consumes(reading), max_size=5))
    def complete_reads(self, blocks: list[RamBlock]) -> None:
        for block in blocks:
            self.readers[block] -= 1
        self.tier.complete_reads(blocks)

    @rule(target=held, key=st.sampled_from(KEYS))
    def hold(self, key: bytes) -> object:
        block = self.tier.blocks.get(key)
        if block is None or block in self.writers:
            return multiple()
        # As the spiller does: what it holds, it also reads.
        self.tier.pin_block(block)
        self.tier.hold(block)
        self.readers[block] = self.readers.get(block, 0) + 1
        self.holders[block] = self.holders.get(block, 0) + 1
        return block

    @rule(block=consumes(held))
    def unhold(self, block: RamBlock) -> None:
        self.holders[block] -= 1
        self.readers[block] -= 1
        self.tier.unhold(block)
        self.tier.complete_read(block)

    @rule(key=st.sampled_from(KEYS))
    def detach(self, key: bytes) -> None:
        block = self.tier.blocks.get(key)
        if block is not None:
            self.tier.detach(block)
            assert key not in self.tier.blocks

    @rule(pages=st.integers(4, 48))
    def resize(self, pages: int) -> None:
        over = self.tier.resize(pages * PAGE)
        assert over == max(0, self.tier.arena.used - pages * PAGE)
        while self.tier.shrinks:
            self.tier.shrink()

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=8, unique=True))
    def note_access(self, keys: list[bytes]) -> None:
        ctx = RequestContext("touch")
        self.tier.note_access(keys, ctx)
        self.tier.on_request_finished(ctx)

    @invariant()
    def whoever_may_look_finds_the_right_bytes(self) -> None:
        if not hasattr(self, "tier"):
            return
        mine = {block for block, count in self.readers.items() if count}
        mine |= self.writers | set(self.tier.blocks.values()) | {b for b, count in self.holders.items() if count}
        for block in mine:
            assert block.extent is not None, "its memory was given back"
            length = min(8, block.meta.nbytes)
            assert bytes(self.tier.view(block)[:length]) == mark(block)[:length]

    @invariant()
    def the_figures_add_up(self) -> None:
        if not hasattr(self, "tier"):
            return
        tier, arena = self.tier, self.tier.arena
        extents = [block.extent for block in tier.blocks.values()]
        assert len(set(extents)) == len(extents)
        in_blocks = sum(extent.nbytes for extent in extents if extent is not None)
        assert arena.used == in_blocks + tier.detached_bytes
        evictable = sum(b.extent.nbytes for b in tier.blocks.values() if b.chunk.ref_cnt == 0 and b.extent is not None)
        assert tier.evictable_bytes == evictable
        for block in tier.blocks.values():
            status = -1 if block in self.writers else self.readers.get(block, 0)
            assert block.chunk.ref_cnt == status
        assert tier.by_namespace[NAMESPACE][0] == len(tier.blocks)
        assert tier.by_namespace[NAMESPACE][1] == sum(block.meta.nbytes for block in tier.blocks.values())


RamTierMachine.TestCase.settings = settings(
    max_examples=400 if os.environ.get("OMLXD_LONG") else 60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestRamTier = RamTierMachine.TestCase


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_waste_of_mixed_sizes_under_churn_is_bounded(policy: str) -> None:
    """Blocks of 50 KB to 12 MB come and go in a full tier: what holes cost stays small, and every block that fits is taken."""
    import random

    rng = random.Random(7)
    budget = 256 << 20
    tier = RamTier(Arena(budget, segment_bytes=64 << 20), policy)
    sizes = [50_000, 300_000, 1 << 20, 2_500_000, 5 << 20, 12_000_000]
    refused = 0
    used: list[float] = []
    for number in range(3000):
        one = meta(number.to_bytes(36, "big"), rng.choice(sizes))
        ctx = RequestContext("churn")
        blocks = tier.reserve([one], (), ctx)
        tier.on_request_finished(ctx)
        if blocks is None:
            refused += 1
            continue
        tier.complete(blocks[0], success=True)
        if number > 500:
            used.append(tier.arena.used / budget)
            assert tier.arena.waste <= 0.05 * tier.arena.used
    assert refused == 0
    assert sum(used) / len(used) > 0.85, "more than 15 % of the tier lies in holes"
    tier.arena.close()


def test_a_block_that_can_never_fit_is_known_beforehand() -> None:
    tier = RamTier(Arena(64 * PAGE, segment_bytes=16 * PAGE, page_bytes=PAGE))
    assert tier.could_ever_fit(64 * PAGE)
    assert not tier.could_ever_fit(64 * PAGE + 1)
    assert tier.reserve([meta(KEYS[0], 64 * PAGE)], (), None) is not None, "larger than a segment: gets its own"
    tier.arena.close()
