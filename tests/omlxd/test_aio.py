"""The asyncio client against a real daemon."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import uvloop

import omlxd
import omlxd.aio
from omlxd.storage.layout import Layout
from scripts.daemon_process import DaemonProcess
from tests.e2e.blocks import chain, payload

NBYTES = 150_000


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("aio"), ram_size="64MiB", ssd_size="256MiB") as one:
        yield one


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[object, object, None]], None]:
    return asyncio.run if request.param == "asyncio" else uvloop.run


async def filled(cache: omlxd.aio.Cache, seed: int, blocks: int = 8) -> tuple[omlxd.aio.Space, list[bytes]]:
    space = await cache.namespace(model=f"aio-{seed}", fingerprint="f")
    keys = chain(seed, blocks)
    await space.store_keys(keys, [payload(key, NBYTES) for key in keys])
    return space, keys


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.005)


async def leases_and_reservations(cache: omlxd.aio.Cache) -> tuple[int, int]:
    ram = (await cache.stats())["ram"]
    return ram["leases"], ram["reservations"]


Run = Callable[[Coroutine[object, object, None]], None]


def test_store_match_load_get_put(daemon: DaemonProcess, run: Run) -> None:
    async def work() -> None:
        async with omlxd.aio.connect(daemon.socket, name="aio") as cache:
            space, keys = await filled(cache, 1)
            hit = await space.match_keys(keys)
            assert hit.blocks == len(keys)
            assert await space.lookup_keys([keys[0], bytes(32)]) == [True, False]
            seen = 0
            async with space.load_keys(keys, timeout=2.0) as lease:
                async for block in lease:
                    assert bytes(block.view) == payload(keys[seen], NBYTES)
                    view = block.view
                    seen += 1
                assert lease.stopped is None
            assert seen == len(keys)
            with pytest.raises(ValueError, match="released"):
                bytes(view)
            assert await space.get(keys[3]) == payload(keys[3], NBYTES)
            (head,) = chain(2, 1)
            assert await space.put(head, b"inline")
            assert await space.get(head) == b"inline"
            assert (await cache.boot()) == (await cache.stats())["daemon"]["boot"]

    run(work())


def test_mlx_arrays_there_and_back(daemon: DaemonProcess) -> None:
    async def work() -> None:
        arrays = [mx.arange(4096, dtype=mx.float32).astype(mx.bfloat16).reshape(64, 64), mx.zeros((3,), mx.int8)]
        async with omlxd.aio.connect(daemon.socket) as cache:
            space = await cache.namespace(model="aio-mlx", fingerprint="f", layout=Layout.of(arrays))
            tokens = list(range(64 * 3))
            assert (await space.store(tokens, [arrays] * 3)).stored == 3
            async with space.load(tokens) as lease:
                async for block in lease:
                    loaded = block.arrays()
                    assert all(mx.array_equal(a, b) for a, b in zip(arrays, loaded, strict=True) if b is not None)
            assert (await space.match(tokens)).tokens == 64 * 3

    asyncio.run(work())


def test_many_loads_are_open_on_one_connection(daemon: DaemonProcess, run: Run) -> None:
    async def work() -> None:
        async with omlxd.aio.connect(daemon.socket) as cache:
            space, keys = await filled(cache, 3, 30)

            async def one(blocks: int) -> int:
                async with space.load_keys(keys[:blocks]) as lease:
                    return sum([bytes(block.view) == payload(block.key, NBYTES) async for block in lease])

            counts = [1 + number % 30 for number in range(120)]
            assert await asyncio.gather(*(one(blocks) for blocks in counts)) == counts
            await until(lambda: _is(leases_and_reservations(cache), (0, 0)))
            assert len((await cache.stats())["clients"]) == 1

    run(work())


async def _is(coming: Awaitable[object], wanted: object) -> bool:
    return await coming == wanted


def test_a_cancelled_task_leaves_no_lease_and_no_reservation(daemon: DaemonProcess, run: Run) -> None:
    async def work() -> None:
        async with omlxd.aio.connect(daemon.socket) as cache:
            space, keys = await filled(cache, 4, 30)

            async def load() -> None:
                async with space.load_keys(keys) as lease:
                    async for _ in lease:
                        await asyncio.sleep(0)

            for turn in range(60):
                fresh = chain(1000 + turn, 2)
                tasks = [
                    asyncio.ensure_future(load()),
                    asyncio.ensure_future(space.store_keys(fresh, [payload(key, NBYTES) for key in fresh])),
                ]
                for _ in range(turn % 12):
                    await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                async with space.load_keys(fresh, mode="best_effort") as lease:
                    async for block in lease:
                        assert bytes(block.view) == payload(block.key, NBYTES), "all of it or nothing"
            await until(lambda: _is(leases_and_reservations(cache), (0, 0)))

    run(work())


def test_a_revoked_lease_ends_by_itself(daemon: DaemonProcess, run: Run) -> None:
    async def work() -> None:
        async with omlxd.aio.connect(daemon.socket) as cache, omlxd.aio.connect(daemon.socket) as operator:
            space, keys = await filled(cache, 5)
            lease = await space.load_keys(keys)
            view = lease.blocks[0].view
            await operator.call("revoke", lease=lease.lease_id)
            await until(lambda: _is(leases_and_reservations(operator), (0, 0)))
            with pytest.raises(omlxd.LeaseEnded, match="revoked"):
                lease.check()
            with pytest.raises(ValueError, match="released"):
                bytes(view)

    run(work())


def test_an_array_that_is_dropped_in_another_thread_releases_its_lease(daemon: DaemonProcess) -> None:
    async def work() -> None:
        async with omlxd.aio.connect(daemon.socket) as cache:
            space, keys = await filled(cache, 6)
            async with space.load_keys(keys) as lease:
                kept = [np.frombuffer(lease.blocks[0].view, np.uint8)]
            assert await leases_and_reservations(cache) == (1, 0)

            def drop() -> None:
                kept.clear()
                gc.collect()

            await asyncio.to_thread(drop)
            await until(lambda: _is(leases_and_reservations(cache), (0, 0)))

    asyncio.run(work())


def test_refusals_and_absence_are_the_blocking_clients_errors(daemon: DaemonProcess, tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(omlxd.Unavailable, match="no daemon listens"):
            await omlxd.aio.connect(tmp_path / "nobody")
        async with omlxd.aio.connect(daemon.socket) as cache:
            with pytest.raises(omlxd.Refused, match="unknown_verb"):
                await cache.call("dance")
        with pytest.raises(omlxd.Unavailable, match="closed"):
            await cache.stats()

    asyncio.run(work())


def test_frozen_and_replaced_daemons(tmp_path: Path, run: Run) -> None:
    async def work() -> None:
        with DaemonProcess(tmp_path, ram_size="64MiB", ssd_size="64MiB") as daemon:
            async with omlxd.aio.connect(daemon.socket, timeout=0.3) as cache:
                space, keys = await filled(cache, 7)
                boot = await cache.boot()
                lease = await space.load_keys(keys)
                os.kill(daemon.pid, signal.SIGSTOP)
                for _ in range(20):
                    with pytest.raises(omlxd.Unavailable):
                        await space.match_keys(keys)
                assert bytes(lease.blocks[1].view) == payload(keys[1], NBYTES)
                os.kill(daemon.pid, signal.SIGCONT)

                async def is_back() -> bool:
                    try:
                        return (await space.match_keys(keys)).blocks == len(keys)
                    except omlxd.Unavailable:
                        return False

                await until(is_back)
                assert await cache.boot() == boot
                daemon.stop()
                lease.check()
                assert bytes(lease.blocks[2].view) == payload(keys[2], NBYTES), "old mappings stay"
                daemon.start()
                await until(is_back)
                assert await cache.boot() != boot

    run(work())
