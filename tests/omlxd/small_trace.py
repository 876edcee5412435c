"""The small trace in `data/`: made-up conversations, and what naive caches make of it.

`python -m tests.omlxd.small_trace` writes the file anew.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path

from omlxd.lab.traces import run_lengths

FILE = Path(__file__).parent / "data" / "small_trace.jsonl.gz"
BLOCK_TOKENS = 64
LONGEST = 24
Line = tuple[int, int, int, int, list[int]]


def lines() -> list[Line]:
    """400 requests of 40 conversations that share three system prompts and grow with every turn."""
    rng = random.Random(8)
    number = iter(range(1 << 20))
    prompts = [[next(number) for _ in range(length)] for length in (3, 5, 8)]
    conversations = [list(rng.choice(prompts)) for _ in range(40)]
    made: list[Line] = []
    for at in range(400):
        session = min(int(rng.expovariate(0.12)), 39)
        chain = conversations[session]
        if len(chain) > LONGEST - 4:  # it begins anew
            chain[:] = rng.choice(prompts)
        chain += [next(number) for _ in range(rng.randint(1, 4))]
        tokens = (len(chain) - 1) * BLOCK_TOKENS + rng.randint(1, BLOCK_TOKENS)
        made.append((1000 * at, session, tokens, rng.randint(10, 300), list(chain)))
    return made


def text() -> str:
    """The file's text."""
    header = {"kvtrace": 1, "name": "small", "block_tokens": BLOCK_TOKENS, "kind": "made up, see small_trace.py"}
    coded = [[*line[:4], run_lengths(line[4])] for line in lines()]
    return "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in [header, *coded])


def naive(requests: Sequence[Line], size: int, *, touches: bool) -> tuple[int, int, int]:
    """LRU (`touches`) or FIFO as lists, by the definition: tokens asked, tokens reused, blocks stored.

    A request uses its blocks tail first, all at its end; what it inserts counts as inserted tail first, too.
    """
    order: list[int] = []  # what leaves first comes first
    asked = reused = stored = 0
    for _, _, tokens, _, chain in requests:
        run = 0
        while run < len(chain) and chain[run] in order:
            run += 1
        asked += tokens
        reused += min(tokens, run * BLOCK_TOKENS)
        missing = [block for block in chain[run:] if block not in order]
        stored += len(missing)
        while len(order) + len(missing) > size:
            order.remove(next(block for block in order if block not in chain))
        for block in reversed(chain):
            if block in order and touches:
                order.remove(block)
            if block not in order:
                order.append(block)
    return asked, reused, stored


def naive_belady(uses: Sequence[int], size: int) -> int:
    """Hits of Belady's MIN with bypass over single blocks, by the definition."""
    cache: set[int] = set()
    hits = 0
    for now, block in enumerate(uses):
        if block in cache:
            hits += 1
            continue

        def next_use(one: int, now: int = now) -> int:
            return uses.index(one, now + 1) if one in uses[now + 1 :] else len(uses)

        cache.add(block)
        if len(cache) > size:
            cache.remove(max(cache, key=next_use))
    return hits


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_bytes(gzip.compress(text().encode(), 9, mtime=0))
