"""The daemon is killed at random points under load, again and again: what it comes back with is whole."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import omlxd
from tests.e2e.blocks import payload
from tests.e2e.conftest import StartDaemon

KILLS = 300 if os.environ.get("OMLXD_LONG") else 30

ENGINE = """
import sys, numpy as np, omlxd
from tests.e2e.blocks import payload
seed = int(sys.argv[1])
random = np.random.default_rng(seed)
cache = None
chains = []
while True:
    try:
        if cache is None:
            cache = omlxd.connect()
            space = cache.namespace(model="org/m", fingerprint="f", block_tokens=64)
        boot = cache.boot
        hashes = [random.bytes(32) for _ in range(int(random.integers(1, 9)))]
        nbytes = 40_000 + hashes[0][0] * 4_000
        result = space.store_keys(hashes, [payload(h, nbytes) for h in hashes], timeout=5)
        chains.append(hashes)
        if random.random() < 0.4 and result.stored == len(hashes):
            list(cache.stream("flush", timeout=30))
            if cache.boot == boot:  # it was this very daemon that had it and flushed it
                print("flushed", b"".join(hashes).hex(), flush=True)
        hashes = chains[int(random.integers(0, len(chains)))]
        nbytes = 40_000 + hashes[0][0] * 4_000
        with space.load_keys(hashes, timeout=5) as lease:
            for block in lease:
                if bytes(block.view) != payload(block.key, nbytes):
                    print("WRONG", block.key.hex(), flush=True)
    except (omlxd.Unavailable, omlxd.Refused, omlxd.LeaseEnded):
        pass
"""


def progress(outputs: list[Path]) -> int:
    return sum(output.stat().st_size for output in outputs)


def test_killed_under_load_it_starts_again_and_serves_no_torn_block(start_daemon: StartDaemon) -> None:
    dice = random.Random(int(os.environ.get("OMLXD_SEED", "7")))
    daemon = start_daemon(ram_size="16MiB", ssd_size="8GiB", ssd_max_dirty="4MiB")
    # Output goes to files: a pipe that nobody reads would stop the engines.
    outputs = [daemon.directory / f"engine-{seed}.txt" for seed in (1, 2)]
    engines = []
    for seed, output in enumerate(outputs):
        with output.open("w") as file:
            engines.append(
                subprocess.Popen(
                    [sys.executable, "-c", ENGINE, str(seed)], env=daemon.environment, stdout=file, stderr=file
                )
            )
    try:
        for _ in range(KILLS):
            before = progress(outputs)
            while progress(outputs) == before:  # the engines are at work with this daemon
                assert all(engine.poll() is None for engine in engines), "an engine died with its daemon"
                time.sleep(0.01)
            time.sleep(dice.uniform(0.0, 0.4))  # the random point; nothing is waited for
            daemon.kill()
            daemon.start()
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()
    lines = [line for output in outputs for line in output.read_text().splitlines()]
    assert not [line for line in lines if not line.startswith("flushed ")]
    flushed = {bytes.fromhex(line.split()[1]) for line in lines}
    assert len(flushed) > KILLS // 3, "the engines had too little time to store anything"
    with omlxd.connect(daemon.socket) as cache:
        space = cache.namespace(model="org/m", fingerprint="f", block_tokens=64)
        found = 0
        for joined in flushed:
            hashes = [joined[at : at + 32] for at in range(0, len(joined), 32)]
            nbytes = 40_000 + hashes[0][0] * 4_000
            with space.load_keys(hashes, timeout=30) as lease:
                for block in lease:
                    assert bytes(block.view) == payload(block.key, nbytes)
                    found += 1
                assert len(lease) == len(hashes), f"a committed block is gone: {lease.stopped}"
        assert found
        assert cache.stats()["counts"].get("internal_errors", 0) == 0
    assert "moved aside" not in daemon.log.read_text()
