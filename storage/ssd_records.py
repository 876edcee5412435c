"""The record of a block on the SSD: what is kept beside its bytes, and how it is packed.

A packed record is an 8-byte XXH3-64 of the rest, then a msgpack array. The array begins with the
block's own key: a record that was filed under another key is recognised by it, one with a flipped
bit by the hash. The payload's bytes have a checksum of their own (XXH3-128 over what is stored).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import msgpack
import xxhash

from omlxd.storage.blocks import BlockMeta
from omlxd.storage.codec import Buffer
from omlxd.storage.ssd_errors import Damaged

CHECKSUM_BYTES = 16
HASH_BYTES = 8
"""Of a packed record's own hash, in front of it."""
FIELDS = 12


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """A block ready to be written. ``parts`` may be views of the slot itself: it must stay pinned."""

    meta: BlockMeta
    codec: str
    frames: bytes
    parts: tuple[Buffer, ...]
    stored_bytes: int
    checksum: bytes

    @property
    def key(self) -> bytes:
        """The block's key."""
        return self.meta.key


@dataclass(frozen=True, slots=True)
class Record:
    """One row of the ``blocks`` database."""

    key: bytes
    number: int
    """Counts up with every record ever stored: the order of storing, and a short name in the recency log."""
    namespace: int
    """Short number of the namespace, unique in this store."""
    nbytes: int
    stored_bytes: int
    codec: str
    frames: bytes
    checksum: bytes
    parent: bytes | None
    position: int
    stored_at: float
    """Seconds since the epoch."""
    layout: bytes | None

    def pack(self) -> bytes:
        """As it is stored: hash and array."""
        fields = [getattr(self, name) for name in self.__slots__]
        body: bytes = msgpack.packb(fields, use_bin_type=True)
        return seal(body)


RecordFields: TypeAlias = "tuple[bytes, int, int, int, int, str, bytes, bytes, bytes | None, int, float, bytes | None]"
"""``Record``'s fields in their order: to build the object takes as long as all the rest of unpacking."""


def unpack_fields(key: bytes, packed: bytes) -> RecordFields:
    """Read what is filed under ``key``. Raises ``Damaged`` when it is not that key's intact record."""
    body = unseal(packed)
    try:
        fields: RecordFields = msgpack.unpackb(body, use_list=False)
        key_inside, count = fields[0], len(fields)
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise Damaged(f"the record cannot be read: {error}") from error
    if key_inside != key or count != FIELDS:
        raise Damaged(f"the record names another key, {key_inside.hex()[:16]}")
    return fields


def unpack_record(key: bytes, packed: bytes) -> Record:
    """As ``unpack_fields``, as a ``Record``."""
    return Record(*unpack_fields(key, packed))


def seal(body: bytes) -> bytes:
    """A small value with its hash in front: XXH3-64, little-endian."""
    return xxhash.xxh3_64_digest(body)[::-1] + body


def unseal(packed: bytes) -> bytes:
    """The value. Raises ``Damaged`` when it is not what was sealed."""
    body = packed[HASH_BYTES:]
    if packed[:HASH_BYTES] != xxhash.xxh3_64_digest(body)[::-1]:
        raise Damaged("the record's own hash does not match")
    return body


def checksum(parts: Iterable[Buffer]) -> bytes:
    """XXH3-128 over the stored bytes (releases the GIL)."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()
