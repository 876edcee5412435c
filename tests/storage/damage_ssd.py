"""Flips bits in the file of a store and works with it, as a daemon would: ``damage_ssd.py WHOLE FIRST COUNT live|still``.

One process for each seed from FIRST on, with a copy of the store WHOLE. The bits lie in LMDB's trees, its free list, the heads
of values, the meta pages or anywhere; ``live``: they are flipped while the store is open, between what the process does
with it; ``still``: before it is opened. Nothing that is served may be wrong, and nothing may end the process.
Ends with 0 when all went well, and prints how many stores were moved aside.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import traceback
from functools import cache
from pathlib import Path

from omlxd.storage.ssd import Damaged, DiskTrouble, SsdTier
from omlxd.storage.ssd_data_file import DATA_NAME
from tests.storage.ssd_store import chain_of, open_tier, payload_of, restore, spill

MIB = 1 << 20
LIMIT = 16 * MIB
PAGE = 4096
ASIDE = 7


def flip_bits(path: Path, seed: int) -> None:
    """Change up to 20 bits, most of them where LMDB keeps what it trusts."""
    rng = random.Random(seed)
    with open(path / DATA_NAME, "r+b") as file:
        data = file.read()
        starts = range(0, len(data) - PAGE + 1, PAGE)
        numbered = [at for at in starts if int.from_bytes(data[at : at + 8], sys.byteorder) == at // PAGE]
        trees = [at for at in numbered if data[at + 10] in (1, 2)]
        values = [at for at in numbered if data[at + 10] == 4]
        for _ in range(rng.choice([1, 1, 1, 4, 20])):
            what = rng.random()
            if what < 0.7:
                at = rng.choice(trees) + rng.randrange(200 if rng.random() < 0.5 else PAGE)
            elif what < 0.85:
                at = rng.choice(values or trees) + rng.randrange(24)
            elif what < 0.92:
                at = rng.choice([0, PAGE]) + rng.randrange(200)
            else:
                at = rng.randrange(len(data))
            file.seek(at)
            file.write(bytes([data[at] ^ 1 << rng.randrange(8)]))


expected = cache(payload_of)  # the same in all processes: what the first has made, the others need not


def serve_all(tier: SsdTier) -> None:
    """Restore what there is: right, or damaged, or the disk is to blame."""
    for key, entry in list(tier.entries.items()):
        try:
            assert restore(tier, key) == expected(key, entry.nbytes)
        except Damaged as error:
            tier.damaged(key, error.reason)
        except DiskTrouble:
            pass


def work(path: Path, seed: int | None) -> bool:
    """Store, restore, look at the disk; with a ``seed`` bits flip meanwhile. Was the store moved aside?"""
    tier = open_tier(path, limit=LIMIT)
    aside = bool(tier.aside)
    flip_at = random.Random(seed).randrange(-1, 3) if seed is not None else None
    if seed is not None and flip_at == -1:
        flip_bits(path, seed)
    serve_all(tier)
    for number in range(5):
        spill(tier, chain_of(("new", number), [100_000] * 5))
        if seed is not None and flip_at == number:
            flip_bits(path, seed)
        for _ in range(50):
            plan = tier.plan()
            if plan is None:
                break
            outcome = tier.commit(plan)
            tier.applied(plan, outcome)
            if outcome.reason:
                break
        tier.observe(tier.probe())
        aside = aside or bool(tier.aside)
        serve_all(tier)
    for _ in range(2):  # what a rewrite finds is looked at again, and moved aside
        tier.observe(tier.probe())
        aside = aside or bool(tier.aside)
    assert tier.state == "ok", tier.reason
    tier.close()
    return aside


def one_run(whole: Path, seed: int, live: bool) -> int:
    """The exit status of a process of its own: 0, ``ASIDE``, or negative for a signal."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        path = whole.with_name(f"harmed{os.getpid()}")
        shutil.copytree(whole, path)
        try:
            if not live:
                flip_bits(path, seed)
            aside = work(path, seed if live else None)
            again = open_tier(path, limit=LIMIT)
            serve_all(again)
            again.close()
            status = ASIDE if aside or again.aside else 0
        finally:
            shutil.rmtree(path)
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def main() -> None:
    whole, first, count, live = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "live"
    shutil.copytree(whole, first_path := whole.with_name("first"))
    work(first_path, None)
    shutil.rmtree(first_path)
    aside = 0
    wrong = []
    for seed in range(first, first + count):
        status = one_run(whole, seed, live)
        aside += status == ASIDE
        if status not in (0, ASIDE):
            wrong.append(f"seed {seed}: {status}")
        if (seed - first) % 50 == 49:
            print(f"{seed - first + 1} runs, {aside} aside, wrong: {wrong or 'none'}", file=sys.stderr, flush=True)
    print(f"{count} runs, {aside} stores moved aside")
    sys.exit("; ".join(wrong) or 0)


if __name__ == "__main__":
    main()
