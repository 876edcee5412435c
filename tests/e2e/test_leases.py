"""Leases against a real daemon: what ends them, what keeps them, and that nobody reads another's bytes."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import omlxd
from omlxd.protocol import encode
from scripts.daemon_process import DaemonProcess
from tests.e2e.blocks import chain, payload

NBYTES = 200_000


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("leases"), ram_size="64MiB", ssd_size="256MiB") as one:
        yield one


@pytest.fixture
def cache(daemon: DaemonProcess) -> Iterator[omlxd.Cache]:
    with omlxd.connect(daemon.socket, name="engine") as one:
        yield one


@pytest.fixture
def operator(daemon: DaemonProcess) -> Iterator[omlxd.Cache]:
    with omlxd.connect(daemon.socket, name="operator") as one:
        yield one


def a_space(cache: omlxd.Cache, seed: int, blocks: int = 4) -> tuple[omlxd.Space, list[bytes]]:
    """A namespace with a chain of ``blocks`` blocks in it."""
    space = cache.namespace(model=f"leases-{seed}", fingerprint="f")
    keys = chain(seed, blocks)
    space.store_keys(keys, [payload(key, NBYTES) for key in keys])
    return space, keys


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for ``condition``; fails when it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


def open_leases(operator: omlxd.Cache) -> int:
    return int(operator.stats()["ram"]["leases"])


def test_a_view_ends_with_its_lease(cache: omlxd.Cache, operator: omlxd.Cache) -> None:
    space, keys = a_space(cache, 1)
    with space.load_keys(keys) as lease:
        block = next(iter(lease))
        view = block.view
        assert bytes(view) == payload(keys[0], NBYTES)
        with pytest.raises(TypeError):
            view[0] = 1
        assert open_leases(operator) == 1
    with pytest.raises(ValueError, match="released"):
        bytes(view)
    with pytest.raises(omlxd.LeaseEnded, match="released"):
        _ = block.view
    until(lambda: open_leases(operator) == 0)


@pytest.mark.parametrize("keep", [lambda view: view[100:200], lambda view: np.frombuffer(view, np.uint8)[100:200]])
def test_what_still_reads_the_memory_keeps_the_lease(
    cache: omlxd.Cache, operator: omlxd.Cache, keep: Callable[[memoryview], object]
) -> None:
    space, keys = a_space(cache, 2)
    with space.load_keys(keys) as lease:
        kept = keep(next(iter(lease)).view)
    assert open_leases(operator) == 1
    assert bytes(kept) == payload(keys[0], NBYTES)[100:200]  # type: ignore[call-overload]
    del kept
    gc.collect()
    until(lambda: open_leases(operator) == 0)


def test_a_lease_that_is_dropped_is_released(cache: omlxd.Cache, operator: omlxd.Cache) -> None:
    space, keys = a_space(cache, 3)
    lease = space.load_keys(keys)
    kept = np.frombuffer(lease.blocks[1].view, np.uint8)
    assert open_leases(operator) == 1
    del lease
    gc.collect()
    assert open_leases(operator) == 1
    assert bytes(kept) == payload(keys[1], NBYTES)
    del kept
    gc.collect()
    until(lambda: open_leases(operator) == 0)


def test_a_revoked_lease_ends_and_its_memory_is_given_back(cache: omlxd.Cache, operator: omlxd.Cache) -> None:
    space, keys = a_space(cache, 4)
    with space.load_keys(keys) as lease:
        view = lease.blocks[0].view
        (row,) = [row for row in operator.call("leases")["leases"] if row["client"] == "engine"]
        assert row["blocks"] == len(keys)
        assert row["bytes"] == len(keys) * NBYTES
        operator.call("revoke", lease=row["lease"])
        with pytest.raises(omlxd.LeaseEnded, match="revoked"):
            lease.check()
        with pytest.raises(ValueError, match="released"):
            bytes(view)
        until(lambda: open_leases(operator) == 0)
    with pytest.raises(omlxd.Refused, match="unknown_lease"):
        operator.call("revoke", lease=row["lease"])
    assert len(space.load_keys(keys).wait()) == len(keys), "the engine can go on"


def test_revoked_while_it_is_read_the_bytes_stay_until_the_reader_is_done(
    cache: omlxd.Cache, operator: omlxd.Cache
) -> None:
    space, keys = a_space(cache, 5)
    lease = space.load_keys(keys)
    reading = np.frombuffer(lease.blocks[0].view, np.uint8)
    operator.call("revoke", lease=lease.lease_id)
    with pytest.raises(omlxd.LeaseEnded):
        lease.check()
    (row,) = operator.call("leases")["leases"]
    assert row["revoked"]
    operator.call("clear")
    other = operator.namespace(model="others", fingerprint="f")
    for number in range(600, 640):
        fill = chain(number, 10)
        other.store_keys(fill, [payload(key, NBYTES) for key in fill])
    assert bytes(reading) == payload(keys[0], NBYTES)
    del reading
    gc.collect()
    until(lambda: open_leases(operator) == 0)


def test_a_closed_client_keeps_the_lease_of_what_is_still_read(daemon: DaemonProcess, operator: omlxd.Cache) -> None:
    cache = omlxd.connect(daemon.socket, name="closing")
    space, keys = a_space(cache, 6)
    lease = space.load_keys(keys)
    idle = space.load_keys(keys)
    kept = np.frombuffer(lease.blocks[2].view, np.uint8)
    cache.close()
    with pytest.raises(omlxd.LeaseEnded, match="closed"):
        _ = idle.blocks[0].view
    until(lambda: open_leases(operator) == 1)
    assert bytes(kept) == payload(keys[2], NBYTES)
    del kept
    gc.collect()
    until(lambda: all(row["name"] != "closing" for row in operator.stats()["clients"]))


def test_cut_off_by_a_living_daemon_leases_end(cache: omlxd.Cache, operator: omlxd.Cache) -> None:
    space, keys = a_space(cache, 7)
    lease = space.load_keys(keys)
    view = lease.blocks[0].view
    assert cache._link is not None
    cache._link._sock.send(b"\xff\xff\xff\xff")  # a frame of 4 GiB: the daemon ends the connection
    until(lambda: all(row["name"] != "engine" for row in operator.stats()["clients"]))
    with pytest.raises(omlxd.LeaseEnded):
        lease.check()
    with pytest.raises(ValueError, match="released"):
        bytes(view)
    assert len(space.load_keys(keys).wait()) == len(keys), "the client has connected again"


def test_the_memory_of_a_cut_off_reader_is_kept_from_others_while_it_lives(
    cache: omlxd.Cache, operator: omlxd.Cache
) -> None:
    space, keys = a_space(cache, 8)
    lease = space.load_keys(keys)
    reading = np.frombuffer(lease.blocks[0].view, np.uint8)
    assert cache._link is not None
    cache._link._sock.send(b"\xff\xff\xff\xff")
    until(lambda: all(row["name"] != "engine" for row in operator.stats()["clients"]))
    operator.call("clear")
    other = operator.namespace(model="others", fingerprint="g")
    for number in range(700, 740):
        fill = chain(number, 10)
        other.store_keys(fill, [payload(key, NBYTES) for key in fill])
    assert bytes(reading) == payload(keys[0], NBYTES)


def test_a_forked_child_has_no_lease_and_takes_none_with_it(cache: omlxd.Cache, operator: omlxd.Cache) -> None:
    space, keys = a_space(cache, 9)
    lease = space.load_keys(keys)
    view = lease.blocks[0].view
    child = os.fork()
    if child == 0:
        code = 1
        try:
            lease.blocks[1].view
        except omlxd.LeaseEnded:
            try:
                code = 0 if space.match_keys(keys).blocks == len(keys) else 3  # over a connection of its own
            except Exception:
                code = 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lease.check()
    assert bytes(view) == payload(keys[0], NBYTES)
    assert open_leases(operator) == 1
    del view
    lease.release()


def test_a_client_that_is_killed_leaves_no_lease(daemon: DaemonProcess, operator: omlxd.Cache) -> None:
    child = os.fork()
    if child == 0:
        engine = omlxd.connect(daemon.socket, name="to be killed")
        space, keys = a_space(engine, 10)
        held = space.load_keys(keys)
        signal.pause()
        os._exit(len(held))
    until(lambda: open_leases(operator) == 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    until(lambda: open_leases(operator) == 0)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_what_is_leased_stays_readable_when_the_daemon_has_gone(tmp_path: Path, how: str) -> None:
    with DaemonProcess(tmp_path, ram_size="64MiB", ssd_size="256MiB") as daemon:
        cache = omlxd.connect(daemon.socket)
        space, keys = a_space(cache, 11)
        lease = space.load_keys(keys)
        first = lease.blocks[0].view
        getattr(daemon, how)()
        lease.check()
        assert bytes(first) == payload(keys[0], NBYTES)
        assert bytes(lease.blocks[1].view) == payload(keys[1], NBYTES), "also what was not looked at before"
        del first
        lease.release()
        with pytest.raises(omlxd.LeaseEnded):
            lease.check()
        with pytest.raises(omlxd.Unavailable):
            space.match_keys(keys)
        cache.close()


def test_frames_of_no_use_do_not_end_a_lease(cache: omlxd.Cache) -> None:
    """An answer to nobody, as a later daemon may send one."""
    space, keys = a_space(cache, 12)
    lease = space.load_keys(keys)
    assert cache._link is not None
    for event in ({"i": None, "ok": {"news": 1}}, {"i": 1 << 40, "ok": {}}):
        for answer in cache._link._protocol.feed(encode(event)):
            cache._link._dispatch(answer)
    lease.check()
    lease.release()


def test_a_dropped_lease_ends_without_the_garbage_collector(daemon: DaemonProcess) -> None:
    hashes = chain(77, 3)
    with omlxd.connect(daemon.socket) as cache:
        space = cache.namespace(model="dropped", fingerprint="f", block_tokens=64)
        space.store_keys(hashes, [payload(h, 5000) for h in hashes])
        gc.disable()
        try:
            lease = space.load_keys(hashes).wait()
            block = lease.blocks[1]
            view = lease.blocks[0].view
            assert bytes(block.view) == payload(hashes[1], 5000)
            del lease
            assert cache.stats()["ram"]["leases"] == 1, "a block keeps its lease"
            del block
            assert cache.stats()["ram"]["leases"] == 1, "what still reads keeps it, too"
            assert bytes(view) == payload(hashes[0], 5000)
            del view
            assert cache.stats()["ram"]["leases"] == 0
        finally:
            gc.enable()


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
def test_a_client_that_is_closed_leaves_no_descriptor(daemon: DaemonProcess) -> None:
    gc.collect()  # what other tests have dropped
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        with omlxd.connect(daemon.socket) as cache:
            space = cache.namespace(model="descriptors", fingerprint="f", block_tokens=64)
            space.store_keys(chain(number, 2), [b"x" * 1000] * 2)
            with space.load_keys(chain(number, 2)) as lease:
                assert len(lease.wait()) == 2
    deadline = time.monotonic() + 20
    while len(os.listdir("/proc/self/fd")) > before:  # a thread that makes memory present may be at its last step
        assert time.monotonic() < deadline
