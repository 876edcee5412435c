"""LMDB's trees read without LMDB: by ``pread``, with every number that is found in the file checked before it is used.

LMDB follows whatever its pages say. Here a page that is not in order is ``Damaged``, a disk that does not answer an
``OSError``, a file that ends too early ``BadFile``: no bit in the file can end the process, and nothing waits for the disk
with Python's lock held. The layout is that of ``struct MDB_page`` and ``MDB_node`` in LMDB's ``mdb.c``.

Who reads must keep the pages from being used again: ``Environment.reading`` holds a transaction of LMDB for that.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from omlxd.storage.ssd_errors import Damaged
from omlxd.storage.ssd_pages import BRANCH, LEAF, NO_PAGE, BadFile, FileHeader, Tree

MAX_DEPTH = 32
BIG_DATA, SUB_TREE = 0x01, 0x02
"""Flags of a leaf's node: its value is in pages of its own; it is a tree."""

Extent: TypeAlias = tuple[int, int]
"""Offset and length in the file, in bytes."""

_KEPT_BRANCHES = 512  # a tree's upper pages, 2 MiB of them; enough for 40,000 leaves

_NODE = struct.Struct("=HHHH")  # size low and high, or page low and middle; flags, or page high; length of the key
_NUMBER = struct.Struct("=Q")
_SHORT = struct.Struct("=H")


class Page:
    """One page of a tree, its nodes in the order of their keys. ``Damaged`` where it cannot be one."""

    __slots__ = ("_base", "_data", "_offsets", "count", "is_branch", "number")

    def __init__(self, data: bytes, number: int, header: FileHeader) -> None:
        header_bytes, base = header.header_bytes, header.offsets_from
        flags = _SHORT.unpack_from(data, header_bytes - 6)[0]
        lower = _SHORT.unpack_from(data, header_bytes - 4)[0] + base
        if (
            _NUMBER.unpack_from(data)[0] != number
            or flags not in (BRANCH, LEAF)
            or not header_bytes < lower <= len(data)
        ):
            raise Damaged(f"page {number} is not a page of LMDB's trees")
        self.number = number
        self.is_branch = flags == BRANCH
        self.count = (lower - header_bytes) // 2
        self._data = data
        self._base = base
        self._offsets = memoryview(data)[header_bytes : header_bytes + 2 * self.count].cast("H")

    def key(self, at: int) -> bytes:
        """The key of a node; a branch's first has none, it stands before all."""
        node = self._offsets[at] + self._base
        return self._data[node + 8 : node + 8 + _SHORT.unpack_from(self._data, node + 6)[0]]

    def child(self, at: int) -> int:
        """The page that a branch's node leads to."""
        low, middle, high, _ = _NODE.unpack_from(self._data, self._offsets[at] + self._base)
        return int(low | middle << 16 | high << 32)

    def node(self, at: int) -> tuple[bytes, int, int, bytes]:
        """Key, flags, length of the value in bytes, and what is in the page of it: the value, or its first page's number."""
        start = self._offsets[at] + self._base
        if start + 8 > len(self._data):
            raise Damaged(f"page {self.number} has a node outside of it")
        low, high, flags, key_bytes = _NODE.unpack_from(self._data, start)
        start += 8
        key = self._data[start : start + key_bytes]
        start += key_bytes
        size = low | high << 16
        inside = 8 if flags & BIG_DATA else size
        if start + inside > len(self._data):
            raise Damaged(f"page {self.number} has a node that ends outside of it")
        return key, flags, size, self._data[start : start + inside]


class Snapshot:
    """One state of the file, for as many threads as want it; keys and values are bytes.

    Every method raises ``Damaged``, ``BadFile``, ``OSError``.
    """

    def __init__(self, descriptor: int, header: FileHeader) -> None:
        self.header = header
        self._descriptor = descriptor
        self._branches: dict[int, Page] = {}

    def get(self, tree: Tree | None, key: bytes) -> bytes | None:
        """The value of ``key``; None where there is none, or no tree."""
        page, first = next(self._leaves(tree, key), (None, 0))
        if page is None or first == page.count:
            return None
        found, flags, size, inside = page.node(first)
        return self._value(flags, size, inside) if found == key else None

    def items(self, tree: Tree | None, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys and values from ``start`` on, in the order of the keys."""
        for page, first in self._leaves(tree, start):
            for at in range(first, page.count):
                key, flags, size, inside = page.node(at)
                yield key, self._value(flags, size, inside)

    def places(self, tree: Tree | None, prefix: bytes) -> Iterator[Extent | bytes]:
        """For each key with that prefix, in their order: where its value is, or the value, if it has no pages of its own.

        Nothing is read of values that have.
        """
        for page, first in self._leaves(tree, prefix):
            for at in range(first, page.count):
                key, flags, size, inside = page.node(at)
                if not key.startswith(prefix):
                    return
                yield self._extent(size, inside) if flags & BIG_DATA else inside

    def trees(self) -> dict[bytes, Tree]:
        """The databases by their names."""
        found = {}
        for page, _ in self._leaves(self.header.main, b""):
            for at in range(page.count):
                name, flags, _, inside = page.node(at)
                if flags == SUB_TREE:
                    try:
                        found[name] = Tree.unpack(inside)
                    except struct.error as error:
                        raise Damaged(f"the tree of database {name!r} is not written down in full") from error
        return found

    def _leaves(self, tree: Tree | None, start: bytes) -> Iterator[tuple[Page, int]]:
        """The leaves from the one on that may have ``start``, each with its first node that does not come before it."""
        if tree is None or tree.root == NO_PAGE:
            return
        try:
            yield from self._walk(tree.root, start)
        except (struct.error, IndexError) as error:
            raise Damaged(f"a page of LMDB's trees has a node outside of it: {error}") from error

    def _walk(self, number: int, start: bytes) -> Iterator[tuple[Page, int]]:
        above: list[tuple[Page, int]] = []  # the branches down to here, and which of their nodes was taken
        while True:
            page = self._branches.get(number) or self._page(number)
            if page.is_branch:
                if len(above) == MAX_DEPTH:
                    raise Damaged("a tree of LMDB's has no end")
                if len(self._branches) < _KEPT_BRANCHES:
                    self._branches[number] = page
                at = bisect_right(range(page.count), start, lo=1, key=page.key) - 1 if start else 0
            else:
                yield page, bisect_left(range(page.count), start, key=page.key) if start else 0
                start = b""
                at = -1
                while at < 0:
                    if not above:
                        return
                    page, at = above.pop()
                    at = at + 1 if at + 1 < page.count else -1
            above.append((page, at))
            number = page.child(at)

    def _page(self, number: int) -> Page:
        header = self.header
        if not 2 <= number < header.pages:
            raise Damaged(f"LMDB's trees lead to page {number} of {header.pages}")
        data = os.pread(self._descriptor, header.page_bytes, number * header.page_bytes)
        if len(data) != header.page_bytes:
            raise BadFile(f"page {number} is beyond the end of the file")
        return Page(data, number, header)

    def _extent(self, size: int, inside: bytes) -> Extent:
        header = self.header
        first = _NUMBER.unpack(inside)[0]
        offset = first * header.page_bytes + header.header_bytes
        if first < 2 or offset + size > header.needed_bytes:
            raise Damaged(f"a value of {size} bytes is said to begin on page {first} of {header.pages}")
        return offset, size

    def _value(self, flags: int, size: int, inside: bytes) -> bytes:
        if not flags & BIG_DATA:
            return inside
        offset, size = self._extent(size, inside)
        value = os.pread(self._descriptor, size, offset)
        if len(value) != size:
            raise BadFile(f"a value of {size} bytes is beyond the end of the file")
        return value


def free_pages(descriptor: int, header: FileHeader) -> npt.NDArray[np.uint64]:
    """Numbers of all free pages in ascending order. Raises ``BadFile`` when the list cannot be right.

    The caller must be the store's writer, between two transactions, with no reader on an older one.
    """
    try:
        lists = [_page_list(value) for _, value in Snapshot(descriptor, header).items(header.free)]
    except Damaged as error:
        raise BadFile(f"the free list is not in order: {error}") from error
    if not lists:
        return np.empty(0, np.uint64)
    pages = np.sort(np.concatenate(lists))
    if pages.size and (pages[0] < 2 or pages[-1] >= header.pages or np.any(pages[1:] == pages[:-1])):
        raise BadFile("the free list names pages twice or pages that are not there")
    return pages


def _page_list(value: bytes) -> npt.NDArray[np.uint64]:
    if len(value) % _NUMBER.size:
        raise BadFile("a record of the free list is no list of pages")
    words = np.frombuffer(value, np.uint64)
    if not words.size or int(words[0]) != words.size - 1:
        raise BadFile("a record of the free list has not the length that it names")
    if np.any(words[2:] >= words[1:-1]):
        raise BadFile("a record of the free list is not in descending order")
    return words[1:]
