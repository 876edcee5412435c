"""Making slots present in this process ahead of the copy, in a thread of its own.

The first touch of shared memory costs a fault a page, about as much as copying the page. A thread that asks the kernel
for whole runs, without the GIL, keeps ahead of whoever copies.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omlxd.storage.mapping import SegmentMap

STEP_BYTES = 4 << 20
"""What one call to the kernel makes present: what is urgent waits no longer than that."""
WORTHWHILE_BYTES = 256 << 10
"""Less than this is left to the faults: starting a thread costs as much."""
AHEAD_BYTES = 4 << 30
"""How much of what was there before this client came is made present for it: at most 8 MiB of page tables."""

Run = tuple[int, int, int, bool, bool]  # segment, offset, bytes, for writing, held by this process


class Warmer:
    """Slots that are about to be used first, then what else is there. There is no thread while there is nothing to do."""

    def __init__(self, segments: SegmentMap) -> None:
        self._segments = segments
        self._urgent: deque[Run] = deque()
        self._ahead: deque[Run] = deque()
        self._lock = threading.Lock()
        self._running = False
        self._stopped = False

    def soon(self, slots: Sequence[Sequence[int]], *, write: bool) -> None:
        """``slots`` (segment, offset, bytes) are about to be read or written, in this order."""
        cold = self._segments.absent(slots, write=write)
        if cold and sum(nbytes for _, _, nbytes in cold) >= WORTHWHILE_BYTES:
            self._add(self._urgent, (run for slot in cold for run in _steps(slot, write, held=True)))

    def ahead(self, segments: Iterable[int]) -> None:
        """What has memory behind it in these segments may be read before long."""
        left = AHEAD_BYTES
        for segment in segments:
            for offset, nbytes in self._segments.backed(segment):
                self._add(self._ahead, _steps((segment, offset, min(nbytes, left)), False, held=False))
                left -= nbytes
                if left <= 0:
                    return

    def forget_slots(self) -> None:
        """A lease has ended: its slots may be given back to the system, and to touch them would take memory again."""
        self._urgent.clear()  # without the lock: leases end inside the garbage collector, in a thread that may hold it

    def stop(self) -> None:
        """Do no more."""
        with self._lock:
            self._stopped = True
            self._urgent.clear()
            self._ahead.clear()

    def _add(self, queue: deque[Run], runs: Iterable[Run]) -> None:
        with self._lock:
            if self._stopped:
                return
            queue.extend(runs)
            if self._running or not queue:
                return
            self._running = True
        _thread.start_new_thread(self._run, ())  # threading.Thread would wait until it runs

    def _run(self) -> None:
        while (run := self._next()) is not None:
            segment, offset, nbytes, write, held = run
            if not self._segments.absent([(segment, offset, nbytes)], write=write):
                continue
            try:
                if not held and not self._segments.is_backed(segment, offset, nbytes):
                    continue
                able = self._segments.populate(segment, offset, nbytes, write=write)
            except (KeyError, ValueError, OSError):  # dropped meanwhile, or no memory: whoever uses it will find out
                continue
            if not able:
                self.stop()

    def _next(self) -> Run | None:
        with self._lock:
            for queue in (self._urgent, self._ahead):
                with contextlib.suppress(IndexError):  # it may be cleared at any moment
                    return queue.popleft()
            self._running = False
            return None


def _steps(slot: Sequence[int], write: bool, *, held: bool) -> Iterator[Run]:
    segment, offset, nbytes = slot
    for start in range(offset, offset + nbytes, STEP_BYTES):
        yield segment, start, min(STEP_BYTES, offset + nbytes - start), write, held
