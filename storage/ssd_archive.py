"""Blocks in a file, to carry to another store: ``omlxd export`` and ``import``.

``MAGIC``, then entries, then the XXH3-128 of all before it. An entry is a little-endian 32-bit length, a
msgpack map of so many bytes, and, for a block, its stored bytes as they lie in the store (its codec goes with it). The maps:
``{"kind": "namespace", "id", "descriptor"}``, ``{"kind": "block", ...}`` with a record's fields, ``{"kind": "end", "blocks": n}``.

Import fails closed: the whole file is checked before the first block of it is taken.

All functions run on a worker thread.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgpack
import xxhash

from omlxd.storage.blocks import BlockMeta
from omlxd.storage.environment import Environment
from omlxd.storage.ssd_errors import Damaged, Missing, SsdError
from omlxd.storage.ssd_payload import locate, read_stored
from omlxd.storage.ssd_records import EncodedBlock, checksum

MAGIC = b"omlxd blocks v1\n"
_LENGTH = struct.Struct("<I")
_DIGEST_BYTES = 16
_LARGEST_MAP = 1 << 24
_CHUNK = 1 << 20


class ArchiveBroken(SsdError):  # one word for the user: the file is to blame
    """The file is no archive of blocks, or not whole; the text names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class ArchivedNamespace:
    """A namespace that blocks of the archive belong to."""

    id: bytes
    descriptor: Mapping[str, object]


def export_blocks(
    environment: Environment,
    keys: Iterable[bytes],
    namespaces: Mapping[int, ArchivedNamespace],
    file: Path,
    progress: Callable[[int], None] = lambda blocks: None,
) -> int:
    """Write the records of ``keys`` into ``file``; returns how many. What is damaged or has left is left out.

    ``namespaces``: by their short numbers in this store. ``file`` appears when it is complete. Raises ``OSError``.
    """
    partial = file.with_name(file.name + ".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            writer = _Writer(stream)
            told: set[int] = set()
            blocks = 0
            for key in keys:
                found = _stored(environment, key)
                if found is None:
                    continue
                fields, stored = found
                number = int(fields.pop("number"))  # type: ignore[call-overload]
                if number not in told:
                    told.add(number)
                    space = namespaces[number]
                    writer.entry({"kind": "namespace", "id": space.id, "descriptor": dict(space.descriptor)})
                writer.entry({"kind": "block", "namespace": namespaces[number].id, **fields}, stored)
                blocks += 1
                progress(blocks)
            writer.entry({"kind": "end", "blocks": blocks})
            stream.write(writer.digest())
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)
    return blocks


def _stored(environment: Environment, key: bytes) -> tuple[dict[str, object], bytearray] | None:
    try:
        located = locate(environment, key)
        if located is None:
            return None
        record = located.record
        stored = bytearray(record.stored_bytes)
        read_stored(environment, located, memoryview(stored))
    except (Damaged, Missing):
        return None
    if checksum((stored,)) != record.checksum:
        return None
    names = ("key", "nbytes", "stored_bytes", "codec", "frames", "checksum", "parent", "position", "layout")
    return {"number": record.namespace, **{name: getattr(record, name) for name in names}}, stored


class _Writer:
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._hash = xxhash.xxh3_128()
        self._put(MAGIC)

    def _put(self, data: bytes | bytearray) -> None:
        self._hash.update(data)
        self._stream.write(data)

    def entry(self, fields: dict[str, object], stored: bytes | bytearray = b"") -> None:
        packed = msgpack.packb(fields, use_bin_type=True)
        self._put(_LENGTH.pack(len(packed)))
        self._put(packed)
        self._put(stored)

    def digest(self) -> bytes:
        return self._hash.digest()


def check_archive(file: Path) -> int:
    """Read all of ``file``; returns its number of blocks. Raises ``ArchiveBroken``, ``OSError``."""
    state = xxhash.xxh3_128()
    with file.open("rb") as stream:
        left = os.fstat(stream.fileno()).st_size - _DIGEST_BYTES
        if left < len(MAGIC) or stream.read(len(MAGIC)) != MAGIC:
            raise ArchiveBroken(f"{file} is no archive of omlxd blocks (version 1)")
        stream.seek(0)
        while left > 0:
            chunk = stream.read(min(_CHUNK, left))
            if not chunk:
                break
            state.update(chunk)
            left -= len(chunk)
        if stream.read() != state.digest():
            raise ArchiveBroken(f"{file} is not whole: its checksum does not match; export it again")
    return sum(isinstance(entry, EncodedBlock) for entry in read_archive(file))


def read_archive(file: Path) -> Iterator[ArchivedNamespace | EncodedBlock]:
    """The entries of a file that ``check_archive`` has passed. Raises ``ArchiveBroken`` where they make no sense."""
    with file.open("rb") as stream:
        stream.seek(len(MAGIC))
        blocks = 0
        while True:
            fields = _read_map(stream, file)
            kind = fields.get("kind")
            try:
                if kind == "end":
                    if fields["blocks"] != blocks:
                        raise ArchiveBroken(f"{file} has {blocks} blocks and says {fields['blocks']}")
                    return
                if kind == "namespace":
                    yield ArchivedNamespace(fields["id"], fields["descriptor"])  # type: ignore[arg-type]
                elif kind == "block":
                    yield _block(fields, stream)
                    blocks += 1
                else:
                    raise ArchiveBroken(f"{file} has an entry of an unknown kind, {kind!r}")
            except (KeyError, TypeError, ValueError) as error:
                raise ArchiveBroken(f"{file}: block {blocks} cannot be read: {error}") from error


def _read_map(stream: BinaryIO, file: Path) -> dict[str, object]:
    head = stream.read(_LENGTH.size)
    if len(head) == _LENGTH.size and (length := _LENGTH.unpack(head)[0]) <= _LARGEST_MAP:
        packed = stream.read(length)
        if len(packed) == length:
            try:
                fields = msgpack.unpackb(packed)
            except (ValueError, msgpack.UnpackException) as error:
                raise ArchiveBroken(f"{file} has an entry that cannot be read: {error}") from error
            if isinstance(fields, dict):
                return fields
    raise ArchiveBroken(f"{file} ends in the middle of an entry")


def _block(fields: dict[str, object], stream: BinaryIO) -> EncodedBlock:
    meta = BlockMeta(
        fields["key"], fields["namespace"], fields["nbytes"], fields["parent"], fields["position"], fields["layout"]  # type: ignore[arg-type]
    )  # fmt: skip
    size = fields["stored_bytes"]
    if not isinstance(size, int) or size < 0:
        raise ValueError(f"{size!r} stored bytes")
    stored = stream.read(size)
    if len(stored) != size or checksum((stored,)) != fields["checksum"]:
        raise ValueError("its checksum does not match")
    return EncodedBlock(
        meta, str(fields["codec"]), fields["frames"], (stored,), size, fields["checksum"]  # type: ignore[arg-type]
    )  # fmt: skip
