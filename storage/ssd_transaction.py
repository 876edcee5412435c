"""Changing the environment: one transaction, blocks cut into pieces. Writer's thread."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import lmdb

from omlxd.storage.codec import Buffer
from omlxd.storage.environment import Environment, trouble
from omlxd.storage.ssd_errors import Damaged
from omlxd.storage.ssd_pages import BadFile
from omlxd.storage.ssd_records import Record
from omlxd.storage.ssd_structure import check_value_head, value_pages

if TYPE_CHECKING:
    from omlxd.storage.environment import Database

_PIECE = struct.Struct(">I")
_FIRST_PIECE = _PIECE.pack(0)


class WriteTransaction:
    """Changes that appear together or not at all. Writer's thread only; ``lmdb.Error`` passes through."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._put_bytes = 0

    def __enter__(self) -> Self:
        self.txn: lmdb.Transaction[memoryview] = self._environment.begin_write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._environment.commit(self.txn, self._put_bytes)
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
        self._put_bytes += record.stored_bytes
        self.txn.put(record.key, record.pack(), db=environment.blocks)

    def delete_block(self, key: bytes) -> bool:
        """Remove a record and its bytes; False when there was none."""
        environment = self._environment
        with self.txn.cursor(db=environment.pieces) as cursor:
            found = cursor.set_range(key + _FIRST_PIECE)
            while found and bytes(cursor.key()[: len(key)]) == key:
                try:
                    cursor.delete()  # moves to the next one
                except SystemError as error:  # py-lmdb, when a torn page is met on the way to the next one
                    raise lmdb.CorruptedError(f"while pieces were removed: {error}") from error
                found = len(cursor.key()) > 0
        return self.txn.delete(key, db=environment.blocks)

    def prepare_removal(self, keys: Sequence[bytes]) -> None:
        """Look at what removing ``keys`` will touch: LMDB frees as many pages of a value as its first page says.

        Raises ``Damaged``, ``DiskTrouble``. To be called before anything is changed.
        """
        environment = self._environment
        with environment.reading() as reading:
            places = [place for key in keys for place in reading.places(environment.pieces, key)]
        header = environment.header
        firsts = [
            (place[0] // header.page_bytes, value_pages(header, place[1]))
            for place in places
            if isinstance(place, tuple)
        ]
        if hasattr(os, "posix_fadvise"):
            for first, _ in firsts:
                os.posix_fadvise(
                    environment.descriptor, first * header.page_bytes, header.page_bytes, os.POSIX_FADV_WILLNEED
                )
        try:
            for first, count in firsts:
                said = check_value_head(environment.descriptor, header, first, count)
                if said != count:  # pieces are never overwritten
                    raise BadFile(f"page {first}, where a piece of {count} pages begins, says {said}")
        except BadFile as error:
            raise Damaged(str(error)) from error
        except OSError as error:
            raise trouble(error) from error

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
