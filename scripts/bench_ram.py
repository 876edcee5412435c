"""Loads and stores against memcpy, MLX and Redis: ``scripts/bench ram [--json]``.

Every figure is a median, and what is compared is measured in turns, so that a busy machine slows both sides. One daemon
with RAM only serves the single-client part; `bench_ram_clients.py` is the part with many.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

import omlxd
from omlxd.storage.layout import Layout
from scripts import bench_ram_clients
from scripts.daemon_process import DaemonProcess

MIB = 1 << 20
BLOCKS = 64
BLOCK_BYTES = 2 * MIB

Bytes = NDArray[np.uint8]
Figures = dict[str, object]


class Redis(Protocol):
    """What is used of redis-py's client."""

    def ping(self) -> object: ...
    def set(self, name: str, value: bytes) -> object: ...
    def get(self, name: str) -> object: ...


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def in_turns(
    rounds: int, between: Callable[[], object] = lambda: None, **works: Callable[[], object]
) -> dict[str, float]:
    """Median seconds of each of ``works``, taken in turns; one unmeasured turn first, and ``between`` before each, unmeasured.

    Who begins changes with each turn: what one leaves behind (a warm cache, a trimmed heap) must not always meet the same other.
    """
    taken: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for turn in range(rounds + 1):
        first = turn % len(names)
        order = names[first:] + names[:first]
        for name in order if turn % 2 else reversed(order):
            between()
            took = seconds(works[name])
            if turn:
                taken[name].append(took)
    return {name: statistics.median(times) for name, times in taken.items()}


def hashes(count: int, salt: str) -> list[bytes]:
    return [f"{salt}-{index}".encode().ljust(32, b".") for index in range(count)]


def payloads(count: int, nbytes: int, seed: int) -> list[Bytes]:
    one = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return [np.roll(one, index) for index in range(count)]


def views(arrays: list[Bytes]) -> list[memoryview]:
    return [memoryview(array) for array in arrays]


def loads(cache: omlxd.Cache, rounds: int) -> Figures:
    """64 blocks of 2 MiB: loads into the engine's own warm buffers, into MLX arrays, and stores."""
    import mlx.core as mx

    layout = Layout.of([mx.zeros((BLOCK_BYTES // 2 // 64, 64), mx.bfloat16)])
    space = cache.namespace(model="bench/loads", fingerprint="1", layout=layout)
    keys = hashes(BLOCKS, "load")
    source = payloads(BLOCKS, BLOCK_BYTES, 1)
    own = [array.copy() for array in source]
    result = space.store_keys(keys, views(source))
    assert result.stored == BLOCKS, result

    def load_copy() -> None:
        with space.load_keys(keys) as lease:
            for block, target in zip(lease, own, strict=True):
                np.copyto(target, np.frombuffer(block.view, np.uint8))

    def memcpy() -> None:
        for origin, target in zip(source, own, strict=True):
            np.copyto(target, origin)

    def load_arrays() -> None:
        with space.load_keys(keys) as lease:
            kept = [block.arrays() for block in lease]
        mx.eval(kept)

    def mx_array() -> None:
        kept = [mx.array(array) for array in source]
        mx.eval(kept)

    took = in_turns(rounds, load_copy=load_copy, memcpy=memcpy, load_arrays=load_arrays, mx_array=mx_array)
    assert all(np.array_equal(a, b) for a, b in zip(source, own, strict=True))
    nbytes = BLOCKS * BLOCK_BYTES
    return {
        "load_copy_gb_s": nbytes / took["load_copy"] / 1e9,
        "memcpy_gb_s": nbytes / took["memcpy"] / 1e9,
        "load_copy_vs_memcpy": took["memcpy"] / took["load_copy"],
        "load_arrays_gb_s": nbytes / took["load_arrays"] / 1e9,
        "mx_array_gb_s": nbytes / took["mx_array"] / 1e9,
        "load_arrays_vs_mx_array": took["mx_array"] / took["load_arrays"],
    }


def stores(cache: omlxd.Cache, rounds: int) -> Figures:
    """64 new blocks of 2 MiB each time. First into memory never used before, then over and over into the same slots."""
    space = cache.namespace(model="bench/stores", fingerprint="1")
    source = payloads(BLOCKS, BLOCK_BYTES, 2)
    own = [np.empty_like(array) for array in source]
    nbytes = BLOCKS * BLOCK_BYTES
    turn = iter(range(1 << 30))
    made: list[bytes] = []

    def store() -> None:
        made[:] = hashes(BLOCKS, f"store-{next(turn)}")
        result = space.store_keys(made, views(source))
        assert result.stored == BLOCKS, result

    def memcpy() -> None:
        for origin, target in zip(source, own, strict=True):
            np.copyto(target, origin)

    def remove() -> None:
        cache.call("remove", keys=b"".join(key + bytes(4) for key in made))

    first = seconds(store)
    remove()
    took = in_turns(rounds, store=store, remove=remove, memcpy=memcpy)
    return {
        "store_first_gb_s": nbytes / first / 1e9,
        "store_gb_s": nbytes / took["store"] / 1e9,
        "store_vs_memcpy": took["memcpy"] / took["store"],
    }


def attaching(cache: omlxd.Cache, rounds: int) -> Figures:
    """Leased views without reading: what they cost does not depend on the blocks' size.

    Before each, one lookup: the daemon counts a load after it has answered, and would still be at it with the one before.
    """
    works: dict[str, Callable[[], object]] = {}
    for name, count, nbytes in (("64KiB", BLOCKS, 64 << 10), ("16MiB", BLOCKS, 16 * MIB), ("256", 256, 64 << 10)):
        space = cache.namespace(model=f"bench/attach-{name}", fingerprint="1")
        keys = hashes(count, f"attach-{name}")
        one = memoryview(payloads(1, nbytes, 3)[0])
        stored = space.store_keys(keys, [one] * count).stored
        assert stored == count, f"{stored} of {count} blocks of {name} were stored"

        def attach(space: omlxd.Space = space, keys: list[bytes] = keys) -> None:
            with space.load_keys(keys) as lease:
                held = [block.view for block in lease]
            assert len(held) == len(keys)

        with space.load_keys(keys) as lease:  # so that all of it is present in this process
            assert sum(int(np.frombuffer(block.view, np.uint8)[::4096].sum()) for block in lease)
        works[name] = attach
    took = in_turns(4 * rounds, lambda: space.match_keys(keys[:1]), **works)
    small, large = took["64KiB"] / BLOCKS, took["16MiB"] / BLOCKS
    return {
        "attach_us_per_block": {"64KiB": small * 1e6, "16MiB": large * 1e6},
        "attach_16MiB_vs_64KiB": large / small,
        "attach_256_ms": took["256"] * 1e3,
    }


def lookups(cache: omlxd.Cache, redis: Redis | None, rounds: int) -> Figures:
    """One key and a prompt of 2,048 blocks, beside a PING of Redis from the same process."""
    space = cache.namespace(model="bench/lookups", fingerprint="1")
    keys = hashes(2048, "lookup")
    assert space.store_keys(keys, [b"x" * 64] * len(keys)).stored == len(keys)
    works: dict[str, Callable[[], object]] = {
        "one": lambda: [space.match_keys(keys[:1]) for _ in range(50)],
        "many": lambda: space.match_keys(keys),
    }
    if redis is not None:
        works["ping"] = lambda: [redis.ping() for _ in range(50)]
    took = in_turns(10 * rounds, **works)
    figures: Figures = {"lookup_1_us": took["one"] / 50 * 1e6, "lookup_2048_ms": took["many"] * 1e3}
    if redis is not None:
        figures["redis_ping_us"] = took["ping"] / 50 * 1e6
        figures["lookup_1_vs_redis_ping"] = took["one"] / took["ping"]
    return figures


def against_redis(cache: omlxd.Cache, redis: Redis, rounds: int) -> Figures:
    """16 values of 2 MiB: a load, which leaves the bytes readable in place, against a GET, which leaves them in a ``bytes``.

    And the same load copied into a buffer of the engine's own, one copy more than the GET is charged for.
    """
    space = cache.namespace(model="bench/redis", fingerprint="1")
    keys = hashes(16, "redis")
    source = payloads(16, BLOCK_BYTES, 4)
    own = np.empty(BLOCK_BYTES, np.uint8)
    space.store_keys(keys, views(source))
    for key, array in zip(keys, source, strict=True):
        redis.set(key.hex(), array.tobytes())

    def load() -> None:
        with space.load_keys(keys) as lease:
            held = [block.view for block in lease]
        assert len(held) == len(keys)

    def load_copied() -> None:
        with space.load_keys(keys) as lease:
            for block in lease:
                np.copyto(own, np.frombuffer(block.view, np.uint8))

    def get() -> None:
        for key in keys:
            redis.get(key.hex())

    took = in_turns(rounds, load=load, load_copied=load_copied, get=get)
    return {
        "redis_get_gb_s": 16 * BLOCK_BYTES / took["get"] / 1e9,
        "load_vs_redis_get": took["get"] / took["load"],
        "load_copied_vs_redis_get": took["get"] / took["load_copied"],
    }


def fresh_client(daemon: DaemonProcess, rounds: int) -> Figures:
    """What a client's first load takes, of 64 blocks of 2 MiB that others stored, against its later ones."""
    keys, source = hashes(BLOCKS, "load"), bytes(BLOCK_BYTES)
    own = [bytearray(source) for _ in range(BLOCKS)]
    first: list[float] = []
    later: list[float] = []
    for _ in range(rounds):
        with omlxd.connect(daemon.socket) as cache:
            space = cache.namespace(model="bench/fresh", fingerprint="1")
            if not space.match_keys(keys):
                space.store_keys(keys, [source] * BLOCKS)

            def load(space: omlxd.Space = space) -> None:
                with space.load_keys(keys) as lease:
                    for block, target in zip(lease, own, strict=True):
                        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(block.view, np.uint8))

            first.append(seconds(load))
            later.append(statistics.median(seconds(load) for _ in range(3)))
    return {"fresh_vs_warm": statistics.median(first) / statistics.median(later)}


@contextmanager
def running_redis() -> Iterator[Redis | None]:
    """A Redis server on a unix socket; None, said on stderr, when it or its client is not installed."""
    program = shutil.which("redis-server")
    try:
        import redis
    except ImportError:
        redis = None  # type: ignore[assignment]
    if program is None or redis is None:
        missing = "redis-server (Debian: apt-get install redis-server)" if program is None else "redis[hiredis] (pip)"
        print(f"without Redis: {missing} is not installed; its figures are left out", file=sys.stderr)
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="omlxd-redis-") as folder:
        path = os.path.join(folder, "s")
        options = ["--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", folder]
        process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
        try:
            client: Redis = redis.Redis(unix_socket_path=path)
            deadline = time.monotonic() + 10
            while True:
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)
            yield client
        finally:
            process.terminate()
            process.wait()


def measure(rounds: int, clients_seconds: float) -> Figures:
    figures: Figures = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omlxd-bench-")))
        redis = stack.enter_context(running_redis())
        with DaemonProcess(folder / "ram", ram_size="4GiB", ssd_size="0") as daemon:
            with omlxd.connect(daemon.socket, name="bench") as cache:
                for part in (stores, loads, attaching):
                    figures |= part(cache, rounds)
                figures |= lookups(cache, redis, rounds)
                if redis is not None:
                    figures |= against_redis(cache, redis, rounds)
            figures |= fresh_client(daemon, rounds)
        if clients_seconds:
            figures["clients"] = bench_ram_clients.run(folder / "clients", clients_seconds)
    return figures


def table(figures: Figures, indent: str = "") -> Iterator[str]:
    for name, value in figures.items():
        if isinstance(value, dict):
            yield f"{indent}{name}"
            yield from table(value, indent + "  ")
        else:
            yield (
                f"{indent}{name:<{32 - len(indent)}}{value:>12.3f}"
                if isinstance(value, float)
                else f"{indent}{name:<{32 - len(indent)}}{value!s:>12}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench ram", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--rounds", type=int, default=15, help="turns that medians are taken of (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the part with 8 clients; 0: without it")
    options = parser.parse_args()
    figures = measure(options.rounds, options.seconds)
    print(json.dumps(figures, indent=2) if options.json else "\n".join(table(figures)))


if __name__ == "__main__":
    main()
