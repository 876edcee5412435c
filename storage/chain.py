"""Names of blocks: the namespace, and the chain of hashes over a prompt's token ids.

A block's hash is SHA-256 over the namespace id, the hash of the block before it, the block's token
ids and its salt, each framed (`framing.py`). So equal hashes mean equal tokens with an equal past in
an equal namespace, and nothing else. Token ids are hashed as fixed-width integers in the engine's
process; they never leave it. The golden vectors in the tests pin every byte: a change here is a new
``FORMAT``, and cold caches everywhere.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from omlxd.storage.blocks import HASH_BYTES
from omlxd.storage.framing import bytes_header, digest, frame

if TYPE_CHECKING:
    import mlx.core as mx

FORMAT = 1
TOKEN_BYTES = 4
MAX_TOKEN = (1 << 32) - 1

_BLOCK_DOMAIN = "omlxd block 1"
_NAMESPACE_DOMAIN = "omlxd namespace 1"
_SALT_DOMAIN = "omlxd salt 1"

ExtraKey: TypeAlias = "str | bytes | int | bool | tuple[ExtraKey, ...] | None"
"""What salts a block besides its tokens: a LoRA id, an image's hash, several of them."""
Tokens: TypeAlias = "Sequence[int] | np.ndarray | mx.array"


class SaltDigest(bytes):
    """The hash of a namespace's salt: all that is kept of it, and all that is sent."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal for a block to be usable.

    ``model`` is the id for people, ``fingerprint`` names the weights, ``layout`` is
    ``Layout.to_bytes()`` (shapes, dtypes, KV bits), ``salt`` separates users of one model. The salt is
    replaced by its digest at once. Raises ``TypeError`` or ``ValueError`` for fields that cannot be.
    """

    model: str
    fingerprint: str
    block_tokens: int
    layout: bytes
    salt: str | bytes | None = None

    def __post_init__(self) -> None:
        for name, kind in (("model", str), ("fingerprint", str), ("block_tokens", int), ("layout", bytes)):
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise TypeError(f"a namespace's {name} is {kind.__name__}, not {value!r}")
        if not self.model:
            raise ValueError("a namespace's model is empty; give the model's name or path")
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens {self.block_tokens}: a block has at least 1 token")
        if self.salt is not None and not isinstance(self.salt, SaltDigest):
            if not isinstance(self.salt, (str, bytes)):
                raise TypeError(f"a namespace's salt is str, bytes or None, not {type(self.salt).__name__}")
            object.__setattr__(self, "salt", SaltDigest(digest(_SALT_DOMAIN, self.salt)))

    @property
    def id(self) -> bytes:
        """32 bytes: the hash over all fields and the format; the seed of every chain in this namespace."""
        return digest(
            _NAMESPACE_DOMAIN,
            ("format", FORMAT),
            ("model", self.model),
            ("fingerprint", self.fingerprint),
            ("block_tokens", self.block_tokens),
            ("layout", self.layout),
            ("salt", self.salt),
        )

    def descriptor(self) -> dict[str, str | int | None]:
        """Return what the daemon keeps of a namespace, for msgpack or JSON: bytes in hex, of the salt its digest."""
        return {
            "format": FORMAT,
            "id": self.id.hex(),
            "model": self.model,
            "fingerprint": self.fingerprint,
            "block_tokens": self.block_tokens,
            "layout": self.layout.hex(),
            "salt": None if self.salt is None else bytes(self.salt).hex(),  # type: ignore[arg-type]
        }

    @classmethod
    def from_descriptor(cls, descriptor: Mapping[str, object]) -> Namespace:
        """Return the namespace that ``descriptor()`` describes; unknown fields are ignored.

        Raises ``ValueError`` for a missing or wrong field, another format, or an id that is not the
        one these fields have.
        """
        form = descriptor.get("format")
        if form != FORMAT:
            raise ValueError(f"namespace format {form!r}: this version knows {FORMAT}")
        salt = descriptor.get("salt")
        try:
            space = cls(
                model=descriptor["model"],  # type: ignore[arg-type]
                fingerprint=descriptor["fingerprint"],  # type: ignore[arg-type]
                block_tokens=descriptor["block_tokens"],  # type: ignore[arg-type]
                layout=bytes.fromhex(descriptor["layout"]),  # type: ignore[arg-type]
                salt=None if salt is None else SaltDigest(bytes.fromhex(salt)),  # type: ignore[arg-type]
            )
        except KeyError as missing:
            raise ValueError(f"a namespace descriptor without {missing.args[0]!r}") from None
        except TypeError as wrong:
            raise ValueError(f"a namespace descriptor with a wrong field: {wrong}") from None
        if space.salt is not None and len(space.salt) != HASH_BYTES:
            raise ValueError(f"a salt's digest has {HASH_BYTES} bytes, this one has {len(space.salt)}")
        if descriptor.get("id") != space.id.hex():
            raise ValueError(
                f"namespace {space.model!r} says its id is {descriptor.get('id')!r}; its fields give {space.id.hex()}"
            )
        return space


def token_bytes(tokens: Tokens) -> bytes:
    """Return token ids as little-endian unsigned 32-bit integers.

    Takes sequences of ints, ranges, one-dimensional NumPy and MLX arrays of integers. Raises
    ``TypeError`` for anything that is not whole numbers, ``ValueError`` for more than one dimension
    and for ids that do not fit (negative, more than 32 bits).
    """
    if isinstance(tokens, (list, tuple, range, array)):
        return _from_integers(tokens)
    if isinstance(tokens, (str, bytes, bytearray, memoryview)) or not _is_array(tokens):
        raise TypeError(f"token ids are a sequence of ints or an integer array, not {type(tokens).__name__}")
    try:
        held = np.asarray(tokens)
    except (ValueError, RuntimeError) as error:  # a dtype that NumPy has not: bfloat16
        raise TypeError(f"token ids are whole numbers; {error}") from None
    return _from_array(held)


def chain_hashes(
    seed: bytes,
    tokens: Tokens,
    block_tokens: int,
    *,
    extra_keys: ExtraKey = None,
    extra_key_token_start: int | None = None,
    extra_key_ranges: Sequence[tuple[int, ExtraKey]] | None = None,
    parent: bytes | None = None,
    start: int = 0,
) -> list[bytes]:
    """Return one 32-byte hash per *full* block of ``tokens``, head first; a partial last block has none.

    ``seed`` is the namespace's id. ``parent`` continues a chain behind the block of that hash;
    ``start`` is then the index of ``tokens[0]`` in the whole prompt, which the ``extra_key_...``
    arguments count from (see ``resolve_block_extra_keys``). About 1 us a block of 64 tokens.
    Errors as in ``token_bytes``, ``frame`` and ``resolve_block_extra_keys``; ``ValueError`` for a
    seed or parent that is not 32 bytes, or a block without tokens.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens {block_tokens}: a block has at least 1 token")
    if parent is None and start:
        raise ValueError(f"start {start} without a parent: only the head of a chain has none")
    data = token_bytes(tokens)
    full = len(data) // (TOKEN_BYTES * block_tokens)
    salts = _salts(full, block_tokens, start, extra_keys, extra_key_token_start, extra_key_ranges)
    before, between = _constant_parts(seed, block_tokens * TOKEN_BYTES)
    link = _link(parent)
    to_link = bytes_header(HASH_BYTES)
    step = block_tokens * TOKEN_BYTES
    hashes = []
    for offset, salt in zip(range(0, len(data) - step + 1, step), salts, strict=True):
        name = sha256(b"".join((before, link, between, data[offset : offset + step], salt))).digest()
        hashes.append(name)
        link = to_link + name
    return hashes


def block_hash(seed: bytes, parent: bytes | None, tokens: Tokens, extra_keys: ExtraKey = None) -> bytes:
    """Return the hash of one block of any number of tokens: what ``chain_hashes`` gives for it."""
    data = token_bytes(tokens)
    before, between = _constant_parts(seed, len(data))
    return sha256(b"".join((before, _link(parent), between, data, frame(extra_keys)))).digest()


def resolve_block_extra_keys(
    block_end: int,
    extra_keys: ExtraKey = None,
    extra_key_token_start: int | None = None,
    extra_key_ranges: Sequence[tuple[int, ExtraKey]] | None = None,
) -> ExtraKey:
    """Return what salts the block that ends before token ``block_end`` of the prompt.

    ``extra_key_ranges`` (pairs of first token and keys, ascending) takes precedence: the last one
    that starts before ``block_end`` applies, before the first there is None. ``extra_keys`` applies
    to every block, or from the first that ends after ``extra_key_token_start``. No ranges at all
    (an empty list) take precedence over nothing: a salt must not go by accident. Raises
    ``ValueError`` for ranges that do not ascend.
    """
    if extra_key_ranges:
        check_ranges(extra_key_ranges)
        applies: ExtraKey = None
        for first, keys in extra_key_ranges:
            if first >= block_end:
                break
            applies = keys
        return applies
    if extra_key_token_start is not None and block_end <= extra_key_token_start:
        return None
    return extra_keys


def check_ranges(ranges: Sequence[tuple[int, ExtraKey]]) -> None:
    """Raise ``ValueError`` when the starts do not ascend strictly or one is negative."""
    starts = [first for first, _ in ranges]
    if starts and starts[0] < 0:
        raise ValueError(f"extra_key_ranges start at {starts[0]}: a token's index is not negative")
    for one, other in pairwise(starts):
        if other <= one:
            raise ValueError(f"extra_key_ranges must ascend: {other} comes after {one}")


def _constant_parts(seed: bytes, token_data_bytes: int) -> tuple[bytes, bytes]:
    """Return what every block of a chain shares: all before the link, and between the link and the tokens."""
    _check_hash("seed", seed)
    return frame(_BLOCK_DOMAIN) + frame(seed), bytes_header(token_data_bytes)


def _link(parent: bytes | None) -> bytes:
    if parent is not None:
        _check_hash("parent", parent)
    return frame(parent)


def _check_hash(name: str, value: bytes) -> None:
    if len(value) != HASH_BYTES:
        raise ValueError(f"a {name} has {HASH_BYTES} bytes, this one has {len(value)}")


def _salts(
    blocks: int,
    block_tokens: int,
    start: int,
    extra_keys: ExtraKey,
    token_start: int | None,
    ranges: Sequence[tuple[int, ExtraKey]] | None,
) -> Iterator[bytes]:
    """Yield the framed salt of each block: `resolve_block_extra_keys`, without looking at every range each time."""
    none = frame(None)
    ends = range(start + block_tokens, start + block_tokens * (blocks + 1), block_tokens)
    if not ranges:
        framed = frame(extra_keys)
        for end in ends:
            yield none if token_start is not None and end <= token_start else framed
        return
    check_ranges(ranges)
    framed, upcoming = none, 0
    for end in ends:
        while upcoming < len(ranges) and ranges[upcoming][0] < end:
            framed = frame(ranges[upcoming][1])
            upcoming += 1
        yield framed


def _from_integers(tokens: Sequence[int]) -> bytes:
    try:
        data = array("I", tokens)
    except TypeError:
        raise TypeError("token ids are whole numbers; one of these is not") from None
    except OverflowError:
        raise ValueError(f"a token id is outside 0 to {MAX_TOKEN}") from None
    return _little_endian(data).tobytes()


def _little_endian(data: array[int]) -> array[int]:
    assert data.itemsize == TOKEN_BYTES, "a C unsigned int has 4 bytes on every system that MLX runs on"
    if sys.byteorder == "big":
        data.byteswap()
    return data


def _is_array(tokens: object) -> bool:
    if hasattr(tokens, "__array__"):
        return True
    try:  # MLX before 0.32 has the buffer protocol only
        memoryview(tokens)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _from_array(tokens: np.ndarray) -> bytes:
    if tokens.ndim != 1:
        raise ValueError(f"token ids have one dimension; this array has the shape {tokens.shape}")
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"token ids are whole numbers; this array has the dtype {tokens.dtype}")
    if tokens.size and not (tokens.dtype.kind == "u" and tokens.dtype.itemsize <= TOKEN_BYTES):
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or highest > MAX_TOKEN:
            raise ValueError(f"token ids from {lowest} to {highest}: outside 0 to {MAX_TOKEN}")
    return tokens.astype("<u4", copy=False).tobytes()
