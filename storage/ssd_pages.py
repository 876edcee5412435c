"""LMDB's data file seen as pages: what its header says, which pages are free, giving them back.

LMDB keeps free pages for itself and its file never shrinks. Here they are found by reading the
file (never through the map, which would bring SIGBUS where a read brings an error), and returned to the
file system by punching holes: no second copy, nothing moves, and LMDB does not notice, since it
writes a free page in full before it ever reads it again.

The layout is that of LMDB 0.9 and 1.0 on 64-bit hosts (``struct MDB_meta``, ``MDB_page``, ``MDB_node`` in
its ``mdb.c``): both put the page number first in each page; their page headers differ in length.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

_MAGIC = 0xBEEFC0DE
_NO_PAGE = (1 << 64) - 1
_BRANCH, _LEAF, _BIG_DATA = 0x01, 0x02, 0x01
_DB = struct.Struct("=IHHQQQQQ")  # pad, flags, depth, branch, leaf, overflow, entries, root
_META_BEFORE_DBS = struct.Struct("=IIQQ")  # magic, version, address, map size
_META_AFTER_DBS = struct.Struct("=QQ")  # last page, transaction
_MAX_DEPTH = 32


class BadFile(Exception):
    """The file is not an LMDB data file in order; the text says what is wrong."""


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The newer of the two meta pages. Sizes in bytes, ``pages`` counts pages ever used."""

    page_bytes: int
    header_bytes: int
    """Of a page; a value in pages of its own takes ``ceil((len + header_bytes) / page_bytes)``."""
    pages: int
    transaction: int
    free_root: int
    free_tree_pages: int

    @property
    def needed_bytes(self) -> int:
        """The file must be at least this long."""
        return self.pages * self.page_bytes


def read_header(descriptor: int) -> FileHeader:
    """Read the meta pages. Raises ``BadFile`` for anything that is no LMDB file, ``OSError`` for the disk."""
    first = _meta(os.pread(descriptor, 256, 0))
    second = _meta(os.pread(descriptor, 256, first.page_bytes))
    if second.page_bytes != first.page_bytes:
        raise BadFile(f"its meta pages disagree about the page size: {first.page_bytes} and {second.page_bytes} bytes")
    return max(first, second, key=lambda meta: meta.transaction)


def _meta(head: bytes) -> FileHeader:
    for header_bytes in (16, 24):
        if len(head) >= 192 and struct.unpack_from("=I", head, header_bytes)[0] == _MAGIC:
            break
    else:
        raise BadFile("a meta page is missing or has no LMDB magic number")
    at = header_bytes + _META_BEFORE_DBS.size
    page_bytes, _, _, branch, leaf, overflow, _, root = _DB.unpack_from(head, at)
    last_page, transaction = _META_AFTER_DBS.unpack_from(head, at + 2 * _DB.size)
    if page_bytes < 512 or page_bytes > 1 << 16 or page_bytes & (page_bytes - 1):
        raise BadFile(f"a page size of {page_bytes} bytes")
    return FileHeader(page_bytes, header_bytes, last_page + 1, transaction, root, branch + leaf + overflow)


def free_pages(descriptor: int, header: FileHeader) -> npt.NDArray[np.uint64]:
    """Numbers of all free pages in ascending order. Raises ``BadFile`` when the list cannot be right.

    The caller must be the store's writer, between two transactions, with no reader on an older one.
    """
    lists = [_page_list(descriptor, header, value) for value in _values(descriptor, header, header.free_root, 0)]
    if not lists:
        return np.empty(0, np.uint64)
    pages = np.sort(np.concatenate(lists))
    if pages.size and (pages[0] < 2 or pages[-1] >= header.pages or np.any(pages[1:] == pages[:-1])):
        raise BadFile("the free list names pages twice or pages that are not there")
    return pages


class _Value(Protocol):
    def __call__(self) -> bytes: ...


def _values(descriptor: int, header: FileHeader, page: int, depth: int) -> Iterator[_Value]:
    """The values of a tree's leaves, left to right, as functions that fetch them."""
    if page == _NO_PAGE:
        return
    if depth > _MAX_DEPTH:
        raise BadFile("the free list's tree has no end")
    data = _read_page(descriptor, header, page)
    number, flags = struct.unpack_from("=Q", data)[0], struct.unpack_from("=H", data, header.header_bytes - 6)[0]
    lower = struct.unpack_from("=H", data, header.header_bytes - 4)[0]
    # LMDB 1.0 counts a page's offsets from the end of its header, 0.9 from the page's beginning.
    base = 0 if header.header_bytes == 16 else header.header_bytes
    count = (lower - (header.header_bytes - base)) // 2
    if number != page or not flags & (_BRANCH | _LEAF) or not 0 <= count <= header.page_bytes // 10:
        raise BadFile(f"page {page} of the free list is not a tree's page")
    for at in struct.unpack_from(f"={count}H", data, header.header_bytes):
        node = at + base
        if node + 8 > header.page_bytes:
            raise BadFile(f"page {page} of the free list has a node outside of it")
        low, high, node_flags, key_bytes = struct.unpack_from("=HHHH", data, node)
        if flags & _BRANCH:
            yield from _values(descriptor, header, low | high << 16 | node_flags << 32, depth + 1)
            continue
        size, start = low | high << 16, node + 8 + key_bytes
        if node_flags & _BIG_DATA:
            first = struct.unpack_from("=Q", data, start)[0]
            offset = first * header.page_bytes + header.header_bytes
            yield lambda size=size, offset=offset: os.pread(descriptor, size, offset)
        else:
            yield lambda value=data[start : start + size]: value


def _read_page(descriptor: int, header: FileHeader, page: int) -> bytes:
    data = os.pread(descriptor, header.page_bytes, page * header.page_bytes)
    if len(data) != header.page_bytes:
        raise BadFile(f"page {page} is beyond the end of the file")
    return data


def _page_list(descriptor: int, header: FileHeader, value: _Value) -> npt.NDArray[np.uint64]:
    words = np.frombuffer(value(), np.uint64)
    if not words.size or int(words[0]) != words.size - 1:
        raise BadFile("a record of the free list has not the length that it names")
    return words[1:]


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
