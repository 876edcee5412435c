"""Leased blocks on the engine's side: views over shared memory that end with their lease."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from omlxd.errors import LeaseEnded
from omlxd.storage.layout import Layout

if TYPE_CHECKING:
    import mlx.core as mx

    from omlxd.storage.mapping import SegmentMap

Slot = Sequence[int]  # segment, offset in bytes, payload bytes


class LoadedBlock:
    """One block under a lease.

    ``view`` and what is made from it read the daemon's memory in place. When the lease ends, views are released: using
    one afterwards raises ``ValueError`` (Python's own, for a released memoryview), asking for a new one raises
    :class:`LeaseEnded`. Arrays and slices that still refer to the memory keep the block leased until they are collected.
    """

    __slots__ = ("_anchor", "_layout", "_lease", "_slot", "_view", "key", "start", "stop")

    def __init__(self, lease: LeaseCore, key: bytes, start: int, stop: int, slot: Slot, layout: Layout | None) -> None:
        self.key = key
        self.start = start
        self.stop = stop
        self._lease = lease
        self._slot = slot
        self._layout = layout
        self._view: memoryview | None = None
        self._anchor: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None

    def __repr__(self) -> str:
        return f"<LoadedBlock {self.key[:4].hex()} tokens {self.start}-{self.stop}, {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return self._slot[2]

    @property
    def layout(self) -> Layout | None:
        """How the payload splits into tensors; None in a namespace of raw bytes."""
        return self._layout

    @property
    def view(self) -> memoryview:
        """The payload, read-only, in place.

        Raises:
            LeaseEnded: the lease is over.
        """
        if self._view is None:
            self._lease.check()
            # Every view and slice that a user makes refers to the anchor, so that its end is the end of all of them.
            anchor = np.frombuffer(self._lease.segments.view(*self._slot), dtype=np.uint8)
            self._anchor = anchor
            self._view = memoryview(anchor)
        return self._view

    def arrays(self) -> list[mx.array | None]:
        """The payload's tensors as MLX arrays: no copy on Metal, one elsewhere.

        Raises:
            LeaseEnded: the lease is over, also when it ended while the bytes were being read.
            ValueError: the namespace has no layout.
        """
        if self._layout is None:
            raise ValueError("this namespace was made without a layout: use .view, or give one to Cache.namespace")
        result = self._layout.unpack(self.view)
        self._lease.check()
        return result

    def array(self) -> mx.array:
        """The payload as one flat ``uint8`` array."""
        from omlxd.storage import metal

        result = metal.adopt(self.view)
        self._lease.check()
        return result

    def _end(self, gone: Callable[[weakref.ref[object]], None]) -> weakref.ref[object] | None:
        """End the view; a reference to what is still in use, or None."""
        if self._view is not None:
            with contextlib.suppress(BufferError):  # an array reads it in place; the anchor says when that one is gone
                self._view.release()
            self._view = None
        if self._anchor is None:
            return None
        quiet = weakref.ref(self._anchor)
        self._anchor = None
        anchor = quiet()
        return weakref.ref(anchor, gone) if anchor is not None else None


class LeaseCore:
    """What blocking and asyncio leases share: the blocks so far, and how it ends.

    ``send_release`` is called once, from whatever thread ends the lease or collects the last array over it.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        block_tokens: int,
        layout: Layout | None,
        segments: SegmentMap,
        send_release: Callable[[int], None],
    ) -> None:
        self.keys = keys
        self.block_tokens = block_tokens
        self.blocks: list[LoadedBlock] = []
        self.segments = segments
        self.lease_id: int | None = None
        self.stopped: str | None = None
        """Why it holds fewer blocks than were asked for; None while more may come, or when all are there."""
        self.finished = False
        self._layout = layout
        self._send_release = send_release
        self._lock = threading.RLock()
        self._ended: str | None = None
        self._in_use: dict[int, weakref.ref[object]] = {}
        self._told = False
        self._swept = False

    @property
    def ended(self) -> bool:
        """Is it over?"""
        return self._ended is not None

    def check(self) -> None:
        """Raise LeaseEnded when it is over."""
        if self._ended is not None:
            raise LeaseEnded(f"the lease on this block has ended: {self._ended}; load the prefix again")

    def take(self, part: dict[str, object]) -> None:
        """Take one frame of the answer to ``load``."""
        lease_id = part.get("lease")
        if isinstance(lease_id, int):
            self.lease_id = lease_id
        slots = part.get("slots")
        layouts = part.get("layouts")
        own = layouts if isinstance(layouts, dict) else {}
        for slot in slots if isinstance(slots, list) else ():
            index = len(self.blocks)
            start = index * self.block_tokens
            raw = own.get(str(index))
            layout = Layout.from_bytes(raw) if isinstance(raw, bytes) else self._layout
            self.blocks.append(LoadedBlock(self, self.keys[index], start, start + self.block_tokens, slot, layout))
        stopped = part.get("stopped")
        if isinstance(stopped, str):
            self.stopped = stopped

    def end(self, reason: str, *, tell: bool = True) -> None:
        """End it: views are released, and the daemon is told as soon as nothing reads its memory any more."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = reason
            if not tell:
                self._told = True
            for block in self.blocks:
                reference = block._end(self._collected)
                if reference is not None:
                    self._in_use[id(reference)] = reference
            self._swept = True
            self._tell_if_unused()

    def _collected(self, reference: weakref.ref[object]) -> None:
        with self._lock:
            self._in_use.pop(id(reference), None)
            if self._swept:  # the collector may run in the middle of end()
                self._tell_if_unused()

    def _tell_if_unused(self) -> None:
        if not self._told and not self._in_use and self.lease_id is not None:
            self._told = True
            self._send_release(self.lease_id)
