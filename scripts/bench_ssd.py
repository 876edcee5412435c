"""The SSD tier against the disk itself: ``scripts/bench ssd [--json] [--quick] [--dir PATH]``.

Ratios; both sides of each are measured in turns in one run. ``--dir`` says which disk (default: the system's
temporary directory).

restore_vs_pread      a chain of 2 MiB blocks, head to tail, cold page cache, codec raw, four restores at a time as in the
                      daemon, against `pread` of as many bytes from one file (`restore_one_vs_pread`: one at a time)
restore_codec_vs_raw  seconds of a raw restore over those with zstd-planes2, of bf16 noise; above 1: compression restores faster.
                      Both read and check their bytes.
restore_auto_vs_raw   the same with the codec that `auto` chose for them by what it measured before (auto_codec): never far below 1
spill_vs_write        write + fdatasync of the same bytes with the same sync points, over encode + plan + commit
ram_hit_p99_under_spill_vs_idle
                      p99 of a RAM hit of a real daemon while another client stores and the daemon spills, over that at rest
durability_*_vs_commit
                      seconds of a spill of 2 MiB (64 KiB) blocks, 16 a transaction, with durability interval and none, over commit
file_over_live        disk used over payload bytes after churn at the limit with sizes of 0.1 to 4 MB; map_full: how often
                      LMDB had no room meanwhile (must be 0)
open_200k_s           from nothing to the first block restored, 200,000 records; open_200k_cpu_s: the CPU time in it, which other
                      programs on the machine change little; bytes_per_record: Python memory of each
written_per_served    blocks written to the SSD over blocks served from it, on the conversation trace through the real store, for
                      each write mode ($OMLXD_TRACES or --trace says where the trace is)
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
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from random import Random

import numpy as np

from omlxd.storage.blocks import BlockMeta
from omlxd.storage.codec_choice import AUTO
from omlxd.storage.environment import DURABILITIES, Durability
from omlxd.storage.ssd import SsdTier
from scripts.bench_ssd_wear import trace_file, wear
from scripts.daemon_process import DaemonProcess

MIB = 1 << 20
BLOCK = 2 * MIB
GROUP = 16
"""Blocks a transaction, and between two syncs of the plain file."""
NAMESPACE = b"b" * 32
SMALL_BLOCK = 64 << 10
RESTORES_AT_ONCE = 4
CODERS = 2
"""As many as the daemon has (storage/tiers.py)."""

Figures = dict[str, object]


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def key_of(chain: object, position: int) -> bytes:
    return sha256(f"{chain}/{position}".encode()).digest() + bytes(4)


def chain_of(name: object, count: int, nbytes: int) -> list[BlockMeta]:
    return [
        BlockMeta(key_of(name, at), NAMESPACE, nbytes, key_of(name, at - 1) if at else None, at) for at in range(count)
    ]


def free_space(path: Path) -> int:
    return shutil.disk_usage(path).free


@contextmanager
def tier_at(
    path: Path, limit: int, codec: str = "raw", policy: str = "lru", durability: Durability = "commit"
) -> Iterator[SsdTier]:
    tier = SsdTier.open(
        path,
        limit=limit,
        min_free=0,
        codec=codec,
        policy=policy,
        durability=durability,
        clock=time.time,
        free_space=free_space,
    )
    try:
        yield tier
    finally:
        tier.close()


def spill(tier: SsdTier, metas: list[BlockMeta], payload: memoryview) -> None:
    """As the daemon does it: a group is encoded by several threads, then planned and committed."""
    with ThreadPoolExecutor(CODERS) as coders:
        for start in range(0, len(metas), GROUP):
            group = metas[start : start + GROUP]
            plan = tier.plan(list(coders.map(lambda meta: tier.encode(meta, payload[: meta.nbytes]), group)))
            if plan is None:
                raise RuntimeError(f"nothing of {len(group)} blocks was taken: {dict(tier.counts)}")
            outcome = tier.commit(plan)
            tier.applied(plan, outcome)
            if outcome.reason:
                raise RuntimeError(outcome.reason)


def forget_pages(path: Path) -> None:
    """Take a file out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def bf16_noise(nbytes: int) -> memoryview:
    values = (np.random.default_rng(1).standard_normal(nbytes // 2) * 0.7).astype(np.float32)
    return memoryview((values.view(np.uint32) >> 16).astype("<u2")).cast("B")


# -- speed ----------------------------------------------------------------------------------------


def restore(directory: Path, blocks: int, rounds: int) -> Figures:
    """Before each turn its file is closed and forgotten: what a process has mapped would stay in memory."""
    payload = bf16_noise(BLOCK)
    plain = directory / "plain"
    plain.write_bytes(payload.tobytes() * blocks)
    metas = chain_of("restore", blocks, BLOCK)
    slots = [memoryview(bytearray(BLOCK)) for _ in range(16)]
    for slot in slots:
        slot[:] = bytes(BLOCK)
    limit = (blocks + 64) * BLOCK

    def read_plain() -> None:
        descriptor = os.open(plain, os.O_RDONLY)
        for at in range(blocks):
            os.preadv(descriptor, [slots[at % len(slots)]], at * BLOCK)
        os.close(descriptor)

    def read_one_by_one(tier: SsdTier) -> None:
        for at, meta in enumerate(metas):
            tier.read_into(meta.key, slots[at % len(slots)])

    def read_at_once(tier: SsdTier) -> None:
        with ThreadPoolExecutor(RESTORES_AT_ONCE) as pool:
            done = pool.map(lambda at: tier.read_into(metas[at].key, slots[at % len(slots)]), range(blocks))
            if sum(done) != blocks * BLOCK:
                raise RuntimeError("a restore came out short")

    def cold(name: str, work: Callable[[SsdTier], None]) -> float:
        forget_pages(directory / name / "data.mdb")
        with tier_at(directory / name, limit) as tier:
            return seconds(lambda: work(tier))

    def cold_plain() -> float:
        forget_pages(plain)
        return seconds(read_plain)

    for name in ("raw", "zstd-planes"):
        with tier_at(directory / name, limit, name) as tier:
            spill(tier, metas, payload)
    chosen = fill_by_auto(directory, metas, payload, limit)
    works: dict[str, Callable[[], float]] = {
        "pread": cold_plain,
        "one": lambda: cold("raw", read_one_by_one),
        "raw": lambda: cold("raw", read_at_once),
        "codec": lambda: cold("zstd-planes", read_at_once),
        "auto": lambda: cold("auto", read_at_once),
    }
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            taken[name].append(work())
    median = {name: statistics.median(times) for name, times in taken.items()}
    nbytes = blocks * BLOCK
    return {
        "restore_vs_pread": median["pread"] / median["raw"],
        "restore_one_vs_pread": median["pread"] / median["one"],
        "restore_codec_vs_raw": median["raw"] / median["codec"],
        "restore_auto_vs_raw": median["raw"] / median["auto"],
        "auto_codec": chosen,
        "pread_gb_s": nbytes / median["pread"] / 1e9,
        "restore_gb_s": nbytes / median["raw"] / 1e9,
    }


def fill_by_auto(directory: Path, metas: list[BlockMeta], payload: memoryview, limit: int) -> str:
    """Store the blocks with the codec that ``auto`` chooses after cold restores of both kinds; returns which that is."""
    path = directory / "auto"
    tried = {name: chain_of(name, 32, BLOCK) for name in ("raw", "zstd-planes")}
    with tier_at(path, limit, AUTO) as tier:
        for name, blocks in tried.items():
            tier.set_codec(NAMESPACE, name)
            spill(tier, blocks, payload)
    forget_pages(path / "data.mdb")
    with tier_at(path, limit, AUTO) as tier, ThreadPoolExecutor(RESTORES_AT_ONCE) as pool:
        for blocks in tried.values():
            slots = [memoryview(bytearray(BLOCK)) for _ in blocks]
            list(pool.map(tier.read_into, [meta.key for meta in blocks], slots))
            tier.discard([meta.key for meta in blocks], "removed")
        spill(tier, metas, payload)
        return tier.codec_of(NAMESPACE)


def write_in_groups(file: Path, blocks: int, payload: memoryview) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for at in range(blocks):
        os.write(descriptor, payload)
        if at % GROUP == GROUP - 1:
            getattr(os, "fdatasync", os.fsync)(descriptor)
    os.close(descriptor)


def spilling(directory: Path, blocks: int, rounds: int) -> Figures:
    payload = memoryview(np.random.default_rng(2).bytes(BLOCK))
    taken: dict[str, list[float]] = {"write": [], "spill": []}
    with tier_at(directory / "spill", (blocks * (rounds + 1) + 64) * BLOCK) as tier:
        for turn in range(rounds + 1):
            metas = chain_of(("spill", turn), blocks, BLOCK)
            works: dict[str, Callable[[], None]] = {
                "write": lambda file=directory / f"written{turn}": write_in_groups(file, blocks, payload),  # type: ignore[misc]
                "spill": lambda metas=metas: spill(tier, metas, payload),  # type: ignore[misc]
            }
            for name, work in works.items():
                # Memory that a virtual machine has not used before costs several times as much: both find used pages.
                scratch = directory / "scratch"
                write_in_groups(scratch, blocks, payload)
                scratch.unlink()
                took = seconds(work)
                if turn:
                    taken[name].append(took)
    median = {name: statistics.median(times) for name, times in taken.items()}
    return {
        "spill_vs_write": median["write"] / median["spill"],
        "spill_gb_s": blocks * BLOCK / median["spill"] / 1e9,
    }


def durabilities(directory: Path, nbytes: int, rounds: int) -> Figures:
    """Seconds to spill so many bytes with each durability, over those with ``commit``; large and small blocks."""
    payload = memoryview(np.random.default_rng(5).bytes(BLOCK))
    found: Figures = {}
    for size in (BLOCK, SMALL_BLOCK):
        metas = chain_of(("durability", size), nbytes // size, size)
        taken: dict[Durability, list[float]] = {name: [] for name in DURABILITIES}
        for turn in range(rounds):
            for name, times in taken.items():
                with tier_at(directory / f"{name}{size}{turn}", 2 * nbytes + (64 << 20), durability=name) as tier:
                    times.append(seconds(lambda tier=tier, metas=metas: spill(tier, metas, payload)))  # type: ignore[misc]
        median = {name: statistics.median(times) for name, times in taken.items()}
        found[f"durability_{size >> 10}k_vs_commit"] = {
            name: median[name] / median["commit"] for name in median if name != "commit"
        }
    return found


_STORER = """
import os, sys, omlxd
cache = omlxd.connect(sys.argv[1])
space = cache.namespace(model="bench", fingerprint="noise")
payload = bytearray(os.urandom(2 << 20))
number = 0
print("ready", flush=True)
while True:
    payload[:8] = number.to_bytes(8, "little")
    space.store_keys([b"noise%027d" % number], [payload])
    number += 1
"""


def ram_hits(directory: Path, hits: int, turns: int) -> Figures:
    """p99 of a RAM hit at rest and while another client stores as fast as it can, in turns."""
    import omlxd

    settings = {"ram_size": "256MiB", "ssd_size": "1GiB", "ssd_mode": "write_through"}
    idle: list[float] = []
    busy: list[float] = []
    with DaemonProcess(directory / "daemon", **settings) as daemon, omlxd.connect(daemon.socket) as cache:
        space = cache.namespace(model="bench", fingerprint="hot")
        hot = [f"hot-{at}".encode().ljust(32, b".") for at in range(4)]
        space.store_keys(hot, [os.urandom(256 << 10) for _ in hot])

        def hit() -> None:
            with space.load_keys(hot) as lease:
                for _ in lease:
                    pass

        for _ in range(turns):
            idle += [seconds(hit) for _ in range(hits)]
            storer = subprocess.Popen(
                [sys.executable, "-c", _STORER, str(daemon.socket)], env=daemon.environment, stdout=subprocess.PIPE
            )
            try:
                assert storer.stdout is not None
                storer.stdout.readline()
                busy += [seconds(hit) for _ in range(hits)]
            finally:
                storer.kill()
                storer.wait()
    p99 = {name: statistics.quantiles(times, n=100)[98] for name, times in (("idle", idle), ("busy", busy))}
    return {
        "ram_hit_p99_under_spill_vs_idle": p99["busy"] / p99["idle"],
        "ram_hit_p99_idle_us": p99["idle"] * 1e6,
        "ram_hit_p99_under_spill_us": p99["busy"] * 1e6,
    }


# -- space ----------------------------------------------------------------------------------------


def churn(directory: Path, limit: int, times: int) -> Figures:
    """Blocks of 0.1 to 4 MB at the limit, ``times`` its size."""
    rng = Random(3)
    payload = memoryview(np.random.default_rng(4).bytes(4_000_000))
    latencies: list[float] = []
    with tier_at(directory / "churn", limit) as tier:
        pushed = chain = 0
        while pushed < times * limit:
            metas: list[BlockMeta] = []
            size = 0
            while size < tier.group_bytes:
                metas.append(chain_of(chain, 1, rng.randrange(100_000, 4_000_000))[0])
                size += metas[-1].nbytes
                chain += 1
            plan = tier.plan([tier.encode(meta, payload[: meta.nbytes]) for meta in metas])
            if plan is None:
                raise RuntimeError(f"no plan at the limit: {dict(tier.counts)}")
            latencies.append(seconds(lambda plan=plan: tier.applied(plan, tier.commit(plan))))  # type: ignore[misc]
            pushed += size
        stored = sum(space.stored_bytes for space in tier.namespaces())
        used, full = tier.used_bytes, tier.counts["map_full"]
    ordered = sorted(latencies)
    return {
        "file_over_live": used / stored,
        "map_full": full,
        "commit_p99_over_median": ordered[int(len(ordered) * 0.99)] / statistics.median(ordered),
    }


def opening(directory: Path, records: int) -> Figures:
    path = directory / "many"
    payload = memoryview(bytes(512))
    with tier_at(path, 2 << 30) as tier:
        for chain in range(records // 400):
            metas = chain_of(chain, 400, 512)
            plan = tier.plan([tier.encode(meta, payload) for meta in metas])
            if plan is None:
                raise RuntimeError("the store of many records is too small")
            tier.applied(plan, tier.commit(plan))
    found: Figures = {"records": records}
    for policy in ("lru", "arc", "prefix"):
        slot = memoryview(bytearray(512))
        times, cpu = [], []
        for _ in range(5):
            begun, cpu_begun = time.perf_counter(), time.process_time()
            with tier_at(path, 2 << 30, policy=policy) as tier:
                tier.read_into(key_of(7, 11), slot)
                times.append(time.perf_counter() - begun)
                cpu.append(time.process_time() - cpu_begun)
                keys = [key_of(chain, at) for chain in range(records // 400) for at in range(3)][:2048]
                found["lookup_2048_us"] = min(seconds(lambda: [key in tier for key in keys]) for _ in range(5)) * 1e6  # noqa: B023
        tracemalloc.start()
        with tier_at(path, 2 << 30, policy=policy) as tier:
            tier.observe(tier.probe())
            memory = tracemalloc.get_traced_memory()[0] / len(tier)
        tracemalloc.stop()
        suffix = "" if policy == "lru" else f"_{policy}"
        found[f"open_200k_s{suffix}"] = statistics.median(times)
        found[f"open_200k_cpu_s{suffix}"] = statistics.median(cpu)
        found[f"bytes_per_record{suffix}"] = memory
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/bench ssd", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="figures as one JSON object")
    parser.add_argument("--quick", action="store_true", help="smaller sizes: some ten seconds, rougher figures")
    parser.add_argument("--dir", type=Path, default=None, help="a folder on the disk to measure")
    parser.add_argument(
        "--trace", type=Path, default=None, help="mooncake_conversation.jsonl.gz; default: the one in $OMLXD_TRACES"
    )
    parser.add_argument(
        "--only", default="", help="some parts, by comma: restore, spill, ram, durability, churn, open, wear"
    )
    options = parser.parse_args()
    quick = options.quick
    parts: dict[str, Callable[[Path], Figures]] = {
        "restore": lambda path: restore(path, 64 if quick else 256, 3 if quick else 7),
        "spill": lambda path: spilling(path, 64 if quick else 128, 2 if quick else 5),
        "ram": lambda path: ram_hits(path, 200 if quick else 1000, 2 if quick else 5),
        "durability": lambda path: durabilities(path, (64 if quick else 128) * MIB, 2 if quick else 3),
        "churn": lambda path: churn(path, (256 if quick else 1024) * MIB, 3 if quick else 5),
        "open": lambda path: opening(path, 200_000),
        "wear": lambda path: wear(path, trace_file(options.trace), 300 if quick else 2500),
    }
    chosen = [name for name in options.only.split(",") if name] or list(parts)
    if "wear" in chosen:
        try:
            trace_file(options.trace)  # before minutes are spent on the rest
        except FileNotFoundError as error:
            parser.error(str(error))
    figures: Figures = {"load": os.getloadavg()[0], "cpus": os.cpu_count()}
    for name in chosen:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="omlxd-bench-", dir=options.dir) as folder:
            figures |= parts[name](Path(folder))
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    for name, value in figures.items():
        print(f"{name:34} {value:.3f}" if isinstance(value, float) else f"{name:34} {value}")


if __name__ == "__main__":
    main()
