"""An SSD tier at its limit for a long time: latency, size of the file and memory, as they go.

``scripts/churn [--seconds N] [--limit SIZE] [--plot FILE] [--json]``. Records are small (1 to 64 KiB), so that minutes turn
the store over as often as hours would with blocks of 2 MiB. Between the commits some records are restored, removed and
used, and the disk is looked at as the daemon does. The verdict compares the last quarter of the run with the second: what
grows or slows down shows there. ``--plot`` needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import numpy as np
import psutil

from omlxd.storage.blocks import BlockMeta, block_key
from omlxd.storage.sizes import parse_size
from omlxd.storage.ssd import Damaged, Missing, SsdTier

NAMESPACE = b"c" * 32
CHAIN = 8
"""Blocks of a chain, stored by one commit."""
SAMPLES = 240
WINDOW = 6
"""Samples on either side of one that the bold lines of the plot are medians of."""
LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One stretch of the run. Times in seconds of wall clock and of this process's CPU, sizes in bytes."""

    at: float
    commits: int
    commit_median: float
    commit_p99: float
    commit_cpu: float
    used: int
    memory: int
    turnovers: float


def churn(path: Path, limit: int, seconds: float) -> tuple[list[Sample], int]:
    """Run; returns the samples, and how often LMDB found no room."""
    rng = Random(11)
    payload = memoryview(np.random.default_rng(12).bytes(1 << 16))
    out = memoryview(bytearray(1 << 16))
    process = psutil.Process()
    samples: list[Sample] = []
    tier = SsdTier.open(
        path, limit=limit, min_free=0, codec="raw", clock=time.time, free_space=lambda p: shutil.disk_usage(p).free
    )
    begun = window = looked = time.monotonic()
    latencies: list[float] = []
    cpu = 0.0
    pushed = chain = 0
    try:
        while (now := time.monotonic()) - begun < seconds:
            chain += 1
            metas = chain_of(chain, rng)
            began, cpu_began = time.perf_counter(), time.process_time()
            plan = tier.plan([tier.encode(meta, payload[: meta.nbytes]) for meta in metas])
            if plan is None:
                raise RuntimeError(f"no plan at the limit: {dict(tier.counts)}")
            tier.applied(plan, tier.commit(plan))
            latencies.append(time.perf_counter() - began)
            cpu += time.process_time() - cpu_began
            pushed += sum(meta.nbytes for meta in metas)
            use(tier, chain, rng, out)
            if now - looked > LOOK_SECONDS:
                looked = now
                tier.persist()
                tier.observe(tier.probe())
            if now - window > seconds / SAMPLES and len(latencies) >= 20:
                ordered = sorted(latencies)
                samples.append(
                    Sample(
                        now - begun,
                        len(latencies),
                        statistics.median(ordered),
                        ordered[int(len(ordered) * 0.99)],
                        cpu / len(latencies),
                        tier.used_bytes,
                        process.memory_info().rss,
                        pushed / limit,
                    )
                )
                latencies, cpu, window = [], 0.0, now
        return samples, tier.counts["map_full"]
    finally:
        tier.close()


def chain_of(number: int, rng: Random) -> list[BlockMeta]:
    """A chain of blocks of 1 to 64 KiB."""
    keys = [block_key(number.to_bytes(16, "big") + at.to_bytes(16, "big")) for at in range(CHAIN)]
    return [
        BlockMeta(key, NAMESPACE, rng.randrange(1 << 10, 1 << 16), keys[at - 1] if at else None, at)
        for at, key in enumerate(keys)
    ]


def use(tier: SsdTier, newest: int, rng: Random, out: memoryview) -> None:
    """Restore and use a chain that may still be there; now and then remove one."""
    keys = [meta.key for meta in chain_of(max(1, newest - int(rng.expovariate(1 / 200))), Random(0))]
    there = [key for key in keys if key in tier]
    for key in there:
        try:
            tier.read_into(key, out)
        except (Missing, Damaged) as error:
            raise RuntimeError(f"a record that is there can't be restored: {error}") from error
    tier.touch(there)
    if rng.random() < 0.05:
        tier.discard(keys, "removed")


def verdict(samples: list[Sample], limit: int) -> dict[str, float]:
    """The last quarter of the run against the second; the first fills the store."""
    quarter = len(samples) // 4
    if not quarter:
        raise RuntimeError("the run was too short to say anything: give more --seconds")
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]

    def ratio(name: str) -> float:
        before, after = (statistics.median(getattr(one, name) for one in part) for part in (early, late))
        return float(after / before)

    return {
        "seconds": samples[-1].at,
        "turnovers": samples[-1].turnovers,
        "commits": sum(one.commits for one in samples),
        "commit_cpu_late_vs_early": ratio("commit_cpu"),
        "commit_median_late_vs_early": ratio("commit_median"),
        "commit_p99_late_vs_early": ratio("commit_p99"),
        "memory_late_vs_early": ratio("memory"),
        "used_late_vs_early": ratio("used"),
        "used_max_over_limit": max(one.used for one in samples) / limit,
    }


def plot(samples: list[Sample], limit: int, file: Path) -> None:
    """Latency, file and memory over the time of the run, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (latency, size, memory) = pyplot.subplots(3, 1, figsize=(7, 6), sharex=True)
    minutes = [one.at / 60 for one in samples]
    for name, label in (
        ("commit_p99", "99th percentile"),
        ("commit_median", "median"),
        ("commit_cpu", "CPU time, mean"),
    ):
        values = [getattr(one, name) * 1e3 for one in samples]
        smooth = [statistics.median(values[max(0, at - WINDOW) : at + WINDOW + 1]) for at in range(len(values))]
        (line,) = latency.plot(minutes, smooth, lw=1.2, label=label)
        latency.plot(minutes, values, lw=0.4, alpha=0.5, color=line.get_color())
    latency.set_yscale("log")
    latency.set_ylabel("commit of 8 blocks, ms")
    latency.legend(fontsize=7, ncols=3)
    size.plot(minutes, [one.used / 2**20 for one in samples], lw=0.8)
    size.axhline(limit / 2**20, color="grey", ls="--", lw=0.8)
    size.set_ylim(0, 1.15 * limit / 2**20)
    size.set_ylabel("store on disk, MiB")
    memory.plot(minutes, [one.memory / 2**20 for one in samples], lw=0.8)
    memory.set_ylim(0, 1.15 * max(one.memory for one in samples) / 2**20)
    memory.set_ylabel("process, MiB")
    memory.set_xlabel(f"minutes; the store was written {samples[-1].turnovers:.0f} times over")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=90)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="scripts/churn", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--limit", type=parse_size, default=64 << 20, help="limit of the store (default 64MiB)")
    parser.add_argument("--dir", type=Path, default=None, help="a folder on the disk to use")
    parser.add_argument("--plot", type=Path, default=None, help="a PNG file to draw into")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--from", type=Path, default=None, dest="earlier", help="draw what --json gave earlier; run nothing"
    )
    options = parser.parse_args()
    if options.earlier is not None:
        if options.plot is None:
            parser.error("--from needs --plot")
        plot([Sample(**one) for one in json.loads(options.earlier.read_text())["samples"]], options.limit, options.plot)
        return
    with tempfile.TemporaryDirectory(prefix="omlxd-churn-", dir=options.dir) as folder:
        samples, map_full = churn(Path(folder), options.limit, options.seconds)
    found = {**verdict(samples, options.limit), "map_full": map_full}
    if options.plot is not None:
        plot(samples, options.limit, options.plot)
    if options.json:
        print(json.dumps({**found, "samples": [asdict(one) for one in samples]}))
        return
    for name, value in found.items():
        print(f"{name:30} {value:.3f}" if isinstance(value, float) else f"{name:30} {value}")


if __name__ == "__main__":
    sys.exit(main())
