"""Blocks travel: engine, shared memory, SSD, another engine."""

from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import pytest

import omlxd
from scripts.daemon_process import DaemonProcess
from tests.e2e.blocks import chain, payload
from tests.e2e.conftest import StartDaemon

BLOCK = 300_000


def _raw(cache: omlxd.Cache, model: str = "org/raw") -> omlxd.Space:
    return cache.namespace(model=model, fingerprint="f", block_tokens=64)


def test_arrays_come_back_bit_for_bit(daemon: DaemonProcess) -> None:
    block = [mx.random.normal((1, 3, 64, 64)).astype(mx.bfloat16), mx.arange(5), None, mx.zeros((0, 4))]
    layout = omlxd.Layout.of(block)
    tokens = list(range(64 * 5 + 7))
    with omlxd.connect(daemon.socket) as cache:
        space = cache.namespace(model="org/m", fingerprint="f", block_tokens=64, layout=layout)
        assert not space.match(tokens)
        assert space.store(tokens, [block] * 5).stored == 5
        hit = space.match(tokens)
        assert (hit.tokens, hit.blocks, hit.ram, hit.ssd, hit.pending) == (320, 5, 5, 0, 0)
        with space.load(tokens) as lease:
            for index, loaded in enumerate(lease):
                assert (loaded.start, loaded.stop) == (64 * index, 64 * index + 64)
                for got, want in zip(loaded.arrays(), block, strict=True):
                    assert (got is None) == (want is None)
                    if got is not None and want is not None:
                        assert got.dtype == want.dtype
                        assert got.shape == want.shape
                        assert bool(mx.array_equal(got, want))
            assert len(lease) == 5
            assert lease.stopped is None


def test_another_process_finds_them_and_so_does_the_next_daemon(daemon: DaemonProcess) -> None:
    hashes = chain(1, 6)
    with omlxd.connect(daemon.socket) as cache:
        assert _raw(cache).store_keys(hashes, [payload(h, BLOCK) for h in hashes]).stored == 6
    program = (
        "import omlxd, sys; from tests.e2e.blocks import chain, payload\n"
        "space = omlxd.connect().namespace(model='org/raw', fingerprint='f', block_tokens=64)\n"
        "with space.load_keys(chain(1, 6)) as lease:\n"
        f"    assert [bytes(b.view) for b in lease] == [payload(b.key, {BLOCK}) for b in lease]\n"
        "    assert len(lease) == 6\n"
        "hit = space.match_keys(chain(1, 6)); print(hit.ram, hit.ssd)"
    )

    def other() -> str:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=daemon.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert other() == "6 0"
    daemon.stop()
    daemon.start()
    with omlxd.connect(daemon.socket) as cache:
        hit = _raw(cache).match_keys(hashes)
        assert (hit.ram, hit.ssd) == (0, 6)
    assert other() == "6 0"  # the first load brought them back into RAM


def test_what_is_stored_twice_is_present_and_a_longer_prompt_adds_its_tail(daemon: DaemonProcess) -> None:
    hashes = chain(2, 8)
    payloads = [payload(h, BLOCK) for h in hashes]
    with omlxd.connect(daemon.socket) as cache:
        space = _raw(cache)
        assert space.store_keys(hashes[:5], payloads[:5]).stored == 5
        result = space.store_keys(hashes, payloads)
        assert (result.stored, result.present, result.declined) == (3, 5, {})
        assert space.store_keys(hashes, payloads[7:], start=7).present == 1


def test_a_load_stops_at_the_first_block_that_is_missing(daemon: DaemonProcess) -> None:
    hashes = chain(3, 6)
    with omlxd.connect(daemon.socket) as cache:
        space = _raw(cache)
        space.store_keys(hashes[:2], [payload(h, BLOCK) for h in hashes[:2]])
        space.store_keys(hashes, [payload(h, BLOCK) for h in hashes[4:]], start=4)
        assert space.match_keys(hashes).blocks == 2
        assert space.lookup_keys(hashes) == [True, True, False, False, True, True]
        with space.load_keys(hashes) as lease:
            assert [block.key for block in lease] == hashes[:2]
            assert lease.stopped == "miss"


def test_blocks_whose_layout_is_their_own(daemon: DaemonProcess) -> None:
    usual, odd = [mx.ones((2, 8))], [mx.ones((2, 5)), mx.zeros(3)]
    tokens = list(range(128))
    with omlxd.connect(daemon.socket) as cache:
        space = cache.namespace(model="m", fingerprint="f", block_tokens=64, layout=omlxd.Layout.of(usual))
        assert space.store(tokens, [usual, odd]).stored == 2
        daemon_restarted = space.load(tokens)
        with daemon_restarted as lease:
            shapes = [[a.shape for a in block.arrays() if a is not None] for block in lease]
        assert shapes == [[(2, 8)], [(2, 5), (3,)]]
    daemon.stop()
    daemon.start()
    with omlxd.connect(daemon.socket) as cache:
        space = cache.namespace(model="m", fingerprint="f", block_tokens=64, layout=omlxd.Layout.of(usual))
        with space.load(tokens) as lease:
            assert [[a.shape for a in block.arrays() if a is not None] for block in lease] == shapes


def test_inline_get_and_put(daemon: DaemonProcess) -> None:
    head, tail, missing = chain(4, 3)
    with omlxd.connect(daemon.socket) as cache:
        space = _raw(cache)
        assert space.put(head, b"head")
        assert space.put(tail, b"tail", parent=head, position=1)
        assert space.put(tail, b"tail", parent=head, position=1)
        assert space.get(head) == b"head"
        assert space.get(tail) == b"tail"
        assert space.get(missing) is None


def test_namespaces_do_not_see_each_other(daemon: DaemonProcess) -> None:
    tokens = list(range(64))
    with omlxd.connect(daemon.socket) as cache:
        spaces = [
            cache.namespace(model="a", fingerprint="1", block_tokens=64),
            cache.namespace(model="a", fingerprint="2", block_tokens=64),
            cache.namespace(model="a", fingerprint="1", block_tokens=32),
            cache.namespace(model="a", fingerprint="1", block_tokens=64, salt="me"),
        ]
        spaces[0].store(tokens, [b"x" * 1000])
        assert [space.match(tokens).tokens for space in spaces] == [64, 0, 0, 0]


def test_a_store_that_does_not_fit_is_declined_with_its_reason(daemon: DaemonProcess) -> None:
    with omlxd.connect(daemon.socket) as cache:
        space = _raw(cache)
        result = space.store_keys(chain(5, 1), [bytes(65 << 20)])
        assert (result.stored, dict(result.declined)) == (0, {"too_large": 1})
        held = chain(6, 60)
        assert space.store_keys(held, [payload(h, 1 << 20) for h in held], timeout=20).stored == 60
        with space.load_keys(held) as lease:
            assert len(lease.wait()) == 60
            more = chain(7, 8)
            result = space.store_keys(more, [payload(h, 1 << 20) for h in more], timeout=0.2)
            assert result.stored == 4
            assert result.declined["no_room"] == 4
            assert all(bytes(block.view) == payload(block.key, 1 << 20) for block in lease)
        assert space.store_keys(more, [payload(h, 1 << 20) for h in more], timeout=20).stored == 4


def test_no_daemon_is_told_at_once_and_a_client_finds_the_next_one(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(ram_size="64MiB", ssd_size="256MiB")
    cache = omlxd.connect(daemon.socket)
    space = _raw(cache)
    hashes = chain(8, 2)
    space.store_keys(hashes, [payload(h, BLOCK) for h in hashes])
    boot = cache.boot
    daemon.stop()
    with pytest.raises(omlxd.Unavailable, match="omlxd serve"):
        space.match_keys(hashes)
    with pytest.raises(omlxd.Unavailable):
        omlxd.connect(daemon.socket)
    daemon.start()
    while True:
        try:
            hit = space.match_keys(hashes)
            break
        except omlxd.Unavailable:
            continue  # its back-off is not over
    assert hit.ssd == 2
    assert cache.boot != boot
    cache.close()


def test_flush_clear_and_remove(daemon: DaemonProcess) -> None:
    hashes = chain(9, 4)
    with omlxd.connect(daemon.socket) as cache:
        space = _raw(cache)
        space.store_keys(hashes, [payload(h, BLOCK) for h in hashes])
        assert list(cache.stream("flush"))[-1]["spilled"] == 4
        assert cache.call("clear", tier="ram")["ram_blocks"] == 4
        hit = space.match_keys(hashes)
        assert (hit.ram, hit.ssd) == (0, 4)
        assert cache.call("remove", keys=hashes[3] + bytes(4))["removed"] == 1
        assert space.match_keys(hashes).blocks == 3
        with space.load_keys(hashes) as lease:
            assert len(lease.wait()) == 3
            view = lease.blocks[0].view
            done = cache.call("clear")
            assert (done["ram_blocks"], done["ssd_blocks"]) == (3, 3)
            # what is leased is a miss for others, and stays as it is for who has it
            assert bytes(view) == payload(hashes[0], BLOCK)
        assert not space.match_keys(hashes)
        assert cache.stats()["ram"]["used"] == 0
