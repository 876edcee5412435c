"""Opens a store that may be damaged and works with it, as a daemon would: ``damage_ssd.py PATH [SEED]``.

With a seed, bytes of the trees are changed while the store is open. The exit status is 0 when all went well, 7 when the store
was moved aside; whatever was served was right.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from omlxd.storage.environment import DATA_NAME
from tests.storage.ssd_store import chain_of, open_tier, read_all, spill

MIB = 1 << 20
LIMIT = 16 * MIB
PAGE = 4096


def flip_tree_bytes(path: Path, seed: int) -> None:
    """Change up to 20 bits in pages of LMDB's trees."""
    rng = random.Random(seed)
    with open(path / DATA_NAME, "r+b") as file:
        data = file.read()
        trees = [
            at
            for at in range(0, len(data) - PAGE + 1, PAGE)
            if int.from_bytes(data[at : at + 8], sys.byteorder) == at // PAGE and data[at + 10] & 0x03
        ]
        for _ in range(rng.choice([1, 1, 1, 4, 20])):
            at = rng.choice(trees) + rng.randrange(200 if rng.random() < 0.5 else PAGE)
            file.seek(at)
            file.write(bytes([data[at] ^ 1 << rng.randrange(8)]))


def work(path: Path, seed: int | None) -> int:
    tier = open_tier(path, limit=LIMIT)
    aside = bool(tier.aside)
    if seed is not None:
        flip_tree_bytes(path, seed)
    read_all(tier)
    for number in range(4):
        spill(tier, chain_of(("new", number), [100_000] * 5))
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
        read_all(tier)
    assert tier.state == "ok", tier.reason
    tier.close()
    return 7 if aside else 0


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(work(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None))
