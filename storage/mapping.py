"""The engine's side of the shared memory: segments mapped by descriptor.

Loads go through a mapping that the kernel itself keeps read-only: a stray write of the engine
cannot reach another engine's blocks. Stores go through a second, writable mapping, made when the
first store into that segment needs it.
"""

from __future__ import annotations

import mmap
import os
from types import TracebackType

from omlxd.storage import pages


class SegmentMap:
    """The segments that one engine process has been given. Not thread-safe: the client's lock guards it.

    A mapping lives as long as any view of it does: dropping a segment, closing the map, or the end
    of the daemon leave handed-out views readable. Descriptors belong to the map from ``add`` on.
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

    def view(self, segment: int, offset: int, nbytes: int) -> memoryview:
        """Return a read-only view of ``nbytes`` at ``offset``; writing to it raises ``TypeError``.

        Raises ``KeyError`` for an unknown segment, ``ValueError`` for bytes outside it.
        """
        return self._mapped(segment).readable(segment, offset, nbytes)

    def writable(self, segment: int, offset: int, nbytes: int) -> memoryview:
        """Return a writable view, for a store into a reserved slot; errors as in ``view``."""
        return self._mapped(segment).writable(segment, offset, nbytes)

    def populate(self, segment: int, offset: int, nbytes: int, *, write: bool = False) -> bool:
        """Make the pages of a slot present in this process before they are needed. Releases the GIL.

        The first touch of a page costs a fault; one call for a whole slot is cheaper than a fault a
        page. False (and counted) where the system cannot do it; errors as in ``view``, and
        ``OSError`` when the memory is not there.
        """
        mapped = self._mapped(segment)
        get = mapped.writable if write else mapped.readable
        first = offset // pages.PAGE_BYTES * pages.PAGE_BYTES
        done = pages.populate(get(segment, first, offset + nbytes - first), write=write)
        if done:
            self.populated_bytes += nbytes
        else:
            self.unpopulated_calls += 1
        return done

    def close(self) -> None:
        """Drop every segment."""
        for segment_id in list(self._segments):
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
    """One segment: its descriptor until both mappings exist, and the mappings.

    The mmap objects are never closed, only let go of: closing one while a view exists is an error,
    and the last view that goes unmaps it anyway.
    """

    __slots__ = ("_fd", "_read", "_write", "nbytes")

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd = fd
        self._read = memoryview(mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ))
        self._write: memoryview | None = None

    def readable(self, segment: int, offset: int, nbytes: int) -> memoryview:
        self._check(segment, offset, nbytes)
        return self._read[offset : offset + nbytes]

    def writable(self, segment: int, offset: int, nbytes: int) -> memoryview:
        self._check(segment, offset, nbytes)
        if self._write is None:
            self._write = memoryview(mmap.mmap(self._fd, self.nbytes, access=mmap.ACCESS_WRITE))
            self.close()  # each mmap object keeps a descriptor of its own
        return self._write[offset : offset + nbytes]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _check(self, segment: int, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(
                f"bytes {offset} to {offset + nbytes} are outside segment {segment}, which has {self.nbytes}"
            )
