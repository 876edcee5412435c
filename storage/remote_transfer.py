"""A block to a server and back: encoded, cut in pieces, sealed; fetched, opened, verified, decoded. Worker threads only."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from omlxd.storage.blocks import BlockMeta
from omlxd.storage.codec import RAW, Buffer, CodecError, decode, encode
from omlxd.storage.remote_records import PIECE_BYTES, Header, cut, pack_header
from omlxd.storage.remote_seal import WRITE_ID_BYTES, Seal, Unsealed, piece_name
from omlxd.storage.remote_server import PIPELINED_BYTES, Server
from omlxd.storage.ssd_records import checksum
from omlxd.storage.tier import Damaged, Missing


@dataclass(slots=True)
class LinkRate:
    """Bytes a second of one transfer at a time, as measured: chooses the codec."""

    bytes_per_second: float = 0.0
    """A moving mean; 0 while nothing was measured."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, nbytes: int, seconds: float) -> None:
        """``nbytes`` took ``seconds``."""
        rate = nbytes / max(seconds, 1e-6)
        with self._lock:
            weight = 0.1 if self.bytes_per_second else 1.0
            self.bytes_per_second += weight * (rate - self.bytes_per_second)


def write(
    server: Server,
    meta: BlockMeta,
    payload: memoryview,
    codec: str,
    seal: Seal,
    *,
    ttl: float,
    stored_at: float,
    writer: str,
    piece_bytes: int = PIECE_BYTES,
) -> Header:
    """Store a block for ``ttl`` seconds: all pieces, then the header. Raises ``Trouble``."""
    encoded = encode(codec, payload)
    header = Header(
        meta.key,
        meta.namespace,
        meta.nbytes,
        encoded.stored_bytes,
        encoded.codec,
        encoded.frames,
        checksum(encoded.parts),
        meta.parent,
        meta.position,
        meta.layout,
        stored_at,
        os.urandom(WRITE_ID_BYTES),
        piece_bytes,
        writer,
    )
    name = seal.name(meta.key)
    pieces = seal.pieces(header.write_id)

    def sealed() -> Iterator[tuple[bytes, Buffer]]:
        for number, piece in enumerate(cut(encoded.parts, encoded.stored_bytes, piece_bytes)):
            place = piece_name(name, header.write_id, number)
            yield place, pieces.seal(number, place, piece)

    ttl_ms = max(1, round(1000 * ttl))
    server.put(sealed(), ttl_ms)
    server.put([(name, pack_header(header, seal, name))], ttl_ms)
    return header


def fetch(server: Server, header: Header, seal: Seal, out: memoryview) -> None:
    """Bring a block's payload into ``out``, verified. Raises ``Missing``, ``Trouble`` or ``Damaged``."""
    if out.nbytes < header.nbytes:
        raise ValueError(f"{out.nbytes} bytes of room for a payload of {header.nbytes}")
    target = out[: header.nbytes].cast("B")
    # Raw bytes go where they belong at once; what is to be decoded is put together first.
    stored = target if header.codec == RAW else memoryview(bytearray(header.stored_bytes))
    into = np.frombuffer(stored, np.uint8)
    name = seal.name(header.key)
    pieces = seal.pieces(header.write_id)
    at_once = max(1, PIPELINED_BYTES // header.piece_bytes)
    for first in range(0, header.pieces, at_once):
        numbers = range(first, min(first + at_once, header.pieces))
        places = [piece_name(name, header.write_id, number) for number in numbers]
        for number, place, value in zip(numbers, places, server.get_pieces(places), strict=True):
            if value is None:
                raise Missing(f"piece {number} of {header.pieces} has left the server")
            length = header.piece_length(number)
            if not isinstance(value, bytes) or len(value) != length + seal.overhead:
                raise Damaged(f"piece {number} has another length than it was stored with")
            try:
                piece = pieces.open(number, place, value)
            except Unsealed as error:
                raise Damaged(str(error)) from None
            start = number * header.piece_bytes
            np.copyto(into[start : start + length], np.frombuffer(piece, np.uint8))
    if checksum([stored]) != header.checksum:
        raise Damaged("the checksum of the stored bytes does not match")
    if header.codec != RAW:
        try:
            decode(header.codec, header.frames, stored, target)
        except CodecError as error:
            raise Damaged(f"the stored bytes do not decode: {error}") from None
