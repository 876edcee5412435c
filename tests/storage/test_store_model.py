"""The whole store, RAM and SSD on a real disk, against a simple model: which blocks may be served, and who holds what.

A block's bytes follow from its key, so a wrong one shows wherever it is read. Between two rules the store's threads may
work or not; what is checked holds whatever they have done. ``OMLXD_LONG=1`` takes many more examples.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from omlxd.pins import Pins
from omlxd.protocol import RequestError
from omlxd.storage import upkeep
from omlxd.storage.arena import Arena
from omlxd.storage.blocks import BlockMeta
from omlxd.storage.loads import Load, Part
from omlxd.storage.pressure import Level
from omlxd.storage.ram import RamBlock, RamTier
from omlxd.storage.reservations import Reserved
from omlxd.storage.spill import SpillSettings, WriteMode
from omlxd.storage.ssd import MIN_LIMIT
from omlxd.storage.tiers import Store, StoreSettings, UnknownId, Where
from tests.storage.ssd_store import PLENTY, Clock, open_tier, payload_of

PAGE = 16 << 10
CHAINS, LENGTH = 4, 6
SPACES = [b"n" * 32, b"o" * 32]
POLICIES = ["lru", "arc", "prefix"]
OWNERS = ["one", "two", "three"]
BUDGET = 24 * PAGE
TIMEOUT = 60.0

T = TypeVar("T")


def chain(number: int) -> list[BlockMeta]:
    keys = [f"{number}-{at}".encode().ljust(36, b".") for at in range(LENGTH)]
    sizes = random.Random(number)
    return [
        BlockMeta(key, SPACES[number % 2], sizes.randint(1, 4 * PAGE), keys[at - 1] if at else None, at)
        for at, key in enumerate(keys)
    ]


ALL = [chain(number) for number in range(CHAINS)]
METAS = {meta.key: meta for metas in ALL for meta in metas}
PAYLOADS = {key: payload_of(key, meta.nbytes) for key, meta in METAS.items()}

chains = st.integers(0, CHAINS - 1)
owners = st.sampled_from(OWNERS)
numbers = st.integers(0, 1 << 16)


@dataclass(eq=False)
class Lease:
    """A load, as its owner sees it."""

    owner: str
    load: Load
    parts: list[Part]

    @property
    def blocks(self) -> list[RamBlock]:
        return [block for part in self.parts for block in part.blocks]


@dataclass(eq=False)
class Kept:
    """What a vanished owner may go on using."""

    give_back: Callable[[], None]
    leases: list[Lease] = field(default_factory=list)
    slots: list[memoryview] = field(default_factory=list)
    blocks: list[RamBlock] = field(default_factory=list)


class StoreMachine(RuleBasedStateMachine):
    """Engines, operators, a disk that fills up, and clients that are killed."""

    @initialize(
        policy=st.sampled_from(POLICIES), mode=st.sampled_from(list(WriteMode)), filled=st.sampled_from([0, CHAINS])
    )
    def begin(self, policy: str, mode: WriteMode, filled: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory(prefix="omlxd-model-")
        self.clock = Clock()
        self.full = False
        self.policy = policy
        self.mode = mode
        self.may: set[bytes] = set()
        """Keys that were stored and not removed since: no other may be served."""
        self.leases: list[Lease] = []
        self.open: list[tuple[str, list[Reserved]]] = []
        self.kept: list[Kept] = []
        self.open_store()
        assert self.store.spiller is not None
        for number in range(filled):
            self.offer(OWNERS[0], number, 0, LENGTH, "success")
            self.run(self.store.spiller.drain())

    def open_store(self) -> None:
        ssd = open_tier(
            Path(self.folder.name),
            limit=MIN_LIMIT,
            policy=self.policy,
            durability="none",
            free_space=lambda path: 0 if self.full else PLENTY,
        )
        ram = RamTier(Arena(BUDGET, segment_bytes=8 * PAGE, page_bytes=PAGE), self.policy)
        spill = SpillSettings(mode=self.mode, max_dirty_bytes=16 * PAGE, group_bytes=4 * PAGE)
        self.store = Store(ram, ssd, StoreSettings(spill, max_reserved_bytes=12 * PAGE), clock=self.clock)
        self.pins = Pins(self.store)
        self.run(self.started())

    async def started(self) -> None:
        self.store.start()

    def run(self, work: Coroutine[object, object, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, TIMEOUT))

    async def until(self, true: Callable[[], object]) -> None:
        while not true():
            await asyncio.sleep(0.001)

    # -- engines

    @rule(
        what=st.sampled_from(["store", "load", "release", "mixed"]),
        owner=owners,
        number=chains,
        first=st.sampled_from([0, 0, 0, 2, 4]),
        count=st.integers(1, LENGTH),
        how=st.sampled_from(["best effort", "now", "now", "later"]),
        end=st.sampled_from(["success", "success", "success", "failure", "later"]),
        which=numbers,
    )
    def engine(
        self, what: str, owner: str, number: int, first: int, count: int, how: str, end: str, which: int
    ) -> None:
        """What engines do all the time."""
        if what in ("store", "mixed"):
            self.offer(owner, number, first, count, end)
        if what in ("load", "mixed"):
            self.run(self.begin_load(owner, [meta.key for meta in ALL[number][:count]], how))
        if what in ("release", "mixed"):
            self.release(which)

    def offer(self, owner: str, number: int, first: int, count: int, end: str) -> None:
        """Offer blocks; write what gets a slot. Complete it, give it up, or leave it open."""
        metas = ALL[number]
        ancestors, offered = [meta.key for meta in metas[:first]], metas[first : first + count]
        offer = self.run(self.store.prepare_store(owner, ancestors, offered, block_tokens=64, timeout=0.0))
        asked = len(offer.reserved) + offer.present + sum(offer.declined.values())
        assert asked == len(offered), (offer, len(offered))
        for one in offer.reserved:
            self.store.ram.view(one.block)[:] = PAYLOADS[one.block.meta.key]
        if end != "later":
            self.completed(owner, offer.reserved, success=end == "success")
        elif offer.reserved:
            self.open.append((owner, offer.reserved))

    def completed(self, owner: str, reserved: list[Reserved], *, success: bool) -> None:
        async def work() -> None:
            attached = [one.block.meta.key for one in reserved if not one.block.detached]
            if success:
                self.may.update(attached)
            stored = self.store.complete_store(owner, [one.reservation for one in reserved], success=success)
            assert stored == (len(attached) if success else 0)

        self.run(work())

    @rule(which=numbers, success=st.booleans())
    def complete(self, which: int, success: bool) -> None:
        if not self.open:
            return
        owner, reserved = self.open.pop(which % len(self.open))
        self.completed(owner, reserved, success=success)

    async def begin_load(self, owner: str, keys: list[bytes], how: str) -> Lease:
        parts: list[Part] = []

        def emit(part: Part) -> None:
            assert not (parts and parts[-1].last), "nothing comes after the last part"
            for block in part.blocks:
                assert not block.detached
                assert block.meta.key in self.may, "served, and was removed or never stored"
                self.look_at(block)
            parts.append(part)

        load = self.store.load(owner, keys, block_tokens=64, timeout=None if how == "best effort" else 0.2, emit=emit)
        lease = Lease(owner, load, parts)
        self.leases.append(lease)
        if how == "now":
            await self.until(lambda: load.finished)
        return lease

    def look_at(self, block: RamBlock) -> None:
        assert block.extent is not None, "its memory was given back"
        mine = np.frombuffer(self.store.ram.view(block), np.uint8)
        assert np.array_equal(mine, np.frombuffer(PAYLOADS[block.meta.key], np.uint8)), "wrong bytes"

    def release(self, which: int) -> None:
        if not self.leases:
            return
        lease = self.leases.pop(which % len(self.leases))

        async def work() -> None:
            for block in lease.blocks:
                self.look_at(block)
            self.store.release(lease.owner, lease.load.id)
            with contextlib.suppress(UnknownId):
                self.store.release(lease.owner, lease.load.id)
                raise AssertionError("released twice")

        self.run(work())

    @rule(number=chains, count=st.integers(1, LENGTH), finish=st.booleans())
    def prefetch(self, number: int, count: int, finish: bool) -> None:
        async def work() -> None:
            self.store.prefetch([meta.key for meta in ALL[number][:count]], block_tokens=64)
            if finish:
                await self.until(lambda: not self.store.lower.restoring)

        self.run(work())

    @rule(number=chains, at=st.integers(0, LENGTH - 1))
    def get(self, number: int, at: int) -> None:
        key = ALL[number][at].key
        payload = self.run(self.store.get(key, timeout=0.05))
        assert payload is None or (key in self.may and payload == PAYLOADS[key])

    @rule(number=chains, count=st.integers(1, LENGTH))
    def touch(self, number: int, count: int) -> None:
        self.store.touch([meta.key for meta in ALL[number][:count]], block_tokens=64)

    @rule(number=chains)
    def look_up(self, number: int) -> None:
        keys = [meta.key for meta in ALL[number]]
        codes = self.store.lookup(keys)
        assert list(codes) == [self.store.where(key) for key in keys]
        for key, code in zip(keys, codes, strict=True):
            assert key in self.may or code in (Where.MISS, Where.PENDING)

    # -- engines that vanish

    @rule(owner=owners, how=st.sampled_from(["ended", "hung up", "cut off"]))
    def vanish(self, owner: str, how: str) -> None:
        """An engine is killed, or goes and may still write, or is cut off and may still do both."""
        mine = [lease for lease in self.leases if lease.owner == owner]
        writing = [one.block for name, reserved in self.open if name == owner for one in reserved]
        self.leases = [lease for lease in self.leases if lease.owner != owner]
        self.open = [one for one in self.open if one[0] != owner]

        async def work() -> None:
            slots = [self.store.ram.view(block) for block in writing]
            give_back = self.store.owner_gone(
                owner, may_still_write=how != "ended", may_still_read=how == "cut off", seconds=None
            )
            reads = mine if how == "cut off" else []
            writes = how != "ended" and writing
            if give_back is None:
                assert not reads
                assert not writes
            else:
                self.kept.append(Kept(give_back, reads, slots, writing))

        self.run(work())

    @rule(which=numbers)
    def write_on(self, which: int) -> None:
        """One that has vanished writes into the slots that it had."""
        for slot in self.kept[which % len(self.kept)].slots if self.kept else ():
            slot[:] = b"!" * len(slot)

    @rule(which=numbers)
    def end(self, which: int) -> None:
        if not self.kept:
            return
        kept = self.kept.pop(which % len(self.kept))

        async def work() -> None:
            for lease in kept.leases:
                for block in lease.blocks:
                    self.look_at(block)
            kept.give_back()
            kept.give_back()

        self.run(work())

    # -- operators

    @rule(which=numbers)
    def revoke(self, which: int) -> None:
        if not self.leases:
            return
        lease = self.leases[which % len(self.leases)]

        async def work() -> None:
            assert self.store.revoke(lease.load.id) == lease.owner

        self.run(work())

    @rule(
        what=st.sampled_from(["keys", "keys", "ram", "ssd", "all"]),
        space=st.sampled_from([None, *SPACES]),
        seed=numbers,
    )
    def remove(self, what: str, space: bytes | None, seed: int) -> None:
        if what == "keys":
            keys = random.Random(seed).sample(sorted(METAS), 3)
            self.may.difference_update(keys)
            self.run(upkeep.remove(self.store, keys))
            return
        if what == "all":
            self.may = {key for key in self.may if space is not None and METAS[key].namespace != space}
        selection = upkeep.Selection(None if space is None else frozenset([space]))
        self.run(upkeep.clear(self.store, selection, what))

    @rule(number=chains, at=st.integers(0, LENGTH - 1), unpin=st.booleans())
    def pin(self, number: int, at: int, unpin: bool) -> None:
        async def work() -> None:
            if unpin:
                self.pins.unpin(None)
                assert not self.pins.nbytes
            pinning = asyncio.ensure_future(self.pins.pin(ALL[number][at].key, 1e6))
            done, _ = await asyncio.wait([pinning], timeout=0.05)
            if not done:
                pinning.cancel()
            with contextlib.suppress(RequestError, asyncio.CancelledError):
                for block in (await pinning).load.blocks:
                    assert block.meta.key in self.may
                    self.look_at(block)

        self.run(work())

    @rule(
        what=st.sampled_from(["budget", "pressure", "mode", "policy", "disk", "time", "restart"]),
        pages=st.integers(6, 32),
        level=st.sampled_from(list(Level)),
        mode=st.sampled_from(list(WriteMode)),
        policy=st.sampled_from(POLICIES),
        full=st.booleans(),
    )
    def change(self, what: str, pages: int, level: Level, mode: WriteMode, policy: str, full: bool) -> None:
        """What an operator or the system does to a running store."""

        async def work() -> None:
            store, old = self.store, self.store.settings
            match what:
                case "budget":
                    store.resize_ram(pages * PAGE)
                case "pressure":
                    self.clock.now += 31
                    store.elastic.note(level)
                case "mode":
                    store.apply(replace(old, spill=replace(old.spill, mode=mode)))
                case "policy":
                    store.ram.switch_policy(policy)
                case "disk":
                    self.full = full
                    assert store.spiller is not None
                    await store.spiller.look_after_disk()
                case "time":
                    self.clock.now += 61
                    store.withdraw_overdue()

        self.run(work())
        if what == "restart":
            self.end_store()
            self.open_store()

    @rule()
    def flush(self) -> None:
        assert self.store.spiller is not None
        self.run(self.store.spiller.drain())

    @rule(turns=st.integers(1, 50))
    def breathe(self, turns: int) -> None:
        """The store's own work goes on a little."""

        async def work() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.run(work())

    @rule()
    def settle(self) -> None:
        """It goes on until nothing is under way."""
        spiller = self.store.spiller
        assert spiller is not None
        self.run(self.until(lambda: not spiller.busy and not self.store.lower.restoring))

    # -- what must hold

    @invariant()
    def what_is_leased_is_right(self) -> None:
        leases = [*getattr(self, "leases", ()), *(one for kept in getattr(self, "kept", ()) for one in kept.leases)]
        for lease in leases:
            blocks = lease.blocks
            assert [block.meta.key for block in blocks] == list(lease.load.keys[: len(blocks)])
            assert blocks == lease.load.blocks
            for block in blocks:
                self.look_at(block)

    @invariant()
    def the_figures_add_up(self) -> None:
        if not hasattr(self, "store"):
            return
        store, ram = self.store, self.store.ram
        spiller = store.spiller
        assert spiller is not None
        blocks = list(ram.blocks.values())
        assert ram.arena.used == ram.detached_bytes + sum(b.extent.nbytes for b in blocks if b.extent is not None)
        idle = [block for block in blocks if block.chunk.ref_cnt == 0]
        assert ram.evictable_bytes == sum(block.extent.nbytes for block in idle if block.extent is not None)
        assert (len(ram), ram.num_evictable) == (len(blocks), len(idle))
        for space in SPACES:
            own = [block.meta.nbytes for block in blocks if block.meta.namespace == space]
            assert ram.by_namespace[space] == [len(own), sum(own)]
        dirty = list(spiller._dirty.values())
        assert spiller.dirty_bytes == sum(block.meta.nbytes for block, _ in dirty)
        readers = Counter({block: 1 for block, _ in dirty})
        loads = [load for owner in store._owners for load in owner.leases.values()]
        loads += [lease.load for kept in self.kept for lease in kept.leases]
        for load in loads:
            readers.update(load.blocks)
            readers.update(load._early.values())
        for block in blocks:
            if not block.writing:
                assert block.chunk.ref_cnt == readers[block], "pins that nobody has, or that somebody lost"
        assert all(block.chunk.ref_cnt == count for block, count in readers.items())
        assert {block.meta.key for block in blocks if not block.writing} <= self.may
        assert store.ssd is not None
        assert set(store.ssd.entries) <= self.may
        held = store.held()
        assert held["reservations"] == sum(len(reserved) for _, reserved in self.open)
        assert held["reserved_bytes"] == sum(one.block.meta.nbytes for _, reserved in self.open for one in reserved)

    # -- the end

    def end_store(self) -> None:
        """Everybody goes; nothing may be left behind but what was stored."""
        store, kept = self.store, self.kept
        self.leases, self.open, self.kept = [], [], []

        async def work() -> None:
            for owner in OWNERS:
                store.owner_gone(owner, may_still_write=False)
            for one in kept:
                one.give_back()
            self.pins.unpin(None)
            await self.until(lambda: not store.lower.restoring)
            store._leasing.stop()  # prefetches that wait for room
            assert not any(store.held().values()), store.held()
            assert store.ram.detached_bytes == 0 or store.spiller is None or store.spiller.busy
            await store.stop()
            assert store.ram.detached_bytes == 0

        self.run(work())

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            self.end_store()
            self.full = False
            with contextlib.closing(open_tier(Path(self.folder.name), limit=MIN_LIMIT)) as ssd:
                assert set(ssd.entries) <= self.may
                assert ssd.recount() == {one.id: (one.blocks, one.nbytes, one.stored_bytes) for one in ssd.namespaces()}
                for key, entry in ssd.entries.items():
                    buffer = bytearray(entry.nbytes)
                    ssd.read_into(key, memoryview(buffer))
                    assert buffer == PAYLOADS[key]
        finally:
            self.folder.cleanup()
            self.loop.close()


LONG = bool(os.environ.get("OMLXD_LONG"))
StoreMachine.TestCase.settings = settings(
    max_examples=1000 if LONG else 25,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestStore = pytest.mark.timeout(7200 if LONG else 300)(StoreMachine.TestCase)
