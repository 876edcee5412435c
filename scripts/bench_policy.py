"""Speed of the policies, of the manager around them, and of block hashes.

50,000 chunks, batches of 100 keys, one core, no bytes moved. Per policy:

store_evict a full tier takes new keys: prepare_store, complete_store, on_request_finished; each key stored
evicts one lookup single lookups that hit load_cycle prepare_load, complete_load, on_request_finished

`hash_speedup`: the naive block hash (SHA-256 over the text of the tuple of token ids) takes this many times
as long as the chain hash of a block of 256 tokens of a prompt whose ids are an integer array,
`hash_speedup_list` as that of a prompt whose ids are a list of Python ints, where turning the ints into bytes
takes longer than hashing them. Best of several rounds that alternate.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256

import numpy as np

from omlxd.policy import RequestContext, policy_names
from omlxd.storage.chunks import ChunkManager
from omlxd.storage.paged_hash import prompt_hashes

CHUNKS = 50_000
BATCH = 100
ROUNDS = 3
BLOCK_TOKENS = 256
PROMPT_BLOCKS = 64
REFERENCE = {
    "lru": {"store_evict": 126_000, "lookup": 3_300_000, "load_cycle": 195_000},
    "arc": {"store_evict": 286_000, "lookup": 2_800_000, "load_cycle": 612_000},
}


def keys_from(first: int) -> list[list[bytes]]:
    """One tier's worth of keys, in batches."""
    keys = [sha256(number.to_bytes(8, "little")).digest() + bytes(4) for number in range(first, first + CHUNKS)]
    return [keys[start : start + BATCH] for start in range(0, CHUNKS, BATCH)]


def store(manager: ChunkManager, batches: list[list[bytes]]) -> None:
    for batch in batches:
        ctx = RequestContext()
        if manager.prepare_store(batch, ctx) is None:
            raise RuntimeError("the tier refused a batch; nothing is pinned, so it must not")
        manager.complete_store(batch, True, ctx)
        manager.on_request_finished(ctx)


def lookup(manager: ChunkManager, batches: list[list[bytes]]) -> None:
    for batch in batches:
        for key in batch:
            manager.lookup(key)


def load(manager: ChunkManager, batches: list[list[bytes]]) -> None:
    for batch in batches:
        ctx = RequestContext()
        manager.prepare_load(batch, ctx)
        manager.complete_load(batch, ctx)
        manager.on_request_finished(ctx)


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()  # of this process alone, so that a busy machine disturbs less
    run()
    return time.process_time() - start


def measure_policy(name: str) -> dict[str, int]:
    """Chunks a second for each operation, the best of the rounds. A tier of its own each round: what ARC
    evicts depends on what was loaded.
    """
    before, batches = keys_from(0), keys_from(CHUNKS)
    best = dict.fromkeys(("store_evict", "lookup", "load_cycle"), float("inf"))
    for _ in range(ROUNDS):
        manager = ChunkManager(CHUNKS, name)
        store(manager, before)
        for operation, run in (("store_evict", store), ("lookup", lookup), ("load_cycle", load)):
            best[operation] = min(best[operation], seconds(partial(run, manager, batches)))
    return {operation: round(CHUNKS / took) for operation, took in best.items()}


def naive_hash(parent: bytes, tokens: list[int], model_name: str) -> bytes:
    return sha256(parent + str(tuple(tokens)).encode() + model_name.encode()).digest()


def measure_hashes() -> dict[str, float]:
    chooser = random.Random(1)
    tokens = [chooser.randrange(150_000) for _ in range(BLOCK_TOKENS * PROMPT_BLOCKS)]
    array = np.array(tokens, dtype=np.uint32)
    blocks = [tokens[start : start + BLOCK_TOKENS] for start in range(0, len(tokens), BLOCK_TOKENS)]

    def naive() -> None:
        parent = bytes(32)
        for block in blocks:
            parent = naive_hash(parent, block, "org/model")

    ways: dict[str, Callable[[], object]] = {
        "naive": naive,
        "array": lambda: list(prompt_hashes(array, BLOCK_TOKENS, "org/model")),
        "list": lambda: list(prompt_hashes(tokens, BLOCK_TOKENS, "org/model")),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(300):
        for way, run in ways.items():
            best[way] = min(best[way], seconds(run))
    return {
        "hash_speedup": round(best["naive"] / best["array"], 1),
        "hash_speedup_list": round(best["naive"] / best["list"], 1),
        "hash_us_per_block": round(best["array"] / PROMPT_BLOCKS * 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench policy", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument(
        "--policy", default="lru,arc,prefix", help=f"names, comma separated: {', '.join(policy_names())}"
    )
    options = parser.parse_args()
    names = [name for name in options.policy.split(",") if name]
    measured = {name: measure_policy(name) for name in names}
    hashes = measure_hashes()
    if options.json:
        rates = {f"{name}_{operation}_per_s": rate for name in names for operation, rate in measured[name].items()}
        print(json.dumps({"chunks": CHUNKS, "batch": BATCH, **rates, **hashes}))
        return
    for name in names:
        for operation, rate in measured[name].items():
            reference = REFERENCE.get(name, {}).get(operation)
            compared = f"   {rate / reference:.1f} x the reference" if reference else ""
            print(f"{name:10} {operation:12} {rate:>10,}/s{compared}")
    print(f"block hash {hashes['hash_us_per_block']} us a block of {BLOCK_TOKENS} tokens, ", end="")
    print(f"{hashes['hash_speedup']} x faster than naive; from a list of ints {hashes['hash_speedup_list']} x")


if __name__ == "__main__":
    main()
