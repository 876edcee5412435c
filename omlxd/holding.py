"""What a connection holds in the daemon's memory: mapped segments, leases, slots being written; and whether that still counts.

Closing the socket tells the daemon that this process is done with its memory. So it stays open, whatever went wrong
with the conversation, until the last lease is given back and the last slot is written; also when the daemon has ended
the conversation, which waits for just that before it gives the memory to others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from omlxd.exits import ProcessWatch
from omlxd.protocol import Answer, Code, Message
from omlxd.storage.mapping import SegmentMap
from omlxd.warming import Warmer

if TYPE_CHECKING:
    from omlxd.leases import LeaseCore

EXIT_SECONDS = 0.25
"""A process that dies closes its sockets a moment before it counts as ended."""

LOOK_SECONDS = 50e-6
"""What was seen of the socket holds for so long: many views are asked for at once. Memory is not reused that fast."""


class Holding:
    """The memory side of a link, the same for the blocking and the asyncio client. Any thread may use it."""

    def __init__(self, *, release: Callable[[int], None], look: Callable[[], None], let_go: Callable[[], None]) -> None:
        """Say how to talk to the daemon.

        ``release`` tells it that a lease is over; ``look`` takes in what it has said meanwhile, without waiting; ``let_go``
        closes the socket. ``release`` and ``let_go`` may be called inside the garbage collector, and more than once.
        """
        self.segments = SegmentMap()
        self.warmer = Warmer(self.segments)
        self._release = release
        self._look = look
        self._let_go = let_go
        # No locks here: what is below runs inside the garbage collector too. Sets and dictionaries change in one step.
        self._leases: weakref.WeakValueDictionary[int, LeaseCore] = weakref.WeakValueDictionary()
        self._lingering: dict[int, LeaseCore] = {}
        self._writers: set[object] = set()
        self._daemon: ProcessWatch | None = None
        self._looked = 0.0
        self._cut: str | None = None
        self._kept = False
        self._leaving = False

    # -- what the link tells

    def greeted(self, daemon_pid: int) -> None:
        """The daemon is the process ``daemon_pid``."""
        self._daemon = ProcessWatch(daemon_pid)

    def take(self, answer: Answer, next_fd: Callable[[], int]) -> None:
        """Map the segments that came with ``answer``, forget those that went, end what was revoked.

        Raises LookupError when a descriptor is missing, ValueError or OSError when one can't be mapped.
        """
        for segment, nbytes in answer.fds:
            self.segments.add(segment, next_fd(), nbytes)
        if answer.id is None:
            self._told(answer.body)

    def _told(self, body: Message) -> None:
        for segment in body.get("dropped_segments", ()):
            self.segments.drop(segment)
        for lease_id in body.get("revoked", ()):
            lease = self._leases.get(lease_id)
            if lease is not None:
                lease.end("it was revoked by an operator")
        if body.get("code") == Code.SHUTTING_DOWN:
            self._kept = True  # a daemon that is about to end gives nobody memory any more

    def cut_off(self, reason: str) -> None:
        """The daemon has closed the connection, or has died."""
        self._cut = self._cut or reason
        self._go_if_done()

    def leave(self, reason: str = "") -> None:
        """The link is of no use any more: close it as soon as nothing is held through it.

        ``reason``: end its leases, for that reason; without one they go on for as long as the daemon leaves their memory alone.
        """
        self.warmer.stop()
        if reason:
            for lease in list(self._leases.values()):
                lease.end(reason)
        self._leaving = True
        self._go_if_done()

    def forget(self, reason: str) -> None:
        """Give up everything, tell nobody: in a child process that has inherited this."""
        self._cut = reason
        self._kept = False
        self._daemon = None
        self._leases.clear()
        self._lingering.clear()

    # -- what leases and stores ask

    def lost(self) -> str | None:
        """Why leased memory may be another's by now; None while it certainly is not."""
        if self._cut is None:
            now = monotonic()
            if now - self._looked < LOOK_SECONDS:
                return None
            self._look()
            self._looked = now
            if self._cut is None:
                return None
        if not self._kept and self._daemon is not None and self._daemon.ended(EXIT_SECONDS):
            self._kept = True  # nobody is left who could give it to others
        return None if self._kept else self._cut

    def add(self, lease: LeaseCore, lease_id: int) -> None:
        """A lease has got its id."""
        self._leases[lease_id] = lease

    def linger(self, lease: LeaseCore, lease_id: int) -> None:
        """The lease has ended, and something still reads through it."""
        self._lingering[lease_id] = lease

    def done(self, lease_id: int) -> None:
        """Nothing reads through this lease any more."""
        self._lingering.pop(lease_id, None)
        self._leases.pop(lease_id, None)
        self.warmer.forget_slots()
        if self._cut is None:
            self._release(lease_id)
        self._go_if_done()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Reserved slots are being written."""
        token = object()
        self._writers.add(token)
        try:
            yield
        finally:
            self._writers.discard(token)
            self._go_if_done()

    def _go_if_done(self) -> None:
        """Both calls below may be made twice, by two threads at once."""
        if self._leases or self._lingering or self._writers:
            return
        if self._leaving or self._cut is not None:
            self._let_go()
        if self._leaving:
            self.segments.close()
            if self._daemon is not None:
                self._daemon.close()
