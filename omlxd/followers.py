"""Connections that are told what happens, as parts of an answer that does not end by itself.

Events are gathered for a moment and sent together. A reader that is too slow loses events rather than the daemon
memory: it is told how many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from omlxd.protocol import Message

if TYPE_CHECKING:
    from omlxd.session import Session

GATHER_SECONDS = 0.05
MAX_PENDING = 10_000
MAX_PENDING_BYTES = 16 << 20
"""Events, and bytes in them, that are gathered for one follower."""
MAX_UNREAD_BYTES = 8 << 20
MAX_FOLLOWERS = 64
"""Of one kind."""


@dataclass(slots=True, eq=False)
class _Follower:
    session: Session
    request_id: int
    namespaces: frozenset[bytes] | None
    """Whose events; None: everybody's."""
    pending: list[Message] = field(default_factory=list)
    pending_bytes: int = 0
    lost: int = 0

    def take(self) -> Message:
        """What is pending, as a part of the answer."""
        part: Message = {"events": self.pending}
        if self.lost:
            part["lost"] = self.lost
        self.pending, self.pending_bytes, self.lost = [], 0, 0
        return part


class Followers:
    """All who follow one kind of event."""

    def __init__(self, *, on_none: Callable[[], None] = lambda: None) -> None:
        """``on_none`` is called when the last one has gone."""
        self._followers: list[_Follower] = []
        self._timer: asyncio.TimerHandle | None = None
        self._on_none = on_none

    def __len__(self) -> int:
        return len(self._followers)

    def add(
        self,
        session: Session,
        request_id: int,
        namespaces: frozenset[bytes] | None,
        *,
        greeting: Message,
        seconds: float | None = None,
    ) -> None:
        """Tell ``session`` from now on, as parts of the answer to its request, which ends after ``seconds``."""
        follower = _Follower(session, request_id, namespaces)
        self._followers.append(follower)
        session.more(request_id, {"events": [], **greeting})
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, self._finish, follower)

    def gone(self, session: Session) -> None:
        """``session`` has ended: nobody follows there any more."""
        for one in [one for one in self._followers if one.session is session]:
            self._remove(one)

    def publish(self, event: Message, namespace: bytes, nbytes: int = 0) -> None:
        """Something happened in ``namespace``; ``nbytes``: about how large the event is."""
        for one in self._followers:
            if one.namespaces is None or namespace in one.namespaces:
                if len(one.pending) < MAX_PENDING and one.pending_bytes + nbytes <= MAX_PENDING_BYTES:
                    one.pending.append(event)
                    one.pending_bytes += nbytes
                else:
                    one.lost += 1
        if self._followers and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_SECONDS, self._send)

    def _send(self) -> None:
        self._timer = None
        for one in list(self._followers):
            if one.session.queued > MAX_UNREAD_BYTES:
                one.lost += len(one.pending)
                one.pending, one.pending_bytes = [], 0
            elif one.pending or one.lost:
                one.session.more(one.request_id, one.take())

    def _finish(self, follower: _Follower) -> None:
        if follower in self._followers:
            self._remove(follower)
            follower.session.ok(follower.request_id, follower.take())

    def _remove(self, follower: _Follower) -> None:
        self._followers.remove(follower)
        if not self._followers:
            self._on_none()
