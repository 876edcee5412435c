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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import lmdb
import msgpack
import numpy as np

from omlxd.storage.ssd_errors import Damaged, DiskTrouble, StoreBroken
from omlxd.storage.ssd_gate import Gate
from omlxd.storage.ssd_pages import BadFile, FileHeader, read_header

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
B = TypeVar("B", bytes, memoryview)

SMALL_STORE = 64 << 20
"""Below this map size pieces are small: their runs of free pages must be found among few pages."""

if TYPE_CHECKING:
    Database: TypeAlias = lmdb._Database

Durability = Literal["commit", "interval", "none"]
DURABILITIES: tuple[Durability, ...] = ("commit", "interval", "none")

_PIECE = struct.Struct(">I")
_VALUES_IN_ONE_READ = 256  # well below every system's IOV_MAX (1024), two entries a value


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
        self.descriptor = -1
        self.map_gate = Gate()  # who is alone may change the map
        self.file_gate = Gate()  # who is alone may close the file
        self._begin(map_bytes)

    def _begin(self, map_bytes: int) -> None:
        path, readonly = self.path, self.readonly
        self._env = self._open(map_bytes)
        try:
            self.descriptor = os.open(path / DATA_NAME, (os.O_RDONLY if readonly else os.O_RDWR) | os.O_CLOEXEC)
            self.map_bytes: int = self._env.info()["map_size"]
            self.device = os.fstat(self.descriptor).st_dev
            self.refresh_header()
            self._open_databases()
            self.base = self._find_base()
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
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

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
        self.databases = (self.meta, self.blocks, self.pieces, self.recency, self.namespaces, self.quarantine)

    def _find_base(self) -> int:
        """The address at which the file is mapped, from a tree's page: each page begins with its number."""
        page_bytes = self.header.page_bytes
        with self._env.begin(buffers=True) as txn:
            value = txn.get(b"format", db=self.meta)
            assert value is not None
            page = address_of(value) & ~(page_bytes - 1)
            head = ctypes.string_at(page, page_bytes)
        number = int.from_bytes(head[:8], "little" if struct.pack("=H", 1)[0] else "big")
        if os.pread(self.descriptor, page_bytes, number * page_bytes) != head:
            raise StoreBroken(self.path, "its file and its memory map differ")
        return page - number * page_bytes

    # -- the file -----------------------------------------------------------------------------

    def refresh_header(self) -> None:
        """Read the newer meta page again. Raises ``BadFile``, ``OSError``."""
        self.header: FileHeader = read_header(self.descriptor)

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
            status = os.fstat(self.descriptor)
            header = read_header(self.descriptor)
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
            named, opened = os.stat(self.path / DATA_NAME), os.fstat(self.descriptor)
        except OSError:
            return False
        return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)

    def allocated_bytes(self) -> int:
        """What the data file takes on the disk, as ``du`` counts it."""
        return os.fstat(self.descriptor).st_blocks * 512

    def resize(self, map_bytes: int) -> None:
        """Change how far the file may grow; waits for readers.

        A file that is longer already may still grow by what it takes to remove from it (``REMOVAL_BYTES``).
        """
        needed = self.header.needed_bytes
        wanted = map_bytes if map_bytes >= needed else needed + REMOVAL_BYTES
        if wanted == self.map_bytes:
            return
        with self.map_gate.exclusive():
            self.check()
            self._env.set_mapsize(wanted)
            self.map_bytes = self._env.info()["map_size"]
            self.base = self._find_base()

    def start_over(self, map_bytes: int) -> None:
        """Begin with an empty file; the old one's space is free at once. A crash on the way leaves an empty store."""
        self._close()
        for name in (DATA_NAME, "lock.mdb"):
            (self.path / name).unlink(missing_ok=True)
        with self.map_gate.exclusive(), self.file_gate.exclusive():
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
            with self.map_gate.exclusive(), self.file_gate.exclusive():
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

    def close(self) -> None:
        """Close; does nothing the second time. Readers that come later get ``DiskTrouble``."""
        self._close()

    def _close(self) -> None:
        with self.map_gate.exclusive(), self.file_gate.exclusive():
            self._abandon()

    # -- reading ------------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[lmdb.Transaction[memoryview]]:
        """A short read transaction; its memoryviews die with it. Raises ``DiskTrouble``, ``Damaged`` (a tree)."""
        with self._reading(lambda: self._env.begin(buffers=True)) as txn:
            yield txn

    @contextmanager
    def reading_copies(self) -> Iterator[lmdb.Transaction[bytes]]:
        """As ``reading``, for many small values: keys and values come as bytes, which is faster than to copy views."""
        with self._reading(lambda: self._env.begin(buffers=False)) as txn:
            yield txn

    @contextmanager
    def _reading(self, begin: Callable[[], lmdb.Transaction[B]]) -> Iterator[lmdb.Transaction[B]]:
        with self.map_gate.shared():
            self.check()
            try:
                with begin() as txn:
                    yield txn
            except _TORN as error:
                raise Damaged(f"LMDB's tree is torn: {error}") from error
            except lmdb.Error as error:
                raise trouble(error) from error

    def begin_write(self) -> lmdb.Transaction[memoryview]:
        """Begin the one write transaction (``ssd_transaction.WriteTransaction``). Raises ``DiskTrouble``."""
        self.check()
        return self._env.begin(write=True, buffers=True)

    def commit(self, txn: lmdb.Transaction[memoryview]) -> None:
        """Commit what ``begin_write`` began, and keep the file as long as its meta page says.

        LMDB writes no page that a transaction took at the end of the file and gave back: the file ends before it then, and
        would look as if somebody had cut it. One that got shorter meanwhile was cut, and is left for ``check`` to find.
        """
        before = os.fstat(self.descriptor).st_size
        txn.commit()
        with suppress(BadFile, OSError):  # it is committed; what is wrong with the file is found by check
            needed = read_header(self.descriptor).needed_bytes
            if before <= os.fstat(self.descriptor).st_size < needed:
                os.ftruncate(self.descriptor, needed)


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


def address_of(view: memoryview) -> int:
    """Where a value lies in this process's memory; nothing of it is touched."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0] if view.nbytes else 0
    return address
