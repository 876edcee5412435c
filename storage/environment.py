"""The LMDB environment of the SSD tier: databases, records, pieces, transactions.

| database | key | value |
|---|---|---|
| ``blocks`` | block key | packed ``Record`` |
| ``pieces`` | block key, 4-byte piece number | part of the stored bytes |
| ``recency`` | ``state``, or 8-byte number | the policy's state; the log of uses since |
| ``namespaces`` | 32-byte id | number, descriptor, exact totals |
| ``quarantine`` | 8-byte number | what was damaged, when, how |
| ``meta`` | name | format version, counters, clean mark |

**Payloads are read by ``preadv``, not through LMDB's map.** A value in pages of its own never moves
while it exists, so its place in the file is all that a transaction is needed for: it is taken from
the address that LMDB returns, without touching it. The read itself then needs no transaction (none
stays open however slow the disk is, so none keeps pages from being reused), goes straight into the
slot with the GIL released, and a disk that fails gives an error where the map would give SIGBUS.
What remains mapped is the trees' own pages; before they are used, the file is checked to be still
as long as its header says (``check``). What that cannot cover is in docs/ssd.md.

Threads: everything here runs on worker threads. One writer at a time; readers at any time.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

import lmdb
import msgpack
import numpy as np
import numpy.typing as npt

from omlxd.storage.codec import Buffer
from omlxd.storage.ssd_errors import Damaged, DiskTrouble, StoreBroken
from omlxd.storage.ssd_gate import Gate
from omlxd.storage.ssd_pages import BadFile, FileHeader, free_pages, punch, read_header, runs_of
from omlxd.storage.ssd_records import Record, unpack_record

DATA_NAME = "data.mdb"
COPY_NAME = "copy"
FORMAT_VERSION = 1
PIECE_PAGE_BYTES = 256 * 1024
"""File bytes that a whole piece takes (it fills its pages to the last byte)."""
MOST_FREE_TO_LOOK_AT = 1 << 16
"""Free pages; with more of them runs are long enough anyway, and to list them would take long."""
REMOVAL_BYTES = 2 << 20
KEPT_FREE_BYTES = 512 << 10
SMALL_PIECE_PAGE_BYTES = 64 * 1024
SMALL_STORE = 64 << 20
"""Below this map size pieces are small: their runs of free pages must be found among few pages."""

if TYPE_CHECKING:
    Database: TypeAlias = lmdb._Database

Durability = Literal["commit", "interval", "none"]
DURABILITIES: tuple[Durability, ...] = ("commit", "interval", "none")

_PIECE = struct.Struct(">I")
_VALUES_IN_ONE_READ = 256  # well below every system's IOV_MAX (1024), two entries a value


@dataclass(frozen=True, slots=True)
class Pages:
    """The file in pages: ever used, and used now (trees and values, free list included)."""

    total: int
    live: int
    in_runs: int | None = None
    """Free pages in runs that are as long as a whole piece; None where there are too many to look."""


@dataclass(frozen=True, slots=True)
class Located:
    """A record and where its stored bytes are: file extents, or bytes where LMDB keeps them in a tree's page."""

    record: Record
    places: tuple[tuple[int, int] | bytes, ...]
    generation: int = 0
    """Of the file; in another one the places are others."""


class Environment:
    """One open LMDB environment. See the module's text for threads and for how payloads are read."""

    def __init__(
        self, path: Path, *, map_bytes: int, durability: Durability = "commit", readonly: bool = False
    ) -> None:
        """Open or create. Raises ``StoreBroken`` for what is not in order, ``OSError`` for the disk."""
        self.path = path
        self.readonly = readonly
        self.durability = durability
        self.generation = 0
        """Counts the files that have been the data file."""
        self.piece_page_bytes = PIECE_PAGE_BYTES if map_bytes >= SMALL_STORE else SMALL_PIECE_PAGE_BYTES
        self._descriptor = -1
        self._gate = Gate()  # who is alone may change the map
        self._file_gate = Gate()  # who is alone may close the file
        self._begin(map_bytes)

    def _begin(self, map_bytes: int) -> None:
        path, readonly = self.path, self.readonly
        self._env = self._open(map_bytes)
        try:
            self._descriptor = os.open(path / DATA_NAME, (os.O_RDONLY if readonly else os.O_RDWR) | os.O_CLOEXEC)
            self.map_bytes: int = self._env.info()["map_size"]
            self.device = os.fstat(self._descriptor).st_dev
            self._refresh_header()
            self._open_databases()
            self._base = self._find_base()
        except BadFile as error:
            self._abandon()
            raise StoreBroken(path, str(error)) from error
        except lmdb.Error as error:
            self._abandon()
            raise StoreBroken(path, f"LMDB says: {error}") from error
        except BaseException:
            self._abandon()
            raise

    def _open(self, map_bytes: int) -> lmdb.Environment:
        data = self.path / DATA_NAME
        if data.exists() and not data.is_file():
            raise StoreBroken(self.path, f"{data} is not a file")
        if data.exists() and data.stat().st_size:
            descriptor = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
            try:
                header = read_header(descriptor)
                if os.fstat(descriptor).st_size < header.needed_bytes:
                    raise BadFile(f"the file is shorter than the {header.needed_bytes} bytes that it says it has")
            except BadFile as error:
                raise StoreBroken(self.path, str(error)) from error
            finally:
                os.close(descriptor)
            map_bytes = max(map_bytes, header.needed_bytes)
        try:
            return lmdb.Environment(
                str(self.path),
                map_size=map_bytes,
                max_dbs=8,
                mode=0o600,
                readonly=self.readonly,
                lock=not self.readonly,
                create=not self.readonly,
                metasync=False,
                sync=self.durability == "commit",
                # The binding touches every page of a value that a cursor comes to. Without read-ahead each touch of a cold
                # record is a read of one page: 512 faults, 70 ms, for a block of 2 MiB (measured; 27 ms for the first with it,
                # 0.2 ms for those behind).
                readahead=True,
                writemap=False,
            )
        except lmdb.ReadonlyError as error:
            raise OSError(errno.EROFS, str(error)) from error
        except (lmdb.DiskError, lmdb.MemoryError) as error:
            raise OSError(errno.EIO, str(error)) from error
        except lmdb.Error as error:
            if error.code > 0:  # an errno, not one of LMDB's own codes
                raise OSError(error.code, str(error)) from error
            raise StoreBroken(self.path, f"LMDB says: {error}") from error

    def _abandon(self) -> None:
        """Close what ``_begin`` has opened so far."""
        with suppress(lmdb.Error):
            self._env.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open_databases(self) -> None:
        create = not self.readonly
        new = create and self._env.stat()["entries"] == 0
        if not new and b"meta" not in self._env.dbs():
            raise StoreBroken(self.path, "it is an LMDB file, but not of this program")
        if new:
            with self._env.begin(write=True) as txn:  # the name and the format together: a kill leaves none or both
                self.meta = self._env.open_db(b"meta", txn=txn)
                txn.put(b"format", _format(), db=self.meta)
        else:
            self.meta = self._env.open_db(b"meta", create=False)
        with self._env.begin() as txn:
            found = txn.get(b"format", db=self.meta)
        if found != _format():
            raise StoreBroken(self.path, f"it has another format than version {FORMAT_VERSION}")
        self.blocks = self._env.open_db(b"blocks", create=create)
        self.pieces = self._env.open_db(b"pieces", create=create)
        self.recency = self._env.open_db(b"recency", create=create)
        self.namespaces = self._env.open_db(b"namespaces", create=create)
        self.quarantine = self._env.open_db(b"quarantine", create=create)
        self._databases = (self.meta, self.blocks, self.pieces, self.recency, self.namespaces, self.quarantine)

    def _find_base(self) -> int:
        """The address at which the file is mapped, from a tree's page: each page begins with its number."""
        page_bytes = self.header.page_bytes
        with self._env.begin(buffers=True) as txn:
            value = txn.get(b"format", db=self.meta)
            assert value is not None
            page = _address(value) & ~(page_bytes - 1)
            head = ctypes.string_at(page, page_bytes)
        number = int.from_bytes(head[:8], "little" if struct.pack("=H", 1)[0] else "big")
        if os.pread(self._descriptor, page_bytes, number * page_bytes) != head:
            raise StoreBroken(self.path, "its file and its memory map differ")
        return page - number * page_bytes

    # -- the file -----------------------------------------------------------------------------

    def _refresh_header(self) -> None:
        self.header: FileHeader = read_header(self._descriptor)

    @property
    def piece_bytes(self) -> int:
        """Stored bytes of a whole piece: with LMDB's header it fills its pages exactly."""
        return self.piece_page_bytes - self.header.header_bytes

    @cached_property
    def piece_sizes(self) -> tuple[int, ...]:
        """Stored bytes of a whole piece, and of those that the rest of a payload is cut into: half as many pages each.

        With runs of free pages in powers of two, what one payload left is of use for the next.
        """
        page_bytes, header_bytes = self.header.page_bytes, self.header.header_bytes
        halvings = (self.piece_page_bytes // page_bytes).bit_length()
        return tuple((self.piece_page_bytes >> halving) - header_bytes for halving in range(halvings))

    def pages_of(self, stored_bytes: int) -> int:
        """Pages that the pieces of so many stored bytes take, or one more."""
        page_bytes = self.header.page_bytes
        whole, rest = divmod(stored_bytes, self.piece_bytes)
        headers = len(self.piece_sizes) * self.header.header_bytes
        return whole * (self.piece_page_bytes // page_bytes) + (-(-(rest + headers) // page_bytes) if rest else 0)

    def check(self) -> None:
        """Make sure that the file can be touched. Raises ``DiskTrouble`` when it is gone or cut."""
        try:
            status = os.fstat(self._descriptor)
            header = read_header(self._descriptor)
        except BadFile as error:
            raise DiskTrouble("gone", f"{self.path / DATA_NAME} was overwritten: {error}") from error
        except OSError as error:
            raise trouble(error) from error
        if status.st_size < header.needed_bytes or status.st_size < self.header.needed_bytes:
            raise DiskTrouble("gone", f"{self.path / DATA_NAME} was cut to {status.st_size} bytes")
        if status.st_nlink == 0:
            raise DiskTrouble("gone", f"{self.path / DATA_NAME} was deleted")

    def is_in_place(self) -> bool:
        """Whether the path still leads to the file that is open here."""
        try:
            named, opened = os.stat(self.path / DATA_NAME), os.fstat(self._descriptor)
        except OSError:
            return False
        return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)

    def allocated_bytes(self) -> int:
        """What the data file takes on the disk, as ``du`` counts it."""
        return os.fstat(self._descriptor).st_blocks * 512

    def count_pages(self) -> Pages:
        """Recount from the trees' own statistics. Raises ``DiskTrouble``."""
        self._refresh_header()
        live = 2 + self.header.free_tree_pages
        with self.reading() as txn:
            for statistics in (self._env.stat(), *(txn.stat(database) for database in self._databases)):
                live += statistics["branch_pages"] + statistics["leaf_pages"] + statistics["overflow_pages"]
        if self.header.pages - live > MOST_FREE_TO_LOOK_AT:
            return Pages(self.header.pages, live)
        return Pages(self.header.pages, live, self._usable(self._free_runs(), self.piece_page_bytes))

    def longest_piece(self, need_pages: int) -> int:
        """File bytes of the largest piece of which ``need_pages`` find room for sure, as the free pages lie now.

        Writer's thread only. A page where even that is not sure.
        """
        runs = self._free_runs()
        page_bytes, size = self.header.page_bytes, self.piece_page_bytes
        growth = self.map_bytes // page_bytes - self.header.pages
        while size > page_bytes and 4 * (self._usable(runs, size) + growth) < 5 * need_pages:
            size //= 2
        return size

    def _free_runs(self) -> npt.NDArray[np.int64]:
        """Lengths in pages."""
        return np.array([count for _, count in runs_of(free_pages(self._descriptor, self.header))], np.int64)

    def _usable(self, runs: npt.NDArray[np.int64], piece_page_bytes: int) -> int:
        pages = piece_page_bytes // self.header.page_bytes
        return int((runs // pages).sum()) * pages

    def resize(self, map_bytes: int) -> None:
        """Change how far the file may grow; waits for readers.

        A file that is longer already may still grow by what it takes to remove from it (``REMOVAL_BYTES``).
        """
        needed = self.header.needed_bytes
        wanted = map_bytes if map_bytes >= needed else needed + REMOVAL_BYTES
        if wanted == self.map_bytes:
            return
        with self._gate.exclusive():
            self.check()
            self._env.set_mapsize(wanted)
            self.map_bytes = self._env.info()["map_size"]
            self._base = self._find_base()

    def start_over(self, map_bytes: int) -> None:
        """Begin with an empty file; the old one's space is free at once. A crash on the way leaves an empty store."""
        self._close()
        for name in (DATA_NAME, "lock.mdb"):
            (self.path / name).unlink(missing_ok=True)
        with self._gate.exclusive(), self._file_gate.exclusive():
            self.generation += 1
            self._begin(map_bytes)

    def rewrite(self) -> None:
        """Replace the file by a copy without its free pages. Writer's thread; raises ``OSError``, ``lmdb.Error``.

        Needs as much space again as is used, for the time that it takes. The copy takes the file's place when it is complete
        and on the disk: a crash leaves one or the other (and ``open_store`` removes an unfinished copy).
        """
        self.check()
        target = self.path / COPY_NAME
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(mode=0o700)
        try:
            self._env.copy(str(target), compact=True)
            for path in (target / DATA_NAME, target):
                _sync_path(path)
            map_bytes = self.map_bytes
            self._close()
            with self._gate.exclusive(), self._file_gate.exclusive():
                (target / DATA_NAME).rename(self.path / DATA_NAME)
                (self.path / "lock.mdb").unlink(missing_ok=True)
                _sync_path(self.path)
                self.generation += 1
                self._begin(map_bytes)
        finally:
            shutil.rmtree(target, ignore_errors=True)

    def sync(self) -> None:
        """Force everything committed to the disk."""
        self._env.sync(True)

    def punch_free_pages(self) -> int | None:
        """Give free pages back to the file system; returns the bytes by which the file shrank on the disk.

        A few stay, so that records can be removed when the disk has no room at all. None where the file system cannot
        make holes. Writer's thread only.
        """
        self.sync()  # the free list is true of the last commit, which must not be undone by a power cut
        with self._gate.exclusive():
            pass  # readers of an older state have left; later ones see the last commit
        before = self.allocated_bytes()
        self._refresh_header()
        page_bytes = self.header.page_bytes
        free = free_pages(self._descriptor, self.header)
        for first, count in runs_of(free[: max(0, free.size - KEPT_FREE_BYTES // page_bytes)]):
            if not punch(self._descriptor, first * page_bytes, count * page_bytes):
                return None
        return before - self.allocated_bytes()

    def close(self) -> None:
        """Close; does nothing the second time. Readers that come later get ``DiskTrouble``."""
        self._close()

    def _close(self) -> None:
        with self._gate.exclusive(), self._file_gate.exclusive():
            self._abandon()

    # -- reading ------------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[lmdb.Transaction[memoryview]]:
        """A short read transaction; its memoryviews die with it. Raises ``DiskTrouble``, ``Damaged`` (a tree)."""
        with self._gate.shared():
            self.check()
            try:
                with self._env.begin(buffers=True) as txn:
                    yield txn
            except _TORN as error:
                raise Damaged(f"LMDB's tree is torn: {error}") from error
            except lmdb.Error as error:
                raise trouble(error) from error

    def get_record(self, key: bytes) -> Record | None:
        """The record of ``key``. Raises ``Damaged``, ``DiskTrouble``."""
        with self.reading() as txn:
            packed = txn.get(key, db=self.blocks)
            return None if packed is None else unpack_record(key, bytes(packed))

    def locate(self, key: bytes) -> Located | None:
        """The record of ``key`` and where its bytes are. Raises ``Damaged``, ``DiskTrouble``."""
        with self.reading() as txn:
            packed = txn.get(key, db=self.blocks)
            if packed is None:
                return None
            record = unpack_record(key, bytes(packed))
            places: list[tuple[int, int] | bytes] = []
            found = 0
            for value in _pieces(txn, self.pieces, key):
                found += value.nbytes
                if found > record.stored_bytes:
                    break
                offset = _address(value) - self._base
                # A value in pages of its own begins right behind a page's header; others share a page, which may move.
                own_pages = offset % self.header.page_bytes == self.header.header_bytes
                places.append((offset, value.nbytes) if own_pages else bytes(value))
            if found != record.stored_bytes:
                raise Damaged(f"its pieces hold {found} bytes or more, not {record.stored_bytes}")
            return Located(record, tuple(places), self.generation)

    def read_ahead(self, located: Located) -> None:
        """Have the kernel fetch a record's pages while something else is being done."""
        if hasattr(os, "posix_fadvise"):
            with self._file_gate.shared(), suppress(OSError):  # who reads will be told
                for offset, length in self._extents(located):
                    os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_WILLNEED)

    def read_stored(self, located: Located, out: memoryview) -> None:
        """Copy a record's stored bytes into ``out`` (as long as they are). Raises ``DiskTrouble``.

        The bytes are whatever is in those places now: the checksum tells whether they are still the record's.
        """
        batch: list[Buffer] = []
        start = end = at = 0
        page_bytes, header_bytes = self.header.page_bytes, self.header.header_bytes
        gap = bytearray(header_bytes)
        for place in located.places:
            if isinstance(place, bytes):
                out[at : at + len(place)] = place
                at += len(place)
                continue
            offset, length = place
            adjoining = bool(batch) and offset - header_bytes == end and len(batch) < 2 * _VALUES_IN_ONE_READ
            if not adjoining:
                self._read(batch, start)
                batch, start = [], offset
            elif header_bytes:
                batch.append(gap)
            batch.append(out[at : at + length])
            at += length
            # The next value can only adjoin where this one fills its pages.
            end = offset + length if (offset + length) % page_bytes == 0 else -1
        self._read(batch, start)

    def _read(self, buffers: Sequence[Buffer], offset: int) -> None:
        if not buffers:
            return
        wanted = sum(len(buffer) for buffer in buffers)
        try:
            with self._file_gate.shared():
                self._read_all(buffers, offset, wanted)
        except OSError as error:
            raise trouble(error) from error

    def _read_all(self, buffers: Sequence[Buffer], offset: int, wanted: int) -> None:
        done = os.preadv(self._descriptor, buffers, offset)
        while done < wanted:  # a signal, or the end of the file
            more = os.preadv(self._descriptor, _after(buffers, done), offset + done)
            if not more:
                raise DiskTrouble("gone", f"{self.path / DATA_NAME} ends at byte {offset + done}")
            done += more

    def _extents(self, located: Located) -> Iterator[tuple[int, int]]:
        return (place for place in located.places if isinstance(place, tuple))

    # -- writing ------------------------------------------------------------------------------

    def writing(self) -> WriteTransaction:
        """Begin the one write transaction; commits at the end of ``with``, aborts on an exception."""
        return WriteTransaction(self, self._env)


class WriteTransaction:
    """Changes that appear together or not at all. Writer's thread only; ``lmdb.Error`` passes through."""

    def __init__(self, environment: Environment, env: lmdb.Environment) -> None:
        self._environment = environment
        self._env = env

    def __enter__(self) -> Self:
        self._environment.check()
        self.txn: lmdb.Transaction[memoryview] = self._env.begin(write=True, buffers=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.txn.commit()
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
            found = cursor.set_range(key + _PIECE.pack(0))
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
            for value in _pieces(self.txn, environment.pieces, key):
                offset = (_address(value) - environment._base) & ~(page_bytes - 1)
                os.posix_fadvise(environment._descriptor, offset, page_bytes, os.POSIX_FADV_WILLNEED)

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


_TORN = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PageFullError, lmdb.CursorFullError, lmdb.InvalidError)


def trouble(error: Exception) -> DiskTrouble:
    """What an error of the disk means for the tier."""
    code = error.errno if isinstance(error, OSError) else getattr(error, "code", None)
    if code in (errno.ENOSPC, errno.EDQUOT) or isinstance(error, lmdb.MapFullError):
        return DiskTrouble("full", str(error))
    if code == errno.EROFS or isinstance(error, lmdb.ReadonlyError):
        return DiskTrouble("read-only", str(error))
    return DiskTrouble("gone", str(error))


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _format() -> bytes:
    packed: bytes = msgpack.packb({"program": "omlxd", "version": FORMAT_VERSION})
    return packed


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0] if view.nbytes else 0
    return address


def _pieces(txn: lmdb.Transaction[memoryview], database: Database, key: bytes) -> Iterator[memoryview]:
    with txn.cursor(db=database) as cursor:
        found = cursor.set_range(key + _PIECE.pack(0))
        while found and bytes(cursor.key()[: len(key)]) == key:
            yield cursor.value()
            found = cursor.next()


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


def _after(buffers: Sequence[Buffer], done: int) -> list[memoryview]:
    """What remains of ``buffers`` behind their first ``done`` bytes."""
    rest: list[memoryview] = []
    for buffer in buffers:
        view = memoryview(buffer)
        rest.append(view[min(done, view.nbytes) :])
        done -= min(done, view.nbytes)
    return [view for view in rest if view.nbytes]
