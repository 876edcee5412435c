"""Is the structure of LMDB's file in order? Answered without LMDB, which trusts it, for all of its trees in one go.

Checked are the meta pages (``read_header``), each page of each tree (its number, kind, and that its nodes fill it exactly), keys in
their order, the counts that are written down of each tree, the free list, and that no page has two uses. What
passes can be followed and changed by LMDB: no number in it leads astray. Whether the *contents* are what was
stored, the hashes of the records tell.

Pages are gone through by the thousand, as numpy's arrays: the trees of 200,000 records take some tenths of a second.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from omlxd.storage.ssd_errors import Damaged
from omlxd.storage.ssd_pages import BRANCH, LEAF, NO_PAGE, OVERFLOW, TREE_BYTES, BadFile, FileHeader, Tree
from omlxd.storage.ssd_tree import BIG_DATA, MAX_DEPTH, SUB_TREE, Snapshot, free_pages

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
N = TypeVar("N", int, Numbers)

PAGES_AT_ONCE = 512
NEAR = 4
"""Pages that lie no further apart are read in one go."""
LONGEST_KEY = 511
MAIN, FREE = "main", "free list"


def check_structure(descriptor: int, header: FileHeader, *, thorough: bool = False) -> int:
    """Go through the file. Returns the bytes that it must have at least: up to the end of the last page in use.

    ``thorough``: look at the first page of each value too, which with large stores are millions of small reads.
    Raises ``BadFile`` with what was found first, ``OSError`` for the disk. Nobody may write to the file meanwhile.
    """
    check = _Check(descriptor, header, thorough)
    check.tree(FREE, header.free)
    check.tree(MAIN, header.main)
    try:
        trees = Snapshot(descriptor, header).trees()
    except Damaged as error:
        raise BadFile(str(error)) from error
    for name, tree in trees.items():
        check.tree(name.decode("ascii", "replace"), tree)
    end = check.end_of_use() * header.page_bytes
    if os.fstat(descriptor).st_size < end:
        raise BadFile(f"the file is shorter than the {end} bytes that are in use of it")
    free = free_pages(descriptor, header)
    check.use(free.astype(np.int64), np.ones(free.size, np.int64))
    if 2 + free.size + sum(tree.pages for tree in (header.free, header.main, *trees.values())) > header.pages:
        raise BadFile("more pages are in use and free than there are")
    check.no_page_twice()
    return end


def batches(descriptor: int, header: FileHeader, name: str, tree: Tree) -> Iterator[list[tuple[bytes, bytes]]]:
    """All keys and values of a tree, in the order of the keys, some thousand at a time. Raises ``BadFile``, ``OSError``."""
    if tree.root == NO_PAGE:
        return
    reader = _Pages(descriptor, header)
    pages: Numbers = np.array([tree.root]).astype(np.int64)
    for _ in range(1, tree.depth):
        pages = np.concatenate([reader.nodes(name, part, is_leaf=False).children() for part in _parts(pages)])
    for part in _parts(pages):
        yield reader.nodes(name, part, is_leaf=True).pairs(descriptor)


def _parts(pages: Numbers) -> Iterator[Numbers]:
    return (pages[start : start + PAGES_AT_ONCE] for start in range(0, pages.size, PAGES_AT_ONCE))


class _Check:
    """The pages that were met so far: runs of a first page and a count."""

    def __init__(self, descriptor: int, header: FileHeader, thorough: bool) -> None:
        self._descriptor = descriptor
        self._header = header
        self._thorough = thorough
        self._pages = _Pages(descriptor, header)
        self._firsts: list[Numbers] = [np.array([0])]
        self._counts: list[Numbers] = [np.array([2])]  # the meta pages

    def use(self, firsts: Numbers, counts: Numbers) -> None:
        """Count runs of pages as used."""
        self._firsts.append(firsts)
        self._counts.append(counts)

    def end_of_use(self) -> int:
        """Behind the last page that was met."""
        return max(int((firsts + counts).max()) for firsts, counts in self._runs() if firsts.size)

    def no_page_twice(self) -> None:
        """Raises ``BadFile`` where two runs share a page."""
        firsts, counts = np.concatenate(self._firsts), np.concatenate(self._counts)
        order = np.argsort(firsts, kind="stable")
        firsts, counts = firsts[order], counts[order]
        twice = np.flatnonzero(firsts[:-1] + counts[:-1] > firsts[1:])
        if twice.size:
            raise BadFile(f"page {firsts[twice[0] + 1]} is used twice, in {twice.size} places so")

    def _runs(self) -> Iterator[tuple[Numbers, Numbers]]:
        return zip(self._firsts, self._counts, strict=True)

    def tree(self, name: str, tree: Tree) -> None:
        """All levels of one tree, from its root."""
        if tree.root == NO_PAGE:
            branches = leaves = overflow = entries = 0
        elif not 1 <= tree.depth < MAX_DEPTH or (tree.flags and name != FREE):
            raise BadFile(f"the tree {name!r} is {tree.depth} levels deep and of kind {tree.flags}")
        else:
            branches, leaves, overflow, entries = self._levels(name, tree)
        # A value that was overwritten by a shorter one keeps its pages, which only a thorough look shows.
        counted = overflow == tree.overflow_pages if self._thorough else overflow <= tree.overflow_pages
        if not counted or (branches, leaves, entries) != (tree.branch_pages, tree.leaf_pages, tree.entries):
            raise BadFile(f"the tree {name!r} has not the pages and entries that are written down of it")

    def _levels(self, name: str, tree: Tree) -> tuple[int, int, int, int]:
        branches = overflow = entries = 0
        pages: Numbers = np.array([tree.root]).astype(np.int64)
        for level in range(1, tree.depth + 1):
            self._in_range(name, pages, np.ones(pages.size, np.int64))
            self.use(pages, np.ones(pages.size, np.int64))
            below: list[Numbers] = []
            for chunk in _parts(pages):
                nodes = self._pages.nodes(name, chunk, is_leaf=level == tree.depth)
                if level < tree.depth:
                    below.append(nodes.children())
                    continue
                entries += nodes.size
                firsts, counts = nodes.values()
                self._in_range(name, firsts, counts)
                if self._thorough:
                    counts = self._said(firsts, counts)
                self.use(firsts, counts)
                overflow += int(counts.sum())
            if level < tree.depth:
                branches += pages.size
                pages = np.sort(np.concatenate(below))
                if pages.size > tree.branch_pages + tree.leaf_pages:
                    raise BadFile(f"the tree {name!r} has more pages than are written down of it")
        return branches, int(pages.size), overflow, entries

    def _in_range(self, name: str, firsts: Numbers, counts: Numbers) -> None:
        outside = np.flatnonzero((firsts < 2) | (firsts + counts > self._header.pages))
        if outside.size:
            raise BadFile(f"the tree {name!r} leads to page {firsts[outside[0]]} of {self._header.pages}")

    def _said(self, firsts: Numbers, counts: Numbers) -> Numbers:
        """The values' pages as their first ones say."""
        values = zip(firsts.tolist(), counts.tolist(), strict=True)
        found = [check_value_head(self._descriptor, self._header, first, count) for first, count in values]
        return np.array(found).astype(np.int64)


class _Pages:
    """Reads some hundred pages at once, into the same memory each time."""

    def __init__(self, descriptor: int, header: FileHeader) -> None:
        self._descriptor = descriptor
        self._header = header
        self._buffer = np.empty(PAGES_AT_ONCE * NEAR * header.page_bytes, np.uint8)

    def nodes(self, name: str, pages: Numbers, *, is_leaf: bool) -> _Nodes:
        """The nodes of those pages (``PAGES_AT_ONCE`` at most), in their order; good until the next call."""
        order = np.argsort(pages)
        starts = np.empty_like(pages)
        starts[order] = self._read(pages[order])
        return _Nodes(name, self._header, pages, self._buffer, starts, is_leaf=is_leaf)

    def _read(self, pages: Numbers) -> Numbers:
        """Read those pages (ascending) into the buffer, near ones with what lies between them; returns where each begins."""
        page_bytes = self._header.page_bytes
        ends = [*(np.flatnonzero(np.diff(pages) > NEAR) + 1).tolist(), pages.size]
        runs = [(int(pages[start]), int(pages[end - 1]) + 1) for start, end in pairwise([0, *ends])]
        if hasattr(os, "posix_fadvise") and len(runs) > 1:  # so that the disk is waited for once, not for each of them
            for first, end in runs:
                length = (end - first) * page_bytes
                os.posix_fadvise(self._descriptor, first * page_bytes, length, os.POSIX_FADV_WILLNEED)
        at = 0
        buffer = memoryview(self._buffer)
        shifts = []
        for first, end in runs:
            length = (end - first) * page_bytes
            if os.preadv(self._descriptor, [buffer[at : at + length]], first * page_bytes) != length:
                raise BadFile(f"page {end - 1} is beyond the end of the file")
            shifts.append(at - first * page_bytes)
            at += length
        starts: Numbers = pages * page_bytes + np.repeat(shifts, np.diff([0, *ends]))
        return starts


class _Nodes:
    """The nodes of some pages of one level, in the order of pages and keys; ``BadFile`` where a page is not in order."""

    def __init__(
        self,
        name: str,
        header: FileHeader,
        pages: Numbers,
        data: npt.NDArray[np.uint8],
        starts: Numbers,
        *,
        is_leaf: bool,
    ) -> None:
        """``data`` has the pages, page ``pages[i]`` from byte ``starts[i]`` on."""
        self._name = name
        self._header = header
        self._pages = pages
        self._bytes = data
        halves = data.view(np.uint16)
        header_bytes, page_bytes, base = header.header_bytes, header.page_bytes, header.offsets_from
        kind, lower, upper = (halves[(starts + header_bytes >> 1) - back].astype(np.int64) for back in (3, 2, 1))
        lower, upper = lower + base, upper + base
        self._require(data.view(np.int64)[starts >> 3] == pages, "does not have its own number")
        self._require(kind == (LEAF if is_leaf else BRANCH), "is of another kind")
        fewest = 1 if is_leaf or name == FREE else 2
        self._require(
            (lower >= header_bytes + 2 * fewest) & (lower & 1 == 0) & (lower <= upper) & (upper <= page_bytes),
            "has no such bounds",
        )
        counts = lower - header_bytes >> 1
        self.size = int(counts.sum())
        self._row = np.repeat(np.arange(pages.size), counts)
        slots = np.arange(self.size) + np.repeat((starts + header_bytes >> 1) - (np.cumsum(counts) - counts), counts)
        offsets = halves[slots].astype(np.int64) + base
        self._require_node(
            (offsets >= upper[self._row]) & (offsets & 1 == 0) & (offsets + 8 <= page_bytes), "outside of it"
        )
        self._at = starts[self._row] + offsets
        self._low, self._high, self._flags, self._key_bytes = (
            halves[(self._at >> 1) + field].astype(np.int64) for field in range(4)
        )
        taken = 8 + self._key_bytes
        if is_leaf:
            self._size = self._low | self._high << 16
            allowed = (self._flags == 0) | (self._flags == BIG_DATA)
            if name == MAIN:
                allowed |= (self._flags == SUB_TREE) & (self._size == TREE_BYTES)
            self._require_node(allowed, "of an unknown kind")
            taken = taken + np.where(self._flags == BIG_DATA, 8, self._size)
        taken = taken + (taken & 1)
        self._require_node(offsets + taken <= page_bytes, "that ends outside of it")
        filled = np.bincount(self._row, weights=taken, minlength=pages.size)
        self._require(filled == page_bytes - upper, "is not filled by its nodes")
        self._first = np.concatenate(([True], self._row[1:] != self._row[:-1])) if self.size else np.empty(0, bool)
        self._check_keys(is_leaf)

    def _check_keys(self, is_leaf: bool) -> None:
        """Their lengths, and their order as far as their first 8 bytes tell."""
        inner = np.ones(self.size, bool) if is_leaf else ~self._first  # a branch's first node has no key
        self._require_node(
            ~inner | ((self._key_bytes >= 1) & (self._key_bytes <= LONGEST_KEY)), "with a key of no such length"
        )
        comparable = inner & (self._key_bytes >= 8)
        words = self._words(np.where(comparable, self._at, 0) + 8)
        if self._name != FREE:
            words = words.byteswap() if sys.byteorder == "little" else words
        pairs = comparable[1:] & comparable[:-1] & ~self._first[1:]
        in_order = words[1:] >= words[:-1] if self._name != FREE else words[1:] > words[:-1]
        self._require_node(np.concatenate(([True], in_order | ~pairs)) if self.size else inner, "out of order")
        if self._name == FREE:
            known = (self._key_bytes == 8) & (words <= np.uint64(self._header.transaction))
            self._require_node(known | ~inner, "of no transaction")

    def _words(self, at: Numbers) -> Words:
        """The 8 bytes at each offset, as they would be read by this machine."""
        return np.ascontiguousarray(self._bytes[at[:, None] + np.arange(8)]).view(np.uint64).reshape(-1)

    def children(self) -> Numbers:
        """The pages that a branch's nodes lead to."""
        found: Numbers = self._low | self._high << 16 | self._flags << 32
        return found

    def values(self) -> tuple[Numbers, Numbers]:
        """First page and number of pages of each value that has pages of its own."""
        big = self._flags == BIG_DATA
        at = self._at[big] + 8 + self._key_bytes[big]
        firsts = self._words(at)
        if np.any(firsts >= self._header.pages):
            raise BadFile(f"the tree {self._name!r} leads to a value on page {firsts.max()} of {self._header.pages}")
        return firsts.astype(np.int64), value_pages(self._header, self._size[big])

    def pairs(self, descriptor: int) -> list[tuple[bytes, bytes]]:
        """Keys and values of a leaf's nodes."""
        data = self._bytes[: int(self._at.max(initial=0)) + self._header.page_bytes].tobytes()
        big = self._flags == BIG_DATA
        keys = self._at + 8
        values = keys + self._key_bytes
        ends = values + np.where(big, 0, self._size)
        found = [(data[a:b], data[b:c]) for a, b, c in zip(keys.tolist(), values.tolist(), ends.tolist(), strict=True)]
        header = self._header
        for at, first in zip(np.flatnonzero(big).tolist(), self.values()[0].tolist(), strict=True):
            size = int(self._size[at])
            value = os.pread(descriptor, size, first * header.page_bytes + header.header_bytes)
            if len(value) != size:
                raise BadFile(f"a value of {size} bytes is beyond the end of the file")
            found[at] = found[at][0], value
        return found

    def _require(self, fine: npt.NDArray[np.bool_], what: str) -> None:
        if not fine.all():
            raise BadFile(f"page {self._pages[int(np.argmin(fine))]} of the tree {self._name!r} {what}")

    def _require_node(self, fine: npt.NDArray[np.bool_], what: str) -> None:
        if not fine.all():
            page = self._pages[self._row[int(np.argmin(fine))]]
            raise BadFile(f"page {page} of the tree {self._name!r} has a node {what}")


def value_pages(header: FileHeader, size: N) -> N:
    """Pages of a value (or of each) of so many bytes that has pages of its own."""
    return (size + header.header_bytes + header.page_bytes - 1) // header.page_bytes


def check_value_head(descriptor: int, header: FileHeader, first: int, count: int) -> int:
    """The pages that a value's first page says it has: LMDB frees as many. Raises ``BadFile``, ``OSError``.

    ``count`` is what its length takes; it has more where a longer value was overwritten.
    """
    head = os.pread(descriptor, header.header_bytes, first * header.page_bytes)
    if len(head) != header.header_bytes:
        raise BadFile(f"page {first} is beyond the end of the file")
    number, flags = struct.unpack_from("=Q", head)[0], struct.unpack_from("=H", head, header.header_bytes - 6)[0]
    pages: int = struct.unpack_from("=I", head, header.header_bytes - 4)[0]
    if (number, flags) != (first, OVERFLOW) or not count <= pages <= header.pages - first:
        raise BadFile(f"page {first}, where a value of {count} pages begins, says otherwise")
    return pages
