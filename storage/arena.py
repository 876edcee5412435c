"""The daemon's side of the shared memory: segments under one budget, extents inside them.

A segment is anonymous shared memory behind a file descriptor, by which clients map it
(`segments.py`). Its pages exist once they are touched.

The segments together never pass the budget. After the budget was lowered they may, until enough is
freed. Then the arena hands out less, and gives memory back: empty segments always; where the system
can take single pages back (Linux), also every free extent, so that what is backed by memory is what
is used. Where it cannot (macOS), only whole segments help, and `to_vacate` names what is in the way.

Everything here belongs to the event loop's thread. Views may be read and written by any thread.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from omlxd.storage import pages
from omlxd.storage.extents import Supposition
from omlxd.storage.segments import Segment

__all__ = ["DEFAULT_SEGMENT_BYTES", "Arena", "Extent", "Segment", "Trial"]

log = logging.getLogger(__name__)

DEFAULT_SEGMENT_BYTES = 1 << 30
READY_BYTES = 16 << 20
"""What is made present ahead in one step."""
STEP_BYTES = 64 << 20
"""What is given back at most in one step: about 20 ms."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of whole pages inside one segment: where one block lives."""

    segment: int
    offset: int
    """Bytes from the start of the segment; a multiple of the page."""
    nbytes: int
    """Whole pages."""


class Arena:
    """Room for blocks in shared memory, at most ``budget`` bytes of it.

    ``segment_bytes`` is the usual size of a segment; the last one gets what the budget leaves, and
    a block that is larger gets a segment of its own. ``page_bytes`` (default: the system's page) is
    what extents are aligned and rounded to. ``punching`` (default: whether the system can) tells
    whether single pages are given back. Raises ``ValueError`` for sizes that cannot be.
    """

    def __init__(
        self,
        budget: int,
        *,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        page_bytes: int | None = None,
        punching: bool | None = None,
    ) -> None:
        self.page_bytes = pages.PAGE_BYTES if page_bytes is None else page_bytes
        if self.page_bytes <= 0 or self.page_bytes % pages.PAGE_BYTES:
            raise ValueError(f"page_bytes {page_bytes}: not a multiple of the system's page, {pages.PAGE_BYTES}")
        if segment_bytes <= 0:
            raise ValueError(f"segment_bytes {segment_bytes}: must be positive")
        self.segment_bytes = pages.round_up(segment_bytes, self.page_bytes)
        self.segments: dict[int, Segment] = {}
        self.segment_failures = 0
        """Segments that the system refused to create."""
        self._punching = pages.can_punch() if punching is None else punching
        self._budget = self._checked_budget(budget)
        self._reserved = 0
        self._used = 0
        self._asked: dict[Extent, int] = {}  # every extent handed out -> bytes asked for
        self._asked_bytes = 0
        self._ids = itertools.count(1)
        self._listeners: list[Callable[[Segment, bool], None]] = []

    @property
    def budget(self) -> int:
        """The limit in bytes."""
        return self._budget

    @property
    def reserved(self) -> int:
        """Sum of the segments' bytes; above the budget only after that was lowered."""
        return self._reserved

    @property
    def used(self) -> int:
        """Bytes in extents handed out, in whole pages."""
        return self._used

    @property
    def waste(self) -> int:
        """Bytes lost to rounding up to whole pages."""
        return self._used - self._asked_bytes

    @property
    def resident(self) -> int:
        """Bytes that the system backs with memory right now. One system call a segment."""
        return sum(segment.resident for segment in self.segments.values())

    def largest_free(self) -> int:
        """Return the most bytes that ``allocate`` can give without anything being freed."""
        return self.trial().largest_free()

    def stats(self) -> dict[str, int | float]:
        """Return the figures for people, in bytes.

        ``fragmentation`` is the share (0 to 1) of the free bytes inside the segments that is not in the largest hole.
        """
        free = self._reserved - self._used
        return {
            "budget": self._budget,
            "reserved": self._reserved,
            "used": self._used,
            "waste": self.waste,
            "resident": self.resident,
            "largest_free": self.largest_free(),
            "fragmentation": 1 - self._largest_hole() / free if free else 0.0,
            "extents": len(self._asked),
            "segments": len(self.segments),
            "segment_failures": self.segment_failures,
        }

    def on_segment(self, callback: Callable[[Segment, bool], None]) -> None:
        """Call ``callback(segment, True)`` when one is made, ``(segment, False)`` just before one goes."""
        self._listeners.append(callback)

    def allocate(self, nbytes: int) -> Extent | None:
        """Take room for ``nbytes`` (at least a page); None when there is none within the budget.

        Raises ``ValueError`` for a negative size.
        """
        size = self._rounded(nbytes)
        segment = self._best_segment(size) if size <= self._headroom(self._used, self._reserved) else None
        segment = segment or self._new_segment(size)
        offset = None if segment is None else segment.extents.allocate(size)
        if segment is None or offset is None:
            return None
        extent = Extent(segment.id, offset, size)
        self._asked[extent] = nbytes
        self._asked_bytes += nbytes
        self._used += size
        return extent

    def free(self, extent: Extent) -> None:
        """Give an extent back; ``ValueError`` when it is not handed out (a double free, another arena's)."""
        segment = self._segment_of(extent)
        self._asked_bytes -= self._asked.pop(extent)
        self._used -= extent.nbytes
        segment.extents.free(extent.offset, extent.nbytes)
        if self._reserved > self._budget:
            self._give_back()

    def view(self, extent: Extent, nbytes: int | None = None) -> memoryview:
        """Return a writable view of the first ``nbytes`` (default: all) of an extent.

        The view can be read and written for as long as it is referenced, whatever happens to the arena; once the extent is
        freed and its memory given back, it reads as zeros.
        Raises ``ValueError`` when the extent is not handed out or has fewer bytes.
        """
        segment = self._segment_of(extent)
        length = extent.nbytes if nbytes is None else nbytes
        if not 0 <= length <= extent.nbytes:
            raise ValueError(f"a view of {length} bytes: the extent has {extent.nbytes}")
        return segment.memory[extent.offset : extent.offset + length]

    def fits_after(self, extents_to_free: Iterable[Extent], nbytes: int) -> bool:
        """Tell whether ``nbytes`` would fit if these extents were freed first. Changes nothing.

        Raises ``ValueError`` for an extent that is not handed out.
        """
        trial = self.trial()
        for extent in extents_to_free:
            trial.free(extent)
        return trial.fits(nbytes)

    def trial(self) -> Trial:
        """Return a way to ask `fits_after` again and again while extents are added: once per victim, say."""
        return Trial(self)

    def release_empty(self) -> int:
        """Give every segment without an extent back to the system; returns their bytes."""
        return sum(self._release(segment) for segment in self._empty())

    def trim(self, max_bytes: int | None = None) -> int:
        """Give the memory of free extents back to the system, the segments stay; returns the bytes of the extents.

        Their next use starts with page faults. About 0.3 ms per MiB on the calling thread (without the
        GIL): ``max_bytes`` bounds one call, which trims at least one extent. Returns 0 where the system
        cannot do it (macOS).
        """
        if not self._punching:
            return 0
        trimmed = 0
        for segment in self.segments.values():
            for offset, nbytes in segment.extents.touched_holes():
                if max_bytes is not None and trimmed and trimmed + nbytes > max_bytes:
                    return trimmed
                pages.punch(segment.memory[offset : offset + nbytes])
                segment.extents.forget_touched(offset)
                if offset + nbytes == segment.nbytes:
                    segment.readied = min(segment.readied, offset)
                trimmed += nbytes
        return trimmed

    def resize(self, budget: int) -> int:
        """Change the budget; returns the bytes that have to be freed (evicted) until it holds, 0 when it does.

        Gives back at most ``STEP_BYTES`` of free memory by itself; `trim` does more, while ``gives_back`` says that there is.
        Raises ``ValueError`` for a negative budget and changes nothing.
        """
        self._budget = self._checked_budget(budget)
        return self._give_back() if self._reserved > self._budget else 0

    @property
    def gives_back(self) -> bool:
        """Is there free memory to be given back for a budget that was lowered?"""
        return (
            self._punching
            and self._reserved > self._budget
            and any(segment.extents.touched_holes() for segment in self.segments.values())
        )

    def take_cold(self, ahead: int) -> memoryview | None:
        """Return a run of memory that new blocks will get before long and that was never used, to be made present.

        A step of what is missing to ``ahead`` bytes behind the last block of a segment; None when nothing is, or the budget
        was lowered. Makes the first segment. Each run is returned once.
        """
        if self._reserved > self._budget or (not self.segments and self._new_segment(self.page_bytes) is None):
            return None
        for segment in self.segments.values():
            tail = segment.extents.hole_ending_at(segment.nbytes)
            if tail is None:
                continue
            start = max(tail, segment.readied)
            end = min(tail + ahead, segment.nbytes, start + READY_BYTES) // self.page_bytes * self.page_bytes
            if start < end:
                segment.readied = end
                segment.extents.suspect(tail)
                return segment.memory[start:end]
        return None

    def look_for_strays(self) -> None:
        """Find memory behind free extents: an engine that touches what it does not hold any more takes it back from the system.

        Does nothing while the budget holds. What is found is given back by `trim`.
        """
        if self._punching and self._reserved > self._budget and not self.gives_back and self.resident > self._used:
            for segment in self.segments.values():
                segment.extents.suspect_all()

    def to_vacate(self) -> list[Extent]:
        """Return what must be freed so that whole segments can go and the budget holds, fewest bytes first.

        Empty while the budget holds, and where single pages can be given back: there any extent helps.
        """
        over = self._reserved - self._budget
        if over <= 0 or self._punching:
            return []
        chosen: set[int] = set()
        for segment in sorted(self.segments.values(), key=lambda s: (s.used / s.nbytes, s.id)):
            if over <= 0:
                break
            chosen.add(segment.id)
            over -= segment.nbytes
        return [extent for extent in self._asked if extent.segment in chosen]

    def close(self) -> None:
        """Let go of every segment; views in use stay valid. Extents are handed out no more."""
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
        self._asked.clear()
        self._budget = self._reserved = self._used = self._asked_bytes = 0

    def _segment_of(self, extent: Extent) -> Segment:
        if extent not in self._asked:
            raise ValueError(f"{extent} is not handed out by this arena")
        return self.segments[extent.segment]

    def _rounded(self, nbytes: int) -> int:
        if nbytes < 0:
            raise ValueError(f"a block of {nbytes} bytes: it cannot be negative")
        return pages.round_up(max(nbytes, 1), self.page_bytes)

    def _largest_hole(self) -> int:
        return max((segment.extents.largest_free for segment in self.segments.values()), default=0)

    def _empty(self) -> list[Segment]:
        return [segment for segment in self.segments.values() if not segment.used]

    def _room(self, released: int = 0) -> int:
        """Bytes that a new segment could have if segments of so many bytes were released first."""
        room = self._budget - self._reserved + released
        return max(0, room // self.page_bytes * self.page_bytes)

    def _headroom(self, used: int, reserved: int) -> int:
        """Bytes of holes that may be handed out: all, unless the segments pass a lowered budget."""
        if reserved <= self._budget:
            return reserved - used
        return self._budget - used if self._punching else 0

    def _best_segment(self, size: int) -> Segment | None:
        best: Segment | None = None
        best_hole = 0
        for segment in self.segments.values():
            hole = segment.extents.best_fit(size)
            if hole is not None and (best is None or hole < best_hole):
                best, best_hole = segment, hole
        return best

    def _new_segment(self, size: int) -> Segment | None:
        empty = self._empty()
        if self._room(sum(segment.nbytes for segment in empty)) < size:
            return None
        for segment in sorted(empty, key=lambda s: s.nbytes):
            if self._room() >= size:
                break
            self._release(segment)
        nbytes = size if size > self.segment_bytes else min(self.segment_bytes, self._room())
        try:
            made = Segment(next(self._ids), nbytes)
        except OSError as error:
            self.segment_failures += 1
            log.warning("no shared memory segment of %d bytes: %s", nbytes, error)
            return None
        self.segments[made.id] = made
        self._reserved += nbytes
        self._tell(made, added=True)
        return made

    def _give_back(self) -> int:
        """Bring the segments towards the budget, in bounded time; returns the bytes that are still in the way."""
        if self._punching:
            self.trim(STEP_BYTES)
        for segment in sorted(self._empty(), key=lambda s: -s.nbytes):
            if self._reserved > self._budget and not (self._punching and segment.extents.touched_holes()):
                self._release(segment)
        if self._reserved <= self._budget:
            return 0
        if not self._punching:
            return self._reserved - self._budget
        return max(0, self._used - self._budget)

    def _release(self, segment: Segment) -> int:
        if self._punching:  # engines may have it mapped for long; what they map would not go back by itself
            for offset, nbytes in segment.extents.touched_holes():
                pages.punch(segment.memory[offset : offset + nbytes])
        self._tell(segment, added=False)
        del self.segments[segment.id]
        self._reserved -= segment.nbytes
        segment.close()
        return segment.nbytes

    def _tell(self, segment: Segment, *, added: bool) -> None:
        for callback in self._listeners:
            callback(segment, added)

    @staticmethod
    def _checked_budget(budget: int) -> int:
        if budget < 0:
            raise ValueError(f"a budget of {budget} bytes: it cannot be negative")
        return budget


class Trial:
    """What would fit if some extents were freed; changes nothing. Good until the arena changes.

    O(1) an extent and a question, and once O(segments); O(segments) a question while the segments
    pass a lowered budget.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._supposed: dict[int, Supposition] = {}
        self._used = arena.used
        self._hole = arena._largest_hole()
        self._emptied_bytes = sum(segment.nbytes for segment in arena._empty())

    def free(self, extent: Extent) -> None:
        """Suppose this extent free; ``ValueError`` when it is not handed out, or supposed free already."""
        segment = self._arena._segment_of(extent)
        supposed = self._supposed.get(extent.segment)
        if supposed is None:
            supposed = self._supposed[extent.segment] = Supposition(segment.extents)
        supposed.free(extent.offset, extent.nbytes)
        self._used -= extent.nbytes
        self._hole = max(self._hole, supposed.largest_free)
        if not supposed.used:
            self._emptied_bytes += segment.nbytes

    def fits(self, nbytes: int) -> bool:
        """Tell whether `allocate(nbytes)` would find room; ``ValueError`` for a negative size."""
        return self._arena._rounded(nbytes) <= self.largest_free()

    def largest_free(self) -> int:
        """Return the most bytes that one `allocate` would get."""
        arena = self._arena
        hole, reserved = self._hole, arena.reserved
        if reserved > arena.budget:  # emptied segments go at once, with their holes
            reserved -= self._emptied_bytes
            states = (self._supposed.get(segment.id, segment.extents) for segment in arena.segments.values())
            hole = max((state.largest_free for state in states if state.used), default=0)
        return max(arena._room(self._emptied_bytes), min(hole, arena._headroom(self._used, reserved)))
