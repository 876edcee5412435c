"""Blocks whose bytes follow from their key, so that any process can tell a right one from a wrong one."""

from __future__ import annotations

import numpy as np


def payload(chain_hash: bytes, nbytes: int) -> bytes:
    """The only right payload of this block."""
    seed = int.from_bytes(chain_hash[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def chain(seed: int, blocks: int) -> list[bytes]:
    """Chain hashes of a made-up prompt."""
    return [np.random.default_rng((seed, index)).bytes(32) for index in range(blocks)]
