"""Which bytes of one segment are taken: best fit, neighbours merge.

Pure bookkeeping over the numbers 0 to ``capacity``: no memory is touched here. Best fit is the
smallest hole that is large enough, the lowest offset among equals (Knuth, The Art of Computer
Programming, vol. 1, section 2.5, with boundary tags kept in two dictionaries instead of in the
memory itself). Every operation is O(log holes).

The allocator also remembers which holes were used since they were last known to be untouched, so
that only memory that the system really backs is given back to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sortedcontainers import SortedList


class ExtentAllocator:
    """Hands out runs of ``capacity`` bytes. Not thread-safe: one owner."""

    def __init__(self, capacity: int) -> None:
        if capacity <= 0:
            raise ValueError(f"an allocator over {capacity} bytes: at least 1 is needed")
        self.capacity = capacity
        self._taken: dict[int, int] = {}  # offset -> bytes
        self._holes: dict[int, int] = {}  # offset -> bytes
        self._hole_ending: dict[int, int] = {}  # end -> offset
        self._by_size: SortedList[tuple[int, int]] = SortedList()  # (bytes, offset)
        self._touched: set[int] = set()  # offsets of holes that were used
        self._used = 0
        self._add_hole(0, capacity)

    @property
    def used(self) -> int:
        """Bytes handed out."""
        return self._used

    @property
    def free_bytes(self) -> int:
        """Bytes in holes, of any size."""
        return self.capacity - self._used

    @property
    def largest_free(self) -> int:
        """Bytes of the largest hole; 0 when everything is taken."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes that is not in the largest hole, 0 to 1."""
        return 1 - self.largest_free / self.free_bytes if self.free_bytes else 0.0

    def __len__(self) -> int:
        """Return the number of extents handed out."""
        return len(self._taken)

    def holes(self) -> Iterator[tuple[int, int]]:
        """Yield ``(offset, bytes)`` of every hole, by offset."""
        yield from sorted(self._holes.items())

    def touched_holes(self) -> list[tuple[int, int]]:
        """Return ``(offset, bytes)`` of the holes that hold memory that was used, by offset."""
        return [(offset, self._holes[offset]) for offset in sorted(self._touched)]

    def best_fit(self, nbytes: int) -> int | None:
        """Return the bytes of the hole that ``allocate(nbytes)`` would take; None when none is large enough."""
        found = self._best_hole(nbytes)
        return None if found is None else found[0]

    def allocate(self, nbytes: int) -> int | None:
        """Take ``nbytes`` and return their offset; None when no hole is large enough."""
        found = self._best_hole(nbytes)
        if found is None:
            return None
        size, offset = found
        touched = offset in self._touched
        self._remove_hole(offset)
        if size > nbytes:
            self._add_hole(offset + nbytes, size - nbytes, touched=touched)
        self._taken[offset] = nbytes
        self._used += nbytes
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Give an extent back; ``ValueError`` when exactly this one is not handed out (a double free, say)."""
        self.check_taken(offset, nbytes)
        del self._taken[offset]
        self._used -= nbytes
        start, end = offset, offset + nbytes
        before = self._hole_ending.get(start)
        if before is not None:
            start = before
            self._remove_hole(before)
        after = self._holes.get(end)
        if after is not None:
            self._remove_hole(end)
            end += after
        self._add_hole(start, end - start, touched=True)

    def suspect(self, offset: int) -> None:
        """Note that the hole at ``offset`` may have memory behind it."""
        self._touched.add(offset)

    def suspect_all(self) -> None:
        """Note that any hole may have memory behind it: somebody else has touched some."""
        self._touched.update(self._holes)

    def forget_touched(self, offset: int) -> None:
        """Note that the hole at ``offset`` has no memory behind it any more."""
        self._touched.discard(offset)

    def fits_after(self, extents: Iterable[tuple[int, int]], nbytes: int) -> bool:
        """Tell whether ``nbytes`` would fit if these ``(offset, bytes)`` were free too. Changes nothing.

        Raises ``ValueError`` for one that is not handed out, or named twice.
        """
        supposed = Supposition(self)
        for offset, size in extents:
            supposed.free(offset, size)
        return supposed.largest_free >= nbytes

    def hole_ending_at(self, end: int) -> int | None:
        """Return the offset of the hole that ends there, if one does."""
        return self._hole_ending.get(end)

    def hole_end(self, offset: int) -> int | None:
        """Return the end of the hole that starts there, if one does."""
        nbytes = self._holes.get(offset)
        return None if nbytes is None else offset + nbytes

    def _best_hole(self, nbytes: int) -> tuple[int, int] | None:
        if nbytes <= 0:
            raise ValueError(f"an extent of {nbytes} bytes: at least 1 is needed")
        index = self._by_size.bisect_left((nbytes, -1))
        return self._by_size[index] if index < len(self._by_size) else None

    def check_taken(self, offset: int, nbytes: int) -> None:
        """Raise ``ValueError`` unless exactly this extent is handed out."""
        taken = self._taken.get(offset)
        if taken != nbytes:
            state = "free or inside another extent" if taken is None else f"handed out with {taken} bytes"
            raise ValueError(f"extent at {offset} with {nbytes} bytes: {state}")

    def _add_hole(self, offset: int, nbytes: int, *, touched: bool = False) -> None:
        self._holes[offset] = nbytes
        self._hole_ending[offset + nbytes] = offset
        self._by_size.add((nbytes, offset))
        if touched:
            self._touched.add(offset)

    def _remove_hole(self, offset: int) -> None:
        nbytes = self._holes.pop(offset)
        del self._hole_ending[offset + nbytes]
        self._by_size.remove((nbytes, offset))
        self._touched.discard(offset)


class Supposition:
    """What the holes of an allocator would be if some extents were free too. O(1) an extent.

    Good until the allocator changes. A tier asks it once per victim, which must not cost as much as
    all victims before that one.
    """

    def __init__(self, allocator: ExtentAllocator) -> None:
        self._allocator = allocator
        self._freed: set[int] = set()
        self._end_of: dict[int, int] = {}  # runs that would be free, by start
        self._start_of: dict[int, int] = {}  # and by end
        self.largest_free = allocator.largest_free
        self.used = allocator.used

    def free(self, offset: int, nbytes: int) -> None:
        """Suppose this extent free as well; ``ValueError`` when it is not handed out or supposed free already."""
        self._allocator.check_taken(offset, nbytes)
        if offset in self._freed:
            raise ValueError(f"extent at {offset} is named twice")
        self._freed.add(offset)
        self.used -= nbytes
        start, end = offset, offset + nbytes
        if start in self._start_of:
            start = self._start_of.pop(start)
            del self._end_of[start]
        else:
            hole = self._allocator.hole_ending_at(start)
            start = start if hole is None else hole
        if end in self._end_of:
            end = self._end_of.pop(end)
            del self._start_of[end]
        else:
            hole_end = self._allocator.hole_end(end)
            end = end if hole_end is None else hole_end
        self._end_of[start] = end
        self._start_of[end] = start
        self.largest_free = max(self.largest_free, end - start)
