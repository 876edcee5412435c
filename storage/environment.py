"""The LMDB environment of the SSD tier: databases, records, pieces, transactions.

| database | key | value |
|---|---|---|
| ``blocks`` | block key | packed ``Record`` |
| ``pieces`` | block key, 4-byte piece number | part of the stored bytes |
| ``recency`` | ``state``, or 8-byte number | the policy's state; the log of uses since |
| ``namespaces`` | 32-byte id | number, descriptor, exact totals |
| ``quarantine`` | 8-byte number | what was damaged, when, how |
| ``meta`` | name | format version, counters, clean mark |

**LMDB writes; what is read is read past it**, by ``pread``: the trees by ``ssd_tree``, which believes nothing that it finds,
payloads straight into the slot. A value in pages of its own never moves while it exists, so its place in the file is all
that a transaction is needed for: none stays open however slow the disk is, none keeps pages from being reused. A disk that
fails gives an error where LMDB's map would give SIGBUS, a torn page ``Damaged`` where LMDB would follow it anywhere.

LMDB itself walks its trees on the writer's thread alone, and only trees that were gone through (``ssd_structure``): when the
file is opened, and again whenever somebody else has changed the file since this process last did, which its change time
tells (``begin_write``). What that cannot cover is in docs/ssd.md.

Threads: everything here runs on worker threads. One writer at a time; readers at any time.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import lmdb
import msgpack

from omlxd.storage.ssd_data_file import DATA_NAME, make_ready, open_data
from omlxd.storage.ssd_early_write import writing_early
from omlxd.storage.ssd_errors import Damaged, DiskTrouble, StoreBroken
from omlxd.storage.ssd_gate import Gate
from omlxd.storage.ssd_pages import BadFile, FileHeader, read_header
from omlxd.storage.ssd_reading import Reading
from omlxd.storage.ssd_watch import FileWatch

COPY_NAME = "copy"
FORMAT_VERSION = 1
PIECE_PAGE_BYTES = 256 * 1024
"""File bytes that a whole piece takes (it fills its pages to the last byte)."""
REMOVAL_BYTES = 2 << 20
SMALL_PIECE_PAGE_BYTES = 64 * 1024
SMALL_STORE = 64 << 20
"""Below this map size pieces are small: their runs of free pages must be found among few pages."""

if TYPE_CHECKING:
    Database: TypeAlias = lmdb._Database

R = TypeVar("R")

Durability = Literal["commit", "interval", "none"]
DURABILITIES: tuple[Durability, ...] = ("commit", "interval", "none")

_ATTEMPTS = 3
DATABASES = (b"meta", b"blocks", b"pieces", b"recency", b"namespaces", b"quarantine")


class Environment:
    """One open LMDB environment. See the module's text for threads and for how payloads are read."""

    def __init__(
        self,
        path: Path,
        *,
        map_bytes: int,
        durability: Durability = "commit",
        readonly: bool = False,
        thorough: bool = False,
    ) -> None:
        """Open or create. ``thorough``: check the head of each value too, see ``check_structure``.

        Raises ``StoreBroken`` for what is not in order, ``OSError`` for the disk.
        """
        self.path = path
        self.readonly = readonly
        self.durability = durability
        self.generation = 0
        """Counts the files that have been the data file."""
        self.piece_page_bytes = PIECE_PAGE_BYTES if map_bytes >= SMALL_STORE else SMALL_PIECE_PAGE_BYTES
        self.descriptor = -1
        self.map_gate = Gate()  # who is alone may change the map
        self.file_gate = Gate()  # who is alone may close the file
        self._begin(map_bytes, thorough)

    def _begin(self, map_bytes: int, thorough: bool = False) -> None:
        path, readonly = self.path, self.readonly
        self._env = self._open(make_ready(path, map_bytes, readonly=readonly, thorough=thorough))
        try:
            self.descriptor = open_data(path, readonly=readonly)
            self.map_bytes: int = self._env.info()["map_size"]
            self.device = os.fstat(self.descriptor).st_dev
            self.refresh_header()
            self._latest: Reading | None = None
            self._begun = 0  # the newest write transaction
            self._open_databases()
            self.refresh_header()
            self._watch = FileWatch(path / DATA_NAME, self.descriptor)
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
        handles = [self._env.open_db(name, create=create) for name in DATABASES]
        self.meta, self.blocks, self.pieces, self.recency, self.namespaces, self.quarantine = handles
        self.names = dict(zip(handles, DATABASES, strict=True))

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

    def check(self) -> FileHeader:
        """Make sure that the file can be touched; returns its header. Raises ``DiskTrouble`` when it is gone or cut."""
        try:
            status = os.fstat(self.descriptor)
            header = read_header(self.descriptor)
        except BadFile as error:
            raise DiskTrouble("gone", f"{self.path / DATA_NAME} was overwritten: {error}") from error
        except OSError as error:
            raise trouble(error) from error
        # Longer than at the last commit it may not be yet: ``_lengthen`` comes after the meta page.
        if status.st_size < self.header.needed_bytes:
            raise DiskTrouble("gone", f"{self.path / DATA_NAME} was cut to {status.st_size} bytes")
        if status.st_nlink == 0:
            raise DiskTrouble("gone", f"{self.path / DATA_NAME} was deleted")
        return header

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Writer: what is done to the file within is this process's doing."""
        self._begun = (
            self.header.transaction + 1
        )  # pages that are free now may change: who reads an older state looks again
        with self._watch.own_changes():
            yield

    def go_through(self, *, thorough: bool = False) -> None:
        """Check the structure if anybody else has changed the file, or, ``thorough``, in any case.

        Raises ``Damaged``, ``DiskTrouble``.
        """
        try:
            self._watch.go_through(thorough=thorough)
        except BadFile as error:
            raise Damaged(f"its structure is damaged: {error}") from error
        except OSError as error:
            raise trouble(error) from error

    def is_in_place(self) -> bool:
        """Whether the path still leads to the file that is open here."""
        try:
            named, opened = os.lstat(self.path / DATA_NAME), os.fstat(self.descriptor)
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
        self.go_through(thorough=True)  # LMDB copies as many pages of a value as its first one says
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

    def read(self, work: Callable[[Reading], R]) -> R:
        """What ``work`` makes of the file as it was committed last; it may be called several times, and is to be short.

        Nothing but ``work``'s own reads goes to the disk, and nothing touches the map: pages of a state are not written
        to before the second transaction after it begins, and then ``work`` is called again with a newer one.
        Raises ``DiskTrouble``, ``Damaged`` (a tree), and what ``work`` does.
        """
        for _ in range(_ATTEMPTS):
            with self.file_gate.shared():
                header = self.header
                try:
                    found = work(self._reading_of(header))
                except (BadFile, OSError, Damaged) as error:
                    if self._begun <= header.transaction + 1:
                        raise self._explained(error) from error
                    continue
            if self._begun <= header.transaction + 1:
                return found
        with self.reading() as reading:
            return work(reading)

    def _explained(self, error: Exception) -> Exception:
        """Is the file as a whole to blame?"""
        if isinstance(error, OSError):
            return trouble(error)
        try:
            self.check()
        except DiskTrouble as found:
            return found
        return DiskTrouble("gone", f"{self.path / DATA_NAME} was cut: {error}") if isinstance(error, BadFile) else error

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """The file as it was committed last, for longer: pages that leave meanwhile are not used again before the end.

        Raises ``DiskTrouble``, ``Damaged`` (a tree).
        """
        with self.map_gate.shared():
            header = self.check()
            try:
                with self._env.begin() as txn:  # keeps the pages; of the map it touches the meta pages alone
                    if txn.id() > header.transaction + 1:
                        header = read_header(self.descriptor)
                    yield self._reading_of(header)
            except (BadFile, OSError) as error:
                raise self._explained(error) from error
            except lmdb.Error as error:
                raise trouble(error) from error

    def _reading_of(self, header: FileHeader) -> Reading:
        latest = self._latest
        if latest is None or latest.header is not header:
            latest = self._latest = Reading(self.descriptor, header, self.names)
        return latest

    # -- writing ------------------------------------------------------------------------------

    def begin_write(self) -> lmdb.Transaction[memoryview]:
        """Begin the one write transaction (``ssd_transaction.WriteTransaction``). Raises ``DiskTrouble``, ``Damaged``."""
        self.check()
        self.go_through()
        txn = self._env.begin(write=True, buffers=True)
        self._begun = txn.id()
        return txn

    def commit(self, txn: lmdb.Transaction[memoryview], put_bytes: int) -> None:
        """Commit what ``begin_write`` began, in which ``put_bytes`` were put. Raises ``DiskTrouble``, ``lmdb.Error``.

        Nothing is committed if somebody else has changed the file since: LMDB may have followed a wrong number.
        """
        if put_bytes < _SPILLING_BYTES and not self._watch.is_unchanged:
            txn.abort()
            raise DiskTrouble("gone", f"{self.path / DATA_NAME} was changed by another program meanwhile")
        with self.changing():
            before = os.fstat(self.descriptor).st_size
            with writing_early(self.descriptor, put_bytes if self.durability == "commit" else 0):
                txn.commit()
            self._lengthen(before)

    def _lengthen(self, before: int) -> None:
        """Make the file as long as its meta page says.

        LMDB writes no page that a transaction took at the end of the file and gave back: the file ends before it then, and
        would look as if somebody had cut it. One that got shorter meanwhile was cut, and is left for ``check`` to find.
        """
        with suppress(BadFile, OSError):  # it is committed; what is wrong with the file is found by check
            header = read_header(self.descriptor)
            if before <= os.fstat(self.descriptor).st_size < header.needed_bytes:
                os.ftruncate(self.descriptor, header.needed_bytes)
            self.header = header


_SPILLING_BYTES = 256 << 20  # LMDB writes to the file before the commit of a transaction with 512 MiB of new pages


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
