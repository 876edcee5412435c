"""Eight client processes at once, mixed loads and stores of three namespaces, more than the RAM tier holds.

Every byte that is loaded is checked. Afterwards nothing may be left: no lease, no reservation, no descriptor, no shared memory.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import omlxd
from scripts.daemon_process import DaemonProcess

CLIENTS = 8
RAM = "512MiB"
SSD = "2GiB"
SPACES = (("small", 64 << 10, 48), ("middle", 1 << 20, 24), ("large", 5 << 20, 12))
"""Model, bytes of a block, most blocks of a chain."""
CHAINS = 24
"""Different chains of each namespace; together about 5 times the RAM tier."""
SETTLE_SECONDS = 20.0


@dataclass(slots=True)
class Tally:
    """What one client did."""

    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_s: list[float] = field(default_factory=list)
    lookup_s: list[float] = field(default_factory=list)
    wrong: int = 0
    declined: int = 0


def chain(space: str, number: int, blocks: int) -> list[bytes]:
    return [f"{space}-{number}-{index}".encode().ljust(32, b".") for index in range(blocks)]


def content(chain_hash: bytes, nbytes: int) -> NDArray[np.uint8]:
    """The bytes of a block: a function of its name, cheap to make and to compare, different everywhere."""
    seed = int.from_bytes(chain_hash[:24], "little") % (1 << 61)
    base = np.arange(nbytes // 8, dtype=np.uint64)
    return (base * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)).view(np.uint8)


def client(socket: str, seconds: float, seed: int) -> Tally:
    """One engine: looks a prompt up, loads and checks what is there, stores the rest."""
    rng = random.Random(seed)
    tally = Tally()
    with omlxd.connect(socket, name=f"bench-{seed}") as cache:
        spaces = {name: cache.namespace(model=name, fingerprint="bench") for name, _, _ in SPACES}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            name, nbytes, most = rng.choice(SPACES)
            space = spaces[name]
            keys = chain(name, min(rng.randrange(CHAINS), rng.randrange(CHAINS)), rng.randint(1, most))
            begun = time.perf_counter()
            space.match_keys(keys)
            tally.lookup_s.append(time.perf_counter() - begun)
            have = _load(space, keys, nbytes, tally)
            if have < len(keys):
                result = space.store_keys(keys, [memoryview(content(key, nbytes)) for key in keys[have:]], start=have)
                tally.stored_bytes += result.nbytes
                tally.declined += sum(result.declined.values())
    return tally


def _load(space: omlxd.Space, keys: list[bytes], nbytes: int, tally: Tally) -> int:
    begun = time.perf_counter()
    copies = []
    with space.load_keys(keys, timeout=5.0) as lease:
        for block in lease:
            copies.append(np.array(np.frombuffer(block.view, np.uint8)))
            block._lease.check()
    tally.load_s.append(time.perf_counter() - begun)
    for key, copy in zip(keys, copies, strict=False):
        tally.wrong += not np.array_equal(copy, content(key, nbytes))
        tally.loaded_bytes += nbytes
    return len(copies)


def run(folder: Path, seconds: float, clients: int = CLIENTS) -> dict[str, object]:
    """The whole part; figures for ``clients`` processes over ``seconds``."""
    with DaemonProcess(folder, ram_size=RAM, ssd_size=SSD) as daemon:
        with omlxd.connect(daemon.socket) as cache:
            before = _descriptors(daemon.pid)
            program = [sys.executable, "-m", "scripts.bench_ram_clients", str(daemon.socket), str(seconds)]
            engines = [
                subprocess.Popen([*program, str(seed)], env=daemon.environment, stdout=subprocess.PIPE, text=True)
                for seed in range(clients)
            ]
            outputs = [engine.communicate()[0] for engine in engines]
            errors = sum(engine.returncode != 0 for engine in engines)
            tallies = [Tally(**json.loads(output)) for output in outputs if output]
            left = _left_over(cache, daemon, before)
        loads = sorted(second for tally in tallies for second in tally.load_s)
        lookups = sorted(second for tally in tallies for second in tally.lookup_s)
        moved = sum(tally.loaded_bytes + tally.stored_bytes for tally in tallies)
        return {
            "clients": clients,
            "seconds": seconds,
            "gb_s": moved / seconds / 1e9,
            "loads": len(loads),
            "load_p50_ms": statistics.median(loads) * 1e3,
            "load_p99_ms": loads[int(0.99 * len(loads))] * 1e3,
            "lookup_p50_ms": statistics.median(lookups) * 1e3,
            "lookup_p99_ms": lookups[int(0.99 * len(lookups))] * 1e3,
            "wrong_blocks": sum(tally.wrong for tally in tallies),
            "declined_blocks": sum(tally.declined for tally in tallies),
            "errors": errors,
            "leaks": left,
        }


def _left_over(cache: omlxd.Cache, daemon: DaemonProcess, descriptors: int) -> dict[str, int]:
    """What the clients left behind; the daemon notices their end within moments."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        stats = cache.stats()
        ram = stats["ram"]
        segments = 2 * -(-ram["mapped"] // (1 << 30))  # a descriptor of the segment, one of its mapping
        left = {
            "leases": ram["leases"],
            "reservations": ram["reservations"],
            "clients": len(stats["clients"]) - 1,
            "descriptors": max(0, _descriptors(daemon.pid) - descriptors - segments),
            "bytes_over_budget": max(0, ram["used"] - ram["limit"]),
        }
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _descriptors(pid: int) -> int:
    """Open descriptors of a process; 0 where the system does not show them."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def main() -> None:
    socket, seconds, seed = sys.argv[1:]
    tally = client(socket, float(seconds), int(seed))
    print(json.dumps({name: getattr(tally, name) for name in Tally.__dataclass_fields__}))


if __name__ == "__main__":
    main()
