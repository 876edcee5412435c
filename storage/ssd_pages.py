"""LMDB's data file seen as pages: what its header says, giving free ones back.

LMDB keeps free pages for itself and its file never shrinks. Here they are returned to the file
system by punching holes: no second copy, nothing moves, and LMDB does not notice, since it
writes a free page in full before it ever reads it again. The file is read by ``pread``, never through the map,
which would bring SIGBUS where a read brings an error.

The layout is that of LMDB 0.9 and 1.0 on 64-bit hosts (``struct MDB_meta``, ``MDB_db`` in
its ``mdb.c``): both put the page number first in each page; their page headers differ in length.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

_MAGIC = 0xBEEFC0DE
NO_PAGE = (1 << 64) - 1
BRANCH, LEAF, OVERFLOW, META = 0x01, 0x02, 0x04, 0x08
"""Flags of a page."""
_TREE = struct.Struct("=IHHQQQQQ")  # pad, flags, depth, branch, leaf, overflow, entries, root
TREE_BYTES = _TREE.size
_META_BEFORE_TREES = struct.Struct("=IIQQ")  # magic, version, address, map size
_META_AFTER_TREES = struct.Struct("=QQ")  # last page, transaction
_INTEGER_KEYS, _ONE_FILE = 0x08, 0x4000  # of the free list; the rest of its flags are another way of mapping


class BadFile(Exception):
    """The file is not an LMDB data file in order; the text says what is wrong."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What is written down of one tree; ``root`` is ``NO_PAGE`` for an empty one."""

    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int

    @classmethod
    def unpack(cls, packed: bytes, offset: int = 0) -> Tree:
        """From the meta page, or the value that the main tree has under a database's name. ``struct.error``."""
        return cls(*_TREE.unpack_from(packed, offset)[1:])

    @property
    def pages(self) -> int:
        """Pages that it takes, values in pages of their own included."""
        return self.branch_pages + self.leaf_pages + self.overflow_pages


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The newer of the two meta pages. Sizes in bytes, ``pages`` counts pages ever used."""

    page_bytes: int
    header_bytes: int
    """Of a page; a value in pages of its own takes ``ceil((len + header_bytes) / page_bytes)``."""
    pages: int
    transaction: int
    free: Tree
    """The list of free pages."""
    main: Tree
    """The databases by their names."""

    @property
    def needed_bytes(self) -> int:
        """The file must be at least this long."""
        return self.pages * self.page_bytes

    @property
    def offsets_from(self) -> int:
        """Where a page's offsets are counted from: LMDB 1.0 begins behind the page's header, 0.9 before it."""
        return 0 if self.header_bytes == 16 else self.header_bytes


def read_header(descriptor: int) -> FileHeader:
    """Read the meta pages. Raises ``BadFile`` for anything that is no LMDB file, ``OSError`` for the disk."""
    first = _meta(os.pread(descriptor, 192, 0), 0)
    second = _meta(os.pread(descriptor, 192, first.page_bytes), 1)
    if second.page_bytes != first.page_bytes:
        raise BadFile(f"its meta pages disagree about the page size: {first.page_bytes} and {second.page_bytes} bytes")
    return first if first.transaction > second.transaction else second


@lru_cache(maxsize=8)  # each reading looks at them, and mostly they are as they were
def _meta(head: bytes, number: int) -> FileHeader:
    for header_bytes in (16, 24):
        if len(head) >= 192 and struct.unpack_from("=I", head, header_bytes)[0] == _MAGIC:
            break
    else:
        raise BadFile("a meta page is missing or has no LMDB magic number")
    at = header_bytes + _META_BEFORE_TREES.size
    _, _, address, _ = _META_BEFORE_TREES.unpack_from(head, header_bytes)
    page_bytes = struct.unpack_from("=I", head, at)[0]
    free, main = Tree.unpack(head, at), Tree.unpack(head, at + TREE_BYTES)
    last_page, transaction = _META_AFTER_TREES.unpack_from(head, at + 2 * TREE_BYTES)
    if page_bytes < 512 or page_bytes > 1 << 16 or page_bytes & (page_bytes - 1):
        raise BadFile(f"a page size of {page_bytes} bytes")
    found, flags = struct.unpack_from("=Q", head)[0], struct.unpack_from("=H", head, header_bytes - 6)[0]
    if (found, flags, address) != (number, META, 0) or free.flags & ~_ONE_FILE != _INTEGER_KEYS or main.flags:
        raise BadFile(f"meta page {number} is not as LMDB writes it for this program")
    if last_page >= 1 << 48:
        raise BadFile(f"meta page {number} counts {last_page} pages")
    return FileHeader(page_bytes, header_bytes, last_page + 1, transaction, free, main)


def runs_of(pages: npt.NDArray[np.uint64]) -> Iterable[tuple[int, int]]:
    """``(first page, count)`` of each run of neighbours in an ascending array."""
    if not pages.size:
        return []
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    starts = np.concatenate(([0], breaks))
    ends = np.concatenate((breaks, [pages.size]))
    return zip(pages[starts].tolist(), (ends - starts).tolist(), strict=True)


def punch(descriptor: int, offset: int, length: int) -> bool:
    """Give a range of a file back to the file system. False where holes cannot be made there.

    Raises ``OSError`` for a disk that fails. Releases the GIL.
    """
    if sys.platform == "darwin":
        return _punch_darwin(descriptor, offset, length)
    result = _libc().fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, offset, length)
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code))


_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # <linux/falloc.h>
_F_PUNCHHOLE = 99  # <sys/fcntl.h> of macOS: struct fpunchhole {flags, reserved, offset, length}


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc


def _punch_darwin(descriptor: int, offset: int, length: int) -> bool:
    try:
        fcntl.fcntl(descriptor, _F_PUNCHHOLE, struct.pack("=IIqq", 0, 0, offset, length))
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
            return False
        raise
    return True
