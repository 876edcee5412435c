"""The engine's side of the shared memory: segments mapped by descriptor.

Loads go through a mapping that the kernel itself keeps read-only: a stray write of the engine
cannot reach another engine's blocks. Stores go through a second, writable mapping, made when the
first store into that segment needs it.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from omlxd.storage import pages

GRANULE_BYTES = 64 << 10
"""What is remembered as present, or not: a page would be more exact, and cost more than it saves."""


class SegmentMap:
    """The segments that one engine process has been given.

    A mapping lives as long as any view of it does: dropping a segment, closing the map, or the end
    of the daemon leave handed-out views readable. Descriptors belong to the map from ``add`` on.
    Any thread may look; one thread at a time adds and drops.
    """

    def __init__(self) -> None:
        self._segments: dict[int, _Mapped] = {}
        self.populated_bytes = 0
        """Bytes that ``populate`` made present, since the start."""
        self.unpopulated_calls = 0
        """``populate`` calls that did nothing, because this system cannot do it."""

    def add(self, segment_id: int, fd: int, nbytes: int) -> None:
        """Map ``nbytes`` of the segment behind ``fd``, and own ``fd``, also when this fails.

        Raises ``ValueError`` for a segment that is mapped already or a descriptor with fewer bytes
        (touching what is not there would kill the process), ``OSError`` when mapping fails.
        """
        try:
            if segment_id in self._segments:
                raise ValueError(f"segment {segment_id} is mapped already")
            if nbytes <= 0:
                raise ValueError(f"segment {segment_id} of {nbytes} bytes: nothing to map")
            behind = os.fstat(fd).st_size
            if behind < nbytes:
                raise ValueError(f"segment {segment_id}: {nbytes} bytes announced, {behind} behind the descriptor")
            self._segments[segment_id] = _Mapped(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise

    def drop(self, segment_id: int) -> None:
        """Forget a segment; views of it stay readable. Unknown ids are ignored: a drop may be announced twice."""
        mapped = self._segments.pop(segment_id, None)
        if mapped is not None:
            mapped.close()

    def __contains__(self, segment_id: int) -> bool:
        return segment_id in self._segments

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[int]:
        """Ids of the segments."""
        return iter(list(self._segments))

    def whole(self, segment: int) -> NDArray[np.uint8]:
        """Return a segment as a read-only array of its own, in place: it lives as long as anything that refers to it.

        Raises ``KeyError`` for an unknown segment.
        """
        return self._mapped(segment).whole()

    def view(self, segment: int, offset: int, nbytes: int) -> memoryview:
        """Return a read-only view of ``nbytes`` at ``offset``. Writing to it raises ``TypeError``.

        Raises ``KeyError`` for an unknown segment, ``ValueError`` for bytes outside it.
        """
        return self._mapped(segment).view(segment, offset, nbytes)

    def writable(self, segment: int, offset: int, nbytes: int) -> memoryview:
        """Return a writable view, for a store into a reserved slot; errors as in ``view``."""
        return self._mapped(segment).writable(segment, offset, nbytes)

    def absent(self, slots: Iterable[Sequence[int]], *, write: bool = False) -> list[Sequence[int]]:
        """Return those of ``slots`` (segment, offset, bytes) that ``populate`` has not been to, unmapped ones included."""
        found: list[Sequence[int]] = []
        segments = self._segments
        for slot in slots:
            segment, offset, nbytes = slot
            mapped = segments.get(segment)
            if mapped is None or not mapped.is_present(offset, nbytes, write):
                found.append(slot)
        return found

    def populate(self, segment: int, offset: int, nbytes: int, *, write: bool = False) -> bool:
        """Make the pages of a slot present in this process before they are needed. Releases the GIL.

        The first touch of a page costs a fault; one call for a whole slot is cheaper than a fault a
        page. False (and counted) where the system cannot do it; errors as in ``view``, and
        ``OSError`` when the memory is not there.
        """
        mapped = self._mapped(segment)
        first = offset // pages.PAGE_BYTES * pages.PAGE_BYTES
        end = offset + nbytes
        view = mapped.writable(segment, first, end - first) if write else self.view(segment, first, end - first)
        done = pages.populate(view, write=write)
        if done:
            mapped.note_present(offset, nbytes, write)
            self.populated_bytes += nbytes
        else:
            self.unpopulated_calls += 1
        return done

    def backed(self, segment: int) -> list[tuple[int, int]]:
        """Return ``(offset, bytes)`` of the runs that have memory behind them; nothing where the system does not say.

        Only these may be made present without taking more memory.
        """
        return self._mapped(segment).backed()

    def is_backed(self, segment: int, offset: int, nbytes: int) -> bool:
        """Tell whether all of these bytes have memory behind them now."""
        return self._mapped(segment).is_backed(offset, nbytes)

    def close(self) -> None:
        """Drop every segment."""
        for segment_id in self:
            self.drop(segment_id)

    def __enter__(self) -> SegmentMap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _mapped(self, segment: int) -> _Mapped:
        try:
            return self._segments[segment]
        except KeyError:
            raise KeyError(f"segment {segment} is not mapped; mapped are {sorted(self._segments)}") from None


class _Mapped:
    """One segment: its descriptor, and the two mappings.

    The mmap objects are never closed, only let go of: closing one while a view exists is an error,
    and the last view that goes unmaps it anyway.
    """

    __slots__ = ("_fd", "_lock", "_present", "_read", "_write", "nbytes")

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd = fd
        self._lock = threading.RLock()  # `close` may run inside the garbage collector, in a thread that holds it
        self._read: NDArray[np.uint8] = np.frombuffer(_map(fd, nbytes, mmap.ACCESS_READ), np.uint8)
        self._write: memoryview | None = None
        granules = -(-nbytes // GRANULE_BYTES)
        self._present = (bytearray(granules), bytearray(granules))  # for reading, for writing; a byte a granule

    def whole(self) -> NDArray[np.uint8]:
        return self._read[:]

    def view(self, segment: int, offset: int, nbytes: int) -> memoryview:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            self._refuse(segment, offset, nbytes)
        return memoryview(self._read)[offset : offset + nbytes]

    def writable(self, segment: int, offset: int, nbytes: int) -> memoryview:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            self._refuse(segment, offset, nbytes)
        if self._write is None:
            with self._lock:  # two threads may store for the first time at once
                if self._write is None:
                    if self._fd < 0:
                        raise KeyError(f"segment {segment} was dropped: it can be read, not written")
                    self._write = memoryview(_map(self._fd, self.nbytes, mmap.ACCESS_WRITE))
        return self._write[offset : offset + nbytes]

    def is_present(self, offset: int, nbytes: int, write: bool) -> bool:
        return self._present[write].find(0, offset // GRANULE_BYTES, -(-(offset + nbytes) // GRANULE_BYTES)) < 0

    def note_present(self, offset: int, nbytes: int, write: bool) -> None:
        # Granules at the edges are only partly present; their other pages fault when they are used, as any page does.
        first, last = offset // GRANULE_BYTES, -(-(offset + nbytes) // GRANULE_BYTES)
        self._present[write][first:last] = b"\1" * (last - first)

    def backed(self) -> list[tuple[int, int]]:
        runs: list[tuple[int, int]] = []
        end = 0
        with self._lock:
            if self._fd < 0 or not hasattr(os, "SEEK_DATA"):
                return []
            try:
                while end < self.nbytes:
                    start = os.lseek(self._fd, end, os.SEEK_DATA)
                    end = min(os.lseek(self._fd, start, os.SEEK_HOLE), self.nbytes)
                    runs.append((start, end - start))
            except OSError:  # ENXIO: there is no more; or memory of this kind does not tell
                pass
        return runs

    def is_backed(self, offset: int, nbytes: int) -> bool:
        with self._lock:
            if self._fd < 0 or not hasattr(os, "SEEK_DATA"):
                return False
            try:
                start = os.lseek(self._fd, offset, os.SEEK_DATA)
                return start == offset and os.lseek(self._fd, offset, os.SEEK_HOLE) >= offset + nbytes
            except OSError:
                return False

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _refuse(self, segment: int, offset: int, nbytes: int) -> None:
        raise ValueError(f"bytes {offset} to {offset + nbytes} are outside segment {segment}, which has {self.nbytes}")


def _map(fd: int, nbytes: int, access: int) -> mmap.mmap:
    mapped = mmap.mmap(fd, nbytes, access=access)
    pages.advise_huge(mapped)
    return mapped
