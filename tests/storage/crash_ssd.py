"""Kills a process that works on a store, again and again, and looks at what is left: ``crash_ssd.py PATH ROUNDS SEED``.

The child tells through a pipe what it is about to give up and what it has been told is stored. After each kill the store must
open, its accounting must equal a recount, every visible record must verify, and what was stored and not given up must be there.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

from omlxd.storage.ssd import SsdError, SsdTier
from tests.storage.ssd_store import NAMESPACE, OTHER, assert_exact, chain_of, key_of, open_tier, payload_of

MIB = 1 << 20
LIMITS = (6 * MIB, 8 * MIB)


class Worker:
    """The child: any operation that changes the disk, at random."""

    def __init__(self, path: Path, seed: int, pipe: int) -> None:
        self.path = path
        self.rng = random.Random(seed)
        self.seed = seed
        self.pipe = pipe
        self.chain = 0

    def say(self, sign: str, keys: list[bytes]) -> None:
        os.write(self.pipe, "".join(f"{sign}{key.hex()}\n" for key in keys).encode())

    def run(self) -> None:
        rng = self.rng
        policy = rng.choice(["lru", "arc"])
        tier = open_tier(self.path, limit=LIMITS[1], codec=rng.choice(["raw", "zstd"]), policy=policy)
        for step in range(10_000):
            what = rng.random()
            if what < 0.6:
                self.put(tier)
            elif what < 0.75:
                tier.touch([key_of((self.seed, rng.randrange(self.chain + 1)), at) for at in range(4)])
                tier.persist()
            elif what < 0.85 and tier.entries:
                keys = rng.sample(sorted(tier.entries), min(3, len(tier.entries)))
                self.say("-", keys)
                tier.discard(keys, "removed")
            elif what < 0.88:
                namespace = rng.choice([NAMESPACE, OTHER, None])
                self.say("-", [k for k, entry in tier.entries.items() if namespace in (None, entry.namespace)])
                tier.clear(namespace)
            elif what < 0.92:
                tier.limit = rng.choice(LIMITS)
            elif what < 0.93:
                tier.collect()
            elif what < 0.95:
                self.compact(tier)
            elif what < 0.97:
                tier.close(clean=rng.random() < 0.7)
                tier = open_tier(self.path, limit=LIMITS[1], policy=policy)
            else:
                tier.observe(tier.probe())
            self.carry_out(tier, step)

    def compact(self, tier: SsdTier) -> None:
        with contextlib.suppress(SsdError):  # no room for both files: then it changes nothing
            tier.rewrite()
        tier.observe(tier.probe())

    def put(self, tier: SsdTier) -> None:
        rng = self.rng
        self.chain += 1
        sizes = [rng.randrange(1, 300_000) for _ in range(rng.randrange(1, 6))]
        metas = chain_of((self.seed, self.chain), sizes, rng.choice([NAMESPACE, OTHER]))
        plan = tier.plan([tier.encode(meta, memoryview(payload_of(meta.key, meta.nbytes))) for meta in metas])
        if plan is None:
            return
        self.say("-", plan.victim_keys)
        outcome = tier.commit(plan)
        tier.applied(plan, outcome)
        assert outcome.stored or outcome.reason, outcome
        self.say("+", [meta.key for meta in metas if meta.key in tier])

    def carry_out(self, tier: SsdTier, step: int) -> None:
        while tier.has_chores and (plan := tier.plan()) is not None:
            self.say("-", plan.victim_keys)
            tier.applied(plan, tier.commit(plan))


def one_round(path: Path, seed: int, known: set[bytes]) -> int:
    """Start a worker, kill it after a random time, check. ``known``: what must be there; brought up to date."""
    rng = random.Random(seed)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            Worker(path, seed, writing).run()
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(3)  # it should have been killed long before
    os.close(writing)
    time.sleep(rng.uniform(0.0, 0.15) if rng.random() < 0.8 else rng.uniform(0.0, 0.02))
    os.kill(child, signal.SIGKILL)
    said = b""
    while more := os.read(reading, 1 << 16):
        said += more
    os.close(reading)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the worker of seed {seed} ended by itself, status {status}"
    for line in said.decode().splitlines():
        if len(line) == 73:
            (known.add if line[0] == "+" else known.discard)(bytes.fromhex(line[1:]))
    # A worker may have been killed before it could say that something was stored: only ``known`` must be there.
    return check(path, known)


def check(path: Path, known: set[bytes]) -> int:
    tier = open_tier(path, limit=LIMITS[1])
    assert tier.aside == "", tier.aside
    assert tier.counts["damaged"] == 0
    lost = [key for key in known if key not in tier]
    assert not lost, f"{len(lost)} of {len(known)} stored records are gone"
    assert_exact(tier)
    found = len(tier)
    tier.close(clean=False)
    return found


def main() -> None:
    path, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    known: set[bytes] = set()
    found = 0
    for number in range(rounds):
        found += one_round(path, seed + number, known)
        if number % 10 == 9:
            print(f"{number + 1} kills, {found} records verified, {len(known)} known to be stored", flush=True)


if __name__ == "__main__":
    main()
