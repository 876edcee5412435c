"""Loads that mix RAM and SSD: what is in RAM comes at once, the rest in order as it is ready, and nothing waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

import omlxd
from scripts.daemon_process import DaemonProcess
from tests.e2e.blocks import chain, payload

NBYTES = 1 << 20
BLOCKS = 24


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("streaming"), ram_size="64MiB", ssd_size="512MiB") as one:
        yield one


@pytest.fixture
def cache(daemon: DaemonProcess) -> Iterator[omlxd.Cache]:
    with omlxd.connect(daemon.socket) as one:
        yield one


def on_ssd(cache: omlxd.Cache, seed: int, blocks: int = BLOCKS) -> tuple[omlxd.Space, list[bytes]]:
    """A namespace and a chain of it that is on the SSD only."""
    space = cache.namespace(model=f"streaming-{seed}", fingerprint="f")
    keys = chain(seed, blocks)
    result = space.store_keys(keys, [payload(key, NBYTES) for key in keys], timeout=30.0)
    assert result.stored == blocks
    cache.call("clear", tier="ram", timeout=60.0)
    assert space.match_keys(keys).ssd == blocks
    return space, keys


def until_it_waits(cache: omlxd.Cache) -> None:
    """Until a load has reached the daemon."""
    deadline = time.monotonic() + 20
    while not cache.call("leases")["leases"]:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def count(cache: omlxd.Cache, what: str) -> int:
    return int(cache.stats()["counts"].get(what, 0))


def test_restored_blocks_come_in_order_and_whole(cache: omlxd.Cache) -> None:
    space, keys = on_ssd(cache, 1)
    with space.load_keys(keys, timeout=30.0) as lease:
        seen = []
        for block in lease:
            assert bytes(block.view) == payload(block.key, NBYTES)
            seen.append(block.key)
        assert seen == keys
        assert lease.stopped is None
    assert space.match_keys(keys).ram == len(keys)


def test_what_is_in_ram_comes_with_the_first_answer(cache: omlxd.Cache) -> None:
    space, keys = on_ssd(cache, 2)
    with space.load_keys(keys[:8], timeout=30.0) as lease:
        lease.wait()
    with space.load_keys(keys, timeout=30.0) as lease:
        assert len(lease) >= 8, "before anything was waited for"
        assert sum(bytes(block.view) == payload(block.key, NBYTES) for block in lease) == BLOCKS


def test_what_is_in_ram_behind_a_hole_is_not_read_again(cache: omlxd.Cache) -> None:
    space, keys = on_ssd(cache, 3)
    space.load_keys(keys, timeout=30.0).wait().release()
    restored = count(cache, "restore_restored")
    # A chain whose head was never asked for alone: take the head out of RAM only.
    other, others = on_ssd(cache, 4)
    assert other.match_keys(others).blocks == BLOCKS
    restored = count(cache, "restore_restored")
    with other.load_keys(others, timeout=30.0) as lease:
        lease.wait()
    assert count(cache, "restore_restored") == restored + BLOCKS
    with other.load_keys(others, timeout=30.0) as lease:
        assert len(lease.wait()) == BLOCKS
    assert count(cache, "restore_restored") == restored + BLOCKS


def test_many_who_want_the_same_chain_read_it_once(cache: omlxd.Cache, daemon: DaemonProcess) -> None:
    space, keys = on_ssd(cache, 5)
    before = count(cache, "restore_restored")
    outcomes: list[object] = []

    def engine() -> None:
        try:
            with omlxd.connect(daemon.socket) as mine:
                same = mine.namespace(model="streaming-5", fingerprint="f")
                with same.load_keys(keys, timeout=30.0) as lease:
                    outcomes.append(sum(bytes(block.view) == payload(block.key, NBYTES) for block in lease))
        except BaseException as error:
            outcomes.append(error)

    threads = [threading.Thread(target=engine) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == [BLOCKS] * 6
    assert count(cache, "restore_restored") == before + BLOCKS
    assert space.match_keys(keys).ram == BLOCKS


def test_best_effort_takes_what_is_in_ram(cache: omlxd.Cache) -> None:
    space, keys = on_ssd(cache, 6)
    with space.load_keys(keys, mode="best_effort") as lease:
        assert len(lease) == 0
        assert lease.stopped == "not_in_ram"
    space.load_keys(keys[:3], timeout=30.0).wait().release()
    with space.load_keys(keys, mode="best_effort") as lease:
        assert len(lease) == 3


def test_a_deadline_of_nothing_ends_the_load(cache: omlxd.Cache) -> None:
    space, keys = on_ssd(cache, 7)
    with space.load_keys(keys, timeout=0.0) as lease:
        assert len(lease.wait()) < BLOCKS
        assert lease.stopped == "deadline"


@pytest.mark.parametrize("by_match", [True, False])
def test_prefetched_blocks_are_in_ram_before_they_are_asked_for(cache: omlxd.Cache, by_match: bool) -> None:
    space, keys = on_ssd(cache, 8 + by_match)
    if by_match:
        space.match_keys(keys, prefetch=True)
    else:
        packed = b"".join(key + bytes(4) for key in keys)
        assert cache.call("prefetch", ns=0, keys=packed)["started"] == BLOCKS
    deadline = time.monotonic() + 30
    while space.match_keys(keys).ram < BLOCKS:
        assert time.monotonic() < deadline, "nothing is restored ahead"
        time.sleep(0.01)
    deadline = time.monotonic() + 10
    while cache.stats()["ram"]["leases"]:
        assert time.monotonic() < deadline, "the prefetch keeps its blocks"
        time.sleep(0.01)


def test_a_restore_that_is_slower_than_computing_is_left_and_counted(cache: omlxd.Cache) -> None:
    space, keys = on_ssd(cache, 20)
    with space.load_keys(keys[:8], timeout=30.0) as lease:  # so that the disk's speed is known
        lease.wait()
    cache.call("clear", tier="ram", timeout=60.0)
    skipped = count(cache, "restores_skipped")
    with space.load_keys(keys, timeout=30.0, prefill_tokens_per_s=1e12) as lease:
        assert len(lease.wait()) == 0
        assert lease.stopped == "restore_slower_than_prefill"
    assert count(cache, "restores_skipped") > skipped
    with space.load_keys(keys, timeout=30.0, prefill_tokens_per_s=1.0) as lease:
        assert len(lease.wait()) == BLOCKS


def test_a_load_waits_for_a_block_that_another_engine_is_storing(cache: omlxd.Cache, daemon: DaemonProcess) -> None:
    keys = chain(21, 3)
    space = cache.namespace(model="streaming-21", fingerprint="f")
    packed = b"".join(key + bytes(4) for key in keys)
    with omlxd.connect(daemon.socket) as writer:
        writer.namespace(model="streaming-21", fingerprint="f")
        prepared = writer.call("prepare_store", ns=0, keys=packed, sizes=NBYTES)
        assert space.match_keys(keys).pending == 3
        found: list[int] = []
        waiting = threading.Thread(target=lambda: found.append(len(space.load_keys(keys, timeout=30.0).wait())))
        waiting.start()
        until_it_waits(cache)
        writer.call("complete_store", reservations=[slot[1] for slot in prepared["slots"]])
        waiting.join(40)
        assert found == [3]


def test_a_load_ends_when_the_writer_it_waits_for_vanishes(cache: omlxd.Cache, daemon: DaemonProcess) -> None:
    keys = chain(22, 3)
    space = cache.namespace(model="streaming-22", fingerprint="f")
    packed = b"".join(key + bytes(4) for key in keys)
    writer = omlxd.connect(daemon.socket)
    writer.namespace(model="streaming-22", fingerprint="f")
    writer.call("prepare_store", ns=0, keys=packed, sizes=NBYTES)
    found: list[str | None] = []
    waiting = threading.Thread(target=lambda: found.append(space.load_keys(keys, timeout=60.0).wait().stopped))
    waiting.start()
    until_it_waits(cache)
    writer.close()
    waiting.join(40)
    assert found == ["store_failed"]


def test_a_chain_larger_than_the_ram_tier_is_restored_as_far_as_it_fits(cache: omlxd.Cache) -> None:
    space = cache.namespace(model="streaming-23", fingerprint="f")
    keys = chain(23, 80)
    for first in range(0, 80, 20):
        part = keys[: first + 20]
        result = space.store_keys(part, [payload(key, NBYTES) for key in part[first:]], start=first, timeout=30.0)
        assert result.stored == 20, result
    with space.load_keys(keys, timeout=60.0) as lease:
        lease.wait()
        assert 0 < len(lease) <= 64
        assert lease.stopped in ("no_room", "deadline")
        assert all(bytes(block.view) == payload(block.key, NBYTES) for block in lease)
    with space.load_keys(keys[:60], timeout=60.0) as lease:
        assert len(lease.wait()) == 60
