"""Leased blocks on the engine's side: views over shared memory that end with their lease."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from omlxd.errors import LeaseEnded, Refused, Unavailable
from omlxd.storage.layout import Layout

if TYPE_CHECKING:
    import mlx.core as mx

    from omlxd.holding import Holding
    from omlxd.operations import SpaceCore
    from omlxd.protocol import Answer

C = TypeVar("C", contravariant=True)
Slot = Sequence[int]  # segment, offset in bytes, payload bytes


class LoadedBlock:
    """One block under a lease.

    ``view`` and what is made from it read the daemon's memory in place. When the lease ends, views are released: using
    one afterwards raises ``ValueError`` (Python's own, for a released memoryview), asking for a new one raises
    :class:`LeaseEnded`. Arrays and slices that still refer to the memory keep the block leased until they are collected.

    A lease may end while its bytes are being copied: an operator revokes it, the daemon cuts the connection. ``arrays``
    notices that; who copies from ``view`` calls ``Lease.check`` afterwards.
    """

    __slots__ = ("_lease", "index")

    def __init__(self, lease: LeaseCore, index: int) -> None:
        self.index = index
        """Its place among the blocks that were asked for."""
        self._lease = lease

    def __repr__(self) -> str:
        return f"<LoadedBlock {self.key[:4].hex()} tokens {self.start}-{self.stop}, {self.nbytes} bytes>"

    @property
    def key(self) -> bytes:
        """The block's chain hash."""
        return self._lease.keys[self.index]

    @property
    def start(self) -> int:
        """Its first token's place in the prompt."""
        return self.index * self._lease.block_tokens

    @property
    def stop(self) -> int:
        """One past its last token's place."""
        return (self.index + 1) * self._lease.block_tokens

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return self._lease.slots[self.index][2]

    @property
    def layout(self) -> Layout | None:
        """How the payload splits into tensors; None in a namespace of raw bytes."""
        return self._lease.layout_of(self.index)

    @property
    def view(self) -> memoryview:
        """The payload, read-only, in place.

        Raises:
            LeaseEnded: the lease is over.
        """
        return self._lease.view(self.index)

    def arrays(self) -> list[mx.array | None]:
        """The payload's tensors as MLX arrays: no copy on Metal, one elsewhere.

        Raises:
            LeaseEnded: the lease is over, also when it ended while the bytes were being read.
            ValueError: the namespace has no layout.
        """
        layout = self.layout
        if layout is None:
            raise ValueError("this namespace was made without a layout: use .view, or give one to Cache.namespace")
        result = layout.unpack(self.view)
        self._lease.check()
        return result

    def array(self) -> mx.array:
        """The payload as one flat ``uint8`` array."""
        from omlxd.storage import metal

        result = metal.adopt(self.view)
        self._lease.check()
        return result


class LeaseCore:
    """What blocking and asyncio leases share: the blocks so far, and how it ends.

    Blocks refer to their lease, the lease to none of them: one that is dropped without a release ends as soon as nobody
    has it, or a block of it, any more, also where the garbage collector is off. What still reads then is left to read.
    """

    def __init__(self, keys: Sequence[bytes], block_tokens: int, layout: Layout | None, holding: Holding) -> None:
        self.keys = keys
        self.block_tokens = block_tokens
        self.slots: list[Slot] = []
        self.holding = holding
        self.lease_id: int | None = None
        self.stopped: str | None = None
        """Why it holds fewer blocks than were asked for; None while more may come, or when all are there."""
        self.finished = False
        """Has everything come that will?"""
        self._layout = layout
        self._own_layouts: dict[int, Layout] = {}
        self._views: dict[int, memoryview] = {}
        self._windows: dict[int, memoryview] = {}
        """By segment: the whole of it, over an array of this lease's own. Every view, slice and array that a user makes
        refers to that array, so that its end is the end of all of them."""
        # No blocking locks: a lease may be ended, or its last array collected, inside the garbage collector. These two
        # are flags that exactly one thread gets to set.
        self._ending = threading.Lock()
        self._telling = threading.Lock()
        self._ended: str | None = None
        self._in_use: dict[int, weakref.ref[object]] = {}
        self._swept = False

    def __len__(self) -> int:
        """Blocks that have come so far."""
        return len(self.slots)

    def __del__(self) -> None:
        if self._ended is None and self.lease_id is not None:
            self._end("it was dropped", release=False)

    @property
    def blocks(self) -> list[LoadedBlock]:
        """The blocks that have come so far, head to tail."""
        return [LoadedBlock(self, index) for index in range(len(self.slots))]

    def layout_of(self, index: int) -> Layout | None:
        """How the payload of a block splits into tensors."""
        return self._own_layouts.get(index, self._layout)

    def view(self, index: int) -> memoryview:
        """A block's payload, read-only, in place; LeaseEnded when the lease is over."""
        self.check()
        view = self._views.get(index)
        if view is None:
            view = self._views.setdefault(index, self._slice(*self.slots[index]))
        if self._ended is not None:  # ended in another thread, meanwhile, which did not see this view
            view.release()
            self.check()
        return view

    def _slice(self, segment: int, offset: int, nbytes: int) -> memoryview:
        window = self._windows.get(segment)
        if window is None:
            window = self._windows.setdefault(segment, memoryview(self.holding.segments.whole(segment)))
        try:
            view = window[offset : offset + nbytes]
        except ValueError:  # released in another thread: the lease has ended
            self.check()
            raise
        if len(view) != nbytes or offset < 0:
            raise ValueError(
                f"a slot of {nbytes} bytes at {offset} is outside segment {segment}, which has {len(window)}"
            )
        return view

    @property
    def tokens(self) -> int:
        """Tokens that the blocks which have come so far cover."""
        return len(self.slots) * self.block_tokens

    @property
    def ended(self) -> bool:
        """Is it over?"""
        return self._ended is not None

    def check(self) -> None:
        """Raise LeaseEnded when it is over: released, revoked, or the daemon has cut the connection and goes on living."""
        lost = self.holding.lost()
        if lost is not None:
            self.end(lost)
        elif self._ended is None:
            return
        raise LeaseEnded(f"the lease on this block has ended: {self._ended}; load the prefix again")

    def end(self, reason: str) -> None:
        """End it: views are released, and the daemon is told as soon as nothing reads its memory any more."""
        self._end(reason, release=True)

    def _end(self, reason: str, *, release: bool) -> None:
        if not self._ending.acquire(blocking=False):
            return
        self._ended = reason
        if release:
            for view in list(self._views.values()):
                try:  # noqa: SIM105 - suppress() takes longer than all the rest here
                    view.release()
                except BufferError:  # an array reads it in place; the window's array says when that one is gone
                    pass
        self._views.clear()
        for window in list(self._windows.values()):
            self._let_go(window)
        self._windows.clear()
        if self._in_use and self.lease_id is not None:
            self.holding.linger(self, self.lease_id)
        self._swept = True
        self._tell_if_unused()

    def _let_go(self, window: memoryview) -> None:
        """Let go of a segment, and note whether anything still refers to it through this lease."""
        quiet: weakref.ref[object] = weakref.ref(window.obj)
        window.release()
        anchor: object = quiet()
        if anchor is not None:
            reference = weakref.ref(anchor, self._collected)
            self._in_use[id(reference)] = reference
            del anchor
            if reference() is None:  # collected before it was noted
                self._in_use.pop(id(reference), None)

    def take(self, part: dict[str, object]) -> None:
        """Take one frame of the answer to ``load``."""
        lease_id = part.get("lease")
        if isinstance(lease_id, int) and self.lease_id is None:
            self.lease_id = lease_id
            self.holding.add(self, lease_id)
        if self._ended is not None:  # while this part was on its way
            self._tell_if_unused()
            return
        slots = part.get("slots")
        layouts = part.get("layouts")
        if isinstance(slots, list):
            self.slots += slots
            self.holding.warmer.soon(slots, write=False)
        if isinstance(layouts, dict):
            for index, raw in layouts.items():
                self._own_layouts[int(index)] = Layout.from_bytes(raw)
        stopped = part.get("stopped")
        if isinstance(stopped, str):
            self.stopped = stopped

    def _collected(self, reference: weakref.ref[object]) -> None:
        self._in_use.pop(id(reference), None)
        if self._swept:  # else end() is at work, and looks itself
            self._tell_if_unused()

    def _tell_if_unused(self) -> None:
        if not self._in_use and self.lease_id is not None and self._telling.acquire(blocking=False):
            self.holding.done(self.lease_id)


class Answering(Protocol[C]):
    """What a lease needs of the connection that it came over."""

    @property
    def holding(self) -> Holding: ...  # noqa: D102
    def abandon(self, call: C) -> None: ...  # noqa: D102


class LinkedLease(LeaseCore, Generic[C]):
    """A lease that fills from the answer to a ``load``; both clients' leases only differ in how they wait for it."""

    def __init__(self, link: Answering[C], keys: Sequence[bytes], space: SpaceCore, seconds: float) -> None:
        """``seconds``: how long all of the answer may take."""
        super().__init__(keys, space.block_tokens, space.layout, link.holding)
        self._abandon = link.abandon
        self._deadline = monotonic() + seconds
        self._call: C | None = None

    def release(self) -> None:
        """End the lease. A second release does nothing."""
        self.end("it was released")

    def end(self, reason: str) -> None:
        """End it, for ``reason``; what is still on its way is given back."""
        call, self._call = self._call, None
        if call is not None:
            self.finished = True
            if self.lease_id is None:
                self._abandon(call)
        super().end(reason)

    def _seconds_left(self) -> float:
        return self._deadline - monotonic()

    def _answered(self, answer: Answer) -> None:
        self.take(answer.body)
        if answer.kind == "ok":
            self.finished = True
            self._call = None

    def _failed(self, call: C, error: Refused | Unavailable) -> None:
        """No more comes. Raises ``error`` where nothing has come so far."""
        self._call = None
        self.finished = True
        if isinstance(error, Refused):
            raise error
        # What has come is mapped here and stays as it is.
        self._abandon(call)
        self.stopped = str(error)
        if not self.slots:
            raise error
