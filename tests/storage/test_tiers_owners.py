"""The store and those who hold something of it: leases, reservations, revocation, and what vanished owners leave. No SSD."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager

import pytest

from omlxd.storage.arena import Arena
from omlxd.storage.blocks import BlockMeta
from omlxd.storage.loads import Load, Part
from omlxd.storage.ram import RamBlock, RamTier
from omlxd.storage.tiers import Store, StoreSettings, UnknownId, Where

PAGE = 4096
NAMESPACE = b"n" * 32


def keys_of(name: str, count: int) -> list[bytes]:
    return [f"{name}-{index}".encode().ljust(36, b".") for index in range(count)]


def metas_of(keys: list[bytes], nbytes: int = PAGE) -> list[BlockMeta]:
    return [BlockMeta(key, NAMESPACE, nbytes, keys[at - 1] if at else None, at) for at, key in enumerate(keys)]


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def a_store(pages: int = 16, **settings: float) -> AsyncIterator[tuple[Store, Clock]]:
    clock = Clock()
    ram = RamTier(Arena(pages * PAGE, segment_bytes=pages * PAGE, page_bytes=PAGE))
    store = Store(ram, None, StoreSettings(**settings), clock=clock)  # type: ignore[arg-type]
    store.start()
    yield store, clock
    await store.stop()


async def stored(store: Store, owner: object, keys: list[bytes], nbytes: int = PAGE) -> list[int]:
    """Reserve and write; returns the reservations."""
    offer = await store.prepare_store(owner, [], metas_of(keys, nbytes), block_tokens=64, timeout=0.0)
    for one in offer.reserved:
        store.ram.view(one.block)[:] = one.block.meta.key[:1] * nbytes
    return [one.reservation for one in offer.reserved]


async def filled(store: Store, owner: object, keys: list[bytes]) -> None:
    assert store.complete_store(owner, await stored(store, owner, keys), success=True) == len(keys)


def loaded(store: Store, owner: object, keys: list[bytes], timeout: float | None = None) -> tuple[Load, list[Part]]:
    parts: list[Part] = []
    return store.load(owner, keys, block_tokens=64, timeout=timeout, emit=parts.append), parts


def run(work: Callable[[], Coroutine[object, object, None]]) -> None:
    asyncio.run(work())


def test_leases_and_reservations_are_their_owners() -> None:
    async def work() -> None:
        async with a_store() as (store, _):
            keys = keys_of("a", 3)
            reservations = await stored(store, "writer", keys)
            assert store.where(keys[0]) is Where.PENDING
            with pytest.raises(UnknownId, match="nothing was changed"):
                store.complete_store("other", reservations, success=True)
            with pytest.raises(UnknownId):
                store.complete_store("writer", [*reservations, 10**9], success=True)
            assert store.complete_store("writer", reservations, success=True) == 3
            load, parts = loaded(store, "reader", keys)
            assert parts[0].last
            assert store.held()["leased_blocks"] == 3
            with pytest.raises(UnknownId):
                store.release("other", load.id)
            store.release("reader", load.id)
            with pytest.raises(UnknownId):
                store.release("reader", load.id)
            assert not any(store.held().values())

    run(work)


def test_a_failed_store_leaves_nothing() -> None:
    async def work() -> None:
        async with a_store() as (store, _):
            keys = keys_of("a", 3)
            store.complete_store("writer", await stored(store, "writer", keys), success=False)
            assert [store.where(key) for key in keys] == [Where.MISS] * 3
            assert store.ram.arena.used == 0

    run(work)


def test_a_long_offer_that_fits_in_part_is_not_tried_block_by_block() -> None:
    async def work() -> None:
        async with a_store(pages=300) as (store, _):
            looked_at = 0
            reserve = store.ram.reserve

            def counted(metas: Sequence[BlockMeta], held: Sequence[bytes], ctx: object) -> list[RamBlock] | None:
                nonlocal looked_at
                looked_at += len(metas) + len(held)
                return reserve(metas, held, ctx)  # type: ignore[arg-type]

            store.ram.reserve = counted  # type: ignore[method-assign]
            keys = keys_of("a", 500)
            offer = await store.prepare_store("writer", [], metas_of(keys), block_tokens=64, timeout=0.0)
            assert [one.index for one in offer.reserved] == list(range(300)), "heads first, and all that fit"
            assert offer.declined == {"no_room": 200}
            assert looked_at < 20 * len(keys)

    run(work)


def test_leased_blocks_are_not_evicted_and_others_are() -> None:
    async def work() -> None:
        async with a_store(pages=8) as (store, _):
            kept, gone = keys_of("kept", 4), keys_of("gone", 4)
            await filled(store, "w", kept)
            await filled(store, "w", gone)
            load, _ = loaded(store, "reader", kept)
            await filled(store, "w", keys_of("new", 4))
            assert [store.where(key) for key in kept] == [Where.RAM] * 4
            assert [store.where(key) for key in gone] == [Where.MISS] * 4
            offer = await store.prepare_store("w", [], metas_of(keys_of("more", 8)), block_tokens=64, timeout=0.0)
            assert len(offer.reserved) == 4
            assert offer.declined == {"no_room": 4}, "heads first, the rest declined"
            for block in load.blocks:
                assert bytes(store.ram.view(block)) == b"k" * PAGE

    run(work)


def test_an_owner_that_is_gone_for_good_leaves_nothing() -> None:
    async def work() -> None:
        async with a_store() as (store, _):
            keys = keys_of("a", 4)
            await filled(store, "w", keys)
            loaded(store, "gone", keys)
            await stored(store, "gone", keys_of("b", 4))
            assert store.owner_gone("gone", may_still_write=False) is None
            assert not any(store.held().values())
            assert [store.where(key) for key in keys_of("b", 4)] == [Where.MISS] * 4
            assert store.ram.arena.used == 4 * PAGE

    run(work)


def test_memory_of_an_owner_that_may_still_use_it_is_kept_until_told() -> None:
    async def work() -> None:
        async with a_store(pages=8) as (store, _):
            keys = keys_of("a", 4)
            await filled(store, "w", keys)
            load, _ = loaded(store, "lost", keys)
            await stored(store, "lost", keys_of("b", 4))
            give_back = store.owner_gone("lost", may_still_write=True, may_still_read=True)
            assert give_back is not None
            assert store.held()["seized_blocks"] == 8
            assert store.where(keys_of("b", 1)[0]) is Where.MISS, "what was half written is not served"
            assert store.where(keys[0]) is Where.RAM, "what was read goes on being served"
            offer = await store.prepare_store("w", [], metas_of(keys_of("c", 1)), block_tokens=64, timeout=0.0)
            assert offer.declined == {"no_room": 1}, "nothing of it goes to others"
            for block in load.blocks:
                assert bytes(store.ram.view(block)) == b"a" * PAGE
            give_back()
            give_back()
            assert not any(store.held().values())
            await filled(store, "w", keys_of("c", 8))

    run(work)


def test_kept_memory_goes_back_when_the_time_is_over() -> None:
    async def work() -> None:
        async with a_store(pages=8) as (store, _):
            await stored(store, "lost", keys_of("b", 8))
            assert store.owner_gone("lost", may_still_write=True, seconds=0.05) is not None
            assert store.held()["seized_blocks"] == 8
            async with asyncio.timeout(10):
                while store.held()["seized_blocks"]:
                    await asyncio.sleep(0.01)
            await filled(store, "w", keys_of("c", 8))

    run(work)


def test_a_revoked_lease_keeps_its_blocks_until_it_is_given_back() -> None:
    async def work() -> None:
        async with a_store(pages=4) as (store, _):
            keys = keys_of("a", 4)
            await filled(store, "w", keys)
            load, _ = loaded(store, "reader", keys)
            assert store.revoke(load.id) == "reader"
            assert store.revoke(load.id) == "reader", "again: no harm"
            offer = await store.prepare_store("w", [], metas_of(keys_of("c", 1)), block_tokens=64, timeout=0.0)
            assert offer.declined == {"no_room": 1}
            store.release("reader", load.id)
            await filled(store, "w", keys_of("c", 1))
            with pytest.raises(UnknownId, match="no lease"):
                store.revoke(load.id)

    run(work)


def test_a_revoked_lease_that_nobody_gives_back_ends_by_itself() -> None:
    async def work() -> None:
        async with a_store(pages=4, seize_seconds=0.05) as (store, _):
            keys = keys_of("a", 4)
            await filled(store, "w", keys)
            load, _ = loaded(store, "reader", keys)
            store.revoke(load.id)
            async with asyncio.timeout(10):
                while store.held()["leases"]:
                    await asyncio.sleep(0.01)
            assert load.released
            store.owner_gone("reader", may_still_write=False)
            await filled(store, "w", keys_of("c", 4))

    run(work)


def test_a_slot_that_is_not_written_for_long_does_not_keep_others_from_the_block() -> None:
    async def work() -> None:
        async with a_store(pages=8, reserve_seconds=60.0) as (store, clock):
            keys = keys_of("a", 4)
            slow = await stored(store, "slow", keys)
            load, parts = loaded(store, "reader", keys, timeout=600.0)
            assert not load.finished
            assert store.withdraw_overdue() == 0
            clock.now += 61
            assert store.withdraw_overdue() == 4
            assert store.withdraw_overdue() == 0
            assert load.finished
            assert parts[-1].stopped == "store_failed"
            await filled(store, "quick", keys)
            assert [store.where(key) for key in keys] == [Where.RAM] * 4
            assert store.complete_store("slow", slow, success=True) == 0, "too late: the blocks are another's"
            load, parts = loaded(store, "reader", keys)
            assert len(load.blocks) == 4
            assert store.ram.arena.used == 4 * PAGE

    run(work)


def test_what_is_withdrawn_does_not_count_as_bytes_to_come() -> None:
    async def work() -> None:
        async with a_store(pages=8, reserve_seconds=60.0) as (store, clock):
            slow = await stored(store, "slow", keys_of("a", 4))
            assert store._owners.coming_bytes() == 4 * PAGE
            clock.now += 61
            store.withdraw_overdue()
            quick = await stored(store, "quick", keys_of("b", 1))
            assert store._owners.coming_bytes() == PAGE
            assert store.held()["reserved_bytes"] == 5 * PAGE, "its memory is still in the slow writer's hands"
            store.complete_store("slow", slow, success=True)
            store.complete_store("quick", quick, success=True)
            assert store._owners.coming_bytes() == store.held()["reserved_bytes"] == 0

    run(work)


def test_a_store_waits_for_room_and_gets_it() -> None:
    async def work() -> None:
        async with a_store(pages=4) as (store, _):
            keys = keys_of("a", 4)
            await filled(store, "w", keys)
            load, _ = loaded(store, "reader", keys)
            metas = metas_of(keys_of("b", 4))
            waiting = asyncio.ensure_future(store.prepare_store("w", [], metas, block_tokens=64, timeout=100.0))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not waiting.done()
            store.release("reader", load.id)
            offer = await asyncio.wait_for(waiting, 10)
            assert len(offer.reserved) == 4

    run(work)


def test_one_owner_may_not_reserve_everything() -> None:
    async def work() -> None:
        async with a_store(pages=16, max_reserved_bytes=4 * PAGE) as (store, _):
            await stored(store, "greedy", keys_of("a", 4))
            offer = await store.prepare_store("greedy", [], metas_of(keys_of("b", 1)), block_tokens=64, timeout=0.0)
            assert offer.declined == {"no_room": 1}
            assert len(await stored(store, "other", keys_of("c", 4))) == 4

    run(work)


def test_stopping_ends_whoever_waits() -> None:
    async def work() -> None:
        async with a_store(pages=4) as (store, _):
            keys = keys_of("a", 4)
            await stored(store, "w", keys)
            load, parts = loaded(store, "reader", keys, timeout=600.0)
            metas = metas_of(keys_of("b", 1))
            waiting = asyncio.ensure_future(store.prepare_store("x", [], metas, block_tokens=64, timeout=600.0))
            await asyncio.sleep(0)
        assert parts[-1].stopped == "shutting_down"
        assert load.finished
        assert (await asyncio.wait_for(waiting, 10)).declined == {"shutting_down": 1}
        assert store.owner_gone("reader", may_still_write=True, may_still_read=True) is None

    run(work)
