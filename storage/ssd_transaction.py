"""Changing the environment: one transaction, blocks cut into pieces. Writer's thread."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import lmdb

from omlxd.storage.codec import Buffer
from omlxd.storage.environment import Environment, address_of
from omlxd.storage.ssd_payload import FIRST_PIECE, pieces_of
from omlxd.storage.ssd_records import Record

if TYPE_CHECKING:
    from omlxd.storage.environment import Database

_PIECE = struct.Struct(">I")


class WriteTransaction:
    """Changes that appear together or not at all. Writer's thread only; ``lmdb.Error`` passes through."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def __enter__(self) -> Self:
        self.txn: lmdb.Transaction[memoryview] = self._environment.begin_write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._environment.commit(self.txn)
        else:
            self.txn.abort()

    def put_block(self, record: Record, parts: Sequence[Buffer], largest: int | None = None) -> None:
        """Add a record and its bytes; there must be none of that key.

        ``largest``: file bytes of the largest piece, where free pages lie so that whole ones might find no room.
        """
        environment = self._environment
        sizes = environment.piece_sizes
        if largest is not None:
            sizes = tuple(size for size in sizes if size < largest)
        for number, piece in enumerate(_cut(parts, sizes)):
            self.txn.put(record.key + _PIECE.pack(number), piece, db=environment.pieces)
        self.txn.put(record.key, record.pack(), db=environment.blocks)

    def delete_block(self, key: bytes) -> bool:
        """Remove a record and its bytes; False when there was none."""
        environment = self._environment
        with self.txn.cursor(db=environment.pieces) as cursor:
            found = cursor.set_range(key + FIRST_PIECE)
            while found and bytes(cursor.key()[: len(key)]) == key:
                try:
                    cursor.delete()  # moves to the next one
                except SystemError as error:  # py-lmdb, when a torn page is met on the way to the next one
                    raise lmdb.CorruptedError(f"while pieces were removed: {error}") from error
                found = len(cursor.key()) > 0
        return self.txn.delete(key, db=environment.blocks)

    def read_ahead(self, keys: Sequence[bytes]) -> None:
        """Fetch what deleting ``keys`` will touch: LMDB reads the first page of every value that it frees."""
        if not hasattr(os, "posix_fadvise"):
            return
        environment = self._environment
        page_bytes = environment.header.page_bytes
        for key in keys:
            for value in pieces_of(self.txn, environment.pieces, key):
                offset = (address_of(value) - environment.base) & ~(page_bytes - 1)
                os.posix_fadvise(environment.descriptor, offset, page_bytes, os.POSIX_FADV_WILLNEED)

    def get(self, database: Database, key: bytes) -> bytes | None:
        """One value of a small database."""
        value = self.txn.get(key, db=database)
        return None if value is None else bytes(value)

    def put(self, database: Database, key: bytes, value: bytes) -> None:
        """Set one value of a small database."""
        self.txn.put(key, value, db=database)

    def clear(self, database: Database) -> None:
        """Empty a small database."""
        self.txn.drop(database, delete=False)

    def delete(self, database: Database, key: bytes) -> None:
        """Remove one value of a small database, if it is there."""
        self.txn.delete(key, db=database)


def _cut(parts: Sequence[Buffer], sizes: Sequence[int]) -> Iterator[Buffer]:
    """Cut the parts, taken as one run of bytes, into pieces: always the largest of ``sizes`` (descending) that is left.

    Only the last piece may be smaller than all of them. Copies only where parts meet within a piece.
    """
    left = sum(memoryview(part).nbytes for part in parts)
    wanted = _largest(sizes, left)
    carry: list[memoryview] = []
    carried = 0
    for part in parts:
        view = memoryview(part).cast("B")
        while view.nbytes:
            take = view[: wanted - carried]
            view = view[take.nbytes :]
            carry.append(take)
            carried += take.nbytes
            if carried == wanted:
                yield carry[0] if len(carry) == 1 else b"".join(carry)
                left -= carried
                carry, carried = [], 0
                wanted = _largest(sizes, left)


def _largest(sizes: Sequence[int], left: int) -> int:
    return next((size for size in sizes if size <= left), left)
