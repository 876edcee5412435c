"""Names of blocks for the paged block manager: a chain of SHA-256 hashes, seeded by the model's name.

Parts are framed and token ids packed as for the daemon's own names (`framing.py`, `chain.py`), under a domain
of its own. The golden vectors in the tests pin every byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import repeat
from typing import NewType, cast

from omlxd.storage import chain
from omlxd.storage.blocks import HASH_BYTES
from omlxd.storage.chain import TOKEN_BYTES, ExtraKey, Tokens, token_bytes
from omlxd.storage.framing import bytes_header, frame

BlockHash = NewType("BlockHash", bytes)
"""32 bytes that name a block by its tokens, its salt, and everything before it."""

Ranges = Sequence[tuple[int, ExtraKey]]

_DOMAIN = "omlxd paged block 1"
_NOTHING = frame(None)  # in place of a parent or of a salt


def compute_block_hash(
    parent_hash: bytes | None,
    token_ids: Tokens,
    extra_keys: ExtraKey = None,
    model_name: str | None = None,
) -> BlockHash:
    """Return the hash of one block: the same in every process, whatever `PYTHONHASHSEED` is.

    `extra_keys` salts it (LoRA id, image hash): str, bytes, int, bool, None, or tuples or lists of these. An
    empty `model_name` is no name. Raises TypeError or ValueError for token ids that are no whole numbers of
    at most 32 bits, and for other kinds of extra keys.
    """
    data = token_bytes(token_ids)
    link = _NOTHING if parent_hash is None else bytes_header(len(parent_hash)) + parent_hash
    salt = _NOTHING if extra_keys is None else frame(extra_keys)
    hasher = sha256(_before(model_name) + link + _tokens_header(len(data)))
    hasher.update(data)
    hasher.update(salt)
    return cast(BlockHash, hasher.digest())


def resolve_block_extra_keys(
    block_end: int,
    extra_keys: ExtraKey = None,
    extra_key_token_start: int | None = None,
    extra_key_ranges: Ranges | None = None,
) -> ExtraKey:
    """Return what salts the block that ends before token `block_end`.

    The last of `extra_key_ranges` (pairs of first token and keys, ascending) that starts before `block_end`
    applies, before the first one None; they take precedence. `extra_keys` applies to every block, or from the
    first that ends after `extra_key_token_start`. An empty list of ranges is none, so that it can't remove a
    salt by accident. Raises ValueError for ranges that do not ascend.
    """
    return chain.resolve_block_extra_keys(block_end, extra_keys, extra_key_token_start, extra_key_ranges or None)


def prompt_hashes(
    token_ids: Tokens,
    block_size: int,
    model_name: str | None,
    extra_keys: ExtraKey = None,
    extra_key_token_start: int | None = None,
    extra_key_ranges: Ranges | None = None,
) -> Iterator[BlockHash]:
    """Yield the hash of each full block of `token_ids`, head first; what is not asked for is not computed.

    Raises as `compute_block_hash` and `resolve_block_extra_keys` do, before the first hash.
    """
    data = token_bytes(token_ids)
    step = block_size * TOKEN_BYTES
    blocks = len(data) // step
    if extra_key_ranges:
        chain.check_ranges(extra_key_ranges)
        salts: Iterable[bytes] = _range_salts(blocks, block_size, extra_key_ranges)
    else:
        salts = _salts(blocks, block_size, frame(extra_keys), extra_key_token_start or 0)
    return cast("Iterator[BlockHash]", _chain(data, step, _before(model_name), salts))


def _chain(data: bytes, step: int, before: bytes, salts: Iterable[bytes]) -> Iterator[bytes]:
    view = memoryview(data)  # slices of it are hashed in place, without a copy
    header, to_parent = _tokens_header(step), before + bytes_header(HASH_BYTES)
    link = before + _NOTHING + header
    for start, salt in zip(range(0, len(data), step), salts, strict=False):
        hasher = sha256(link)
        hasher.update(view[start : start + step])
        hasher.update(salt)
        name = hasher.digest()
        link = to_parent + name + header
        yield name


def _salts(blocks: int, block_size: int, salt: bytes, token_start: int) -> Iterable[bytes]:
    unsalted = max(0, min(blocks, token_start // block_size))
    return itertools.chain(repeat(_NOTHING, unsalted), repeat(salt, blocks - unsalted))


def _range_salts(blocks: int, block_size: int, ranges: Ranges) -> Iterator[bytes]:
    salt, upcoming = _NOTHING, 0
    for index in range(blocks):
        while upcoming < len(ranges) and ranges[upcoming][0] < (index + 1) * block_size:
            salt = frame(ranges[upcoming][1])
            upcoming += 1
        yield salt


@lru_cache(maxsize=64)
def _before(model_name: str | None) -> bytes:
    """What comes before the link to the parent."""
    return frame(_DOMAIN) + frame(model_name or None)


@lru_cache(maxsize=64)
def _tokens_header(nbytes: int) -> bytes:
    return bytes_header(nbytes)
