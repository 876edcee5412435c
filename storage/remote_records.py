"""The header of a block on the remote tier, and how its stored bytes are cut in pieces.

The same as on the SSD: codec, frames, XXH3-128 over the stored bytes, the block's own key and namespace inside. A header is
an 8-byte XXH3-64 of the rest, then a msgpack array. Pieces are written first and the header last: who finds a header
finds all pieces, unless the server has let some go. Whatever else stands under a name is a stranger's, and a miss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgpack
import xxhash

from omlxd.storage.blocks import BlockMeta
from omlxd.storage.codec import CODECS, RAW, Buffer, count_frames
from omlxd.storage.remote_seal import WRITE_ID_BYTES, Seal, Unsealed

VERSION = 1
PIECE_BYTES = 512 * 1024
"""Stored bytes of a piece: a server with one thread serves others between two of them."""
MIN_PIECE_BYTES = 4096
MAX_BLOCK_BYTES = 1 << 40
CHECKSUM_BYTES = 16


class Stranger(Exception):
    """What stands under the name is not this block's header; the text says why."""


@dataclass(frozen=True, slots=True)
class Header:
    """A block on the server. Satisfies ``tier.Held``."""

    key: bytes
    namespace: bytes
    nbytes: int
    stored_bytes: int
    codec: str
    frames: bytes
    checksum: bytes
    parent: bytes | None
    position: int
    layout: bytes | None
    stored_at: float
    """Seconds since the epoch, on the writer's clock."""
    write_id: bytes
    """Random; names the pieces of this write."""
    piece_bytes: int
    writer: str
    """The daemon that wrote it."""

    @property
    def pieces(self) -> int:
        """How many there are."""
        return -(-self.stored_bytes // self.piece_bytes)

    def piece_length(self, number: int) -> int:
        """Stored bytes of one piece."""
        return min(self.piece_bytes, self.stored_bytes - number * self.piece_bytes)

    @property
    def meta(self) -> BlockMeta:
        """As every tier knows it."""
        return BlockMeta(self.key, self.namespace, self.nbytes, self.parent, self.position, self.layout)


_TYPES: tuple[type | tuple[type, ...], ...] = (
    *(bytes, bytes, int, int, str, bytes, bytes, (bytes, type(None)), int, (bytes, type(None)), float, bytes, int, str),
)


def pack_header(header: Header, seal: Seal, name: bytes) -> bytes:
    """As it is stored under ``name``."""
    body: bytes = msgpack.packb([VERSION, *(getattr(header, field) for field in header.__slots__)], use_bin_type=True)
    return seal.seal_header(name, xxhash.xxh3_64_digest(body) + body)


def unpack_header(key: bytes, namespaces: frozenset[bytes] | set[bytes], stored: object, seal: Seal) -> Header:
    """What stands under the name of ``key``. Raises ``Stranger`` for all that is not the header of that block.

    ``namespaces``: the ids that it may be of. Whoever reads must know the namespace from an engine, never from here.
    """
    if not isinstance(stored, bytes):
        raise Stranger(f"a {type(stored).__name__} instead of bytes")
    try:
        packed = seal.open_header(seal.name(key), stored)
    except Unsealed as error:
        raise Stranger(str(error)) from None
    body = packed[8:]
    if packed[:8] != xxhash.xxh3_64_digest(body):
        raise Stranger("the header's own hash does not match")
    try:
        fields = msgpack.unpackb(body, use_list=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        raise Stranger("the header cannot be read") from None
    if not isinstance(fields, tuple) or len(fields) != 1 + len(_TYPES) or fields[0] != VERSION:
        raise Stranger("the header is of another version")
    if not all(type(field) is not bool and isinstance(field, of) for field, of in zip(fields[1:], _TYPES, strict=True)):
        raise Stranger("the header has a field of a wrong kind")
    header = Header(*fields[1:])
    _check(header, key, namespaces)
    return header


def _check(header: Header, key: bytes, namespaces: frozenset[bytes] | set[bytes]) -> None:
    if header.key != key:
        raise Stranger(f"the header names another key, {header.key[:8].hex()}")
    if header.namespace not in namespaces:
        raise Stranger(f"the header names another namespace, {header.namespace[:8].hex()}")
    if header.codec not in CODECS or not 0 < header.nbytes <= MAX_BLOCK_BYTES:
        raise Stranger(f"codec {header.codec[:20]!r} and {header.nbytes} bytes are not of this version")
    if len(header.frames) != 4 * count_frames(header.codec, header.nbytes):
        raise Stranger("the frames do not fit the size")
    if not 0 < header.stored_bytes <= header.nbytes or (header.codec == RAW and header.stored_bytes != header.nbytes):
        raise Stranger(f"{header.stored_bytes} stored bytes for a payload of {header.nbytes}")
    if len(header.checksum) != CHECKSUM_BYTES or len(header.write_id) != WRITE_ID_BYTES:
        raise Stranger("checksum or write id has a wrong length")
    if not MIN_PIECE_BYTES <= header.piece_bytes <= MAX_BLOCK_BYTES:
        raise Stranger(f"pieces of {header.piece_bytes} bytes")
    try:
        _ = header.meta
    except ValueError as error:
        raise Stranger(str(error)) from None


def cut(parts: Sequence[Buffer], stored_bytes: int, piece_bytes: int) -> Iterator[memoryview]:
    """The stored bytes in pieces; views of one part where there is one."""
    whole = memoryview(parts[0] if len(parts) == 1 else b"".join(parts)).cast("B")
    for start in range(0, stored_bytes, piece_bytes):
        yield whole[start : start + piece_bytes]
