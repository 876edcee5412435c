"""Both limits hold at every moment, seen from outside, while far more than they allow is pushed through."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

import omlxd
from scripts.daemon_process import DaemonProcess
from tests.e2e.conftest import StartDaemon

MIB = 1 << 20
PUSHED = 1024 * MIB
"""By each of two clients."""

ENGINE = """
import sys, numpy as np, omlxd
from tests.e2e.blocks import payload
seed, to_push = int(sys.argv[1]), int(sys.argv[2])
random = np.random.default_rng(seed)
space = omlxd.connect().namespace(model=f"org/{seed}", fingerprint="f", block_tokens=64)
pushed = loaded = 0
chains = []
while pushed < to_push:
    hashes = [random.bytes(32) for _ in range(int(random.integers(1, 17)))]
    nbytes = int(random.integers(50_000, 4_000_000))
    space.store_keys(hashes, [payload(h, nbytes) for h in hashes], timeout=30)
    pushed += nbytes * len(hashes)
    chains.append((hashes, nbytes))
    hashes, nbytes = chains[int(random.integers(max(0, len(chains) - 40), len(chains)))]
    with space.load_keys(hashes, timeout=30) as lease:
        for block in lease:
            assert block.key in hashes and bytes(block.view) == payload(block.key, nbytes), "a wrong byte"
            loaded += 1
print(pushed, loaded)
"""


def disk_bytes(store: Path) -> int:
    """What ``du`` says of the store's folder."""
    return sum(file.stat().st_blocks * 512 for file in (store, *store.rglob("*")))


def shared_bytes(pid: int) -> int:
    """Resident shared memory of a process: the arena, and nothing else (mapped files are counted apart)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssShmem")).split()[1])


class Sampler(threading.Thread):
    """Looks at a daemon from outside until told to stop, and keeps the largest figures."""

    def __init__(self, daemon: DaemonProcess) -> None:
        super().__init__(daemon=True)
        self._pid = daemon.pid
        self._store = daemon.directory / "store"
        self._end = threading.Event()
        self.shared = self.disk = self.samples = 0

    def run(self) -> None:
        while not self._end.wait(0.01):
            try:
                self.shared = max(self.shared, shared_bytes(self._pid))
                self.disk = max(self.disk, disk_bytes(self._store))
            except FileNotFoundError:
                continue  # a file that was being replaced
            self.samples += 1

    def finish(self) -> None:
        self._end.set()
        self.join()


@pytest.mark.skipif(sys.platform != "linux", reason="resident shared memory is read from /proc")
def test_two_clients_push_two_gibibytes_through_small_tiers(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(ram_size="64MiB", ssd_size="256MiB")
    sampler = Sampler(daemon)
    sampler.start()
    engines = [
        subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(seed), str(PUSHED)],
            env=daemon.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    try:
        results = [engine.communicate(timeout=280) for engine in engines]
    finally:
        for engine in engines:
            engine.kill()
    sampler.finish()
    for engine, (output, errors) in zip(engines, results, strict=True):
        assert engine.returncode == 0, errors
        pushed, loaded = map(int, output.split())
        assert pushed >= PUSHED
        assert loaded > 100
    assert sampler.samples > 100
    assert sampler.shared <= 64 * MIB
    assert sampler.disk <= 256 * MIB
    with omlxd.connect(daemon.socket) as cache:
        stats = cache.stats()
        assert stats["counts"].get("internal_errors", 0) == 0
        assert abs(stats["ssd"]["used"] - disk_bytes(daemon.directory / "store")) <= 8 * 4096
        held = {name: stats["ram"][name] for name in ("leases", "reservations", "reserved_bytes")}
        assert held == {"leases": 0, "reservations": 0, "reserved_bytes": 0}
    assert "Traceback" not in daemon.log.read_text()
