"""Connections that follow what changes: ``subscribe``.

Events are gathered for a moment and sent together. A reader that is too slow loses events rather than memory: it is
told how many, and can list the store again.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from omlxd.protocol import Message
from omlxd.storage.journal import Journal, StoreChange

if TYPE_CHECKING:
    from omlxd.session import Session

GATHER_SECONDS = 0.05
MAX_PENDING = 10_000
MAX_UNREAD_BYTES = 8 << 20


@dataclass(slots=True, eq=False)
class _Subscription:
    session: Session
    request_id: int
    namespaces: frozenset[bytes] | None
    """Whose changes; None: everybody's."""
    pending: list[Message] = field(default_factory=list)
    lost: int = 0


class Subscriptions:
    """All followers of one store."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._subscriptions: list[_Subscription] = []
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._subscriptions)

    def add(self, session: Session, request_id: int, namespaces: frozenset[bytes] | None) -> None:
        """Tell ``session`` from now on, as parts of the answer to its request."""
        if not self._subscriptions:
            self._journal.listeners.append(self._changed)
        self._subscriptions.append(_Subscription(session, request_id, namespaces))
        session.more(request_id, {"events": [], "boot": session.server.boot})

    def retired(self, namespace: bytes, why: str) -> None:
        """A namespace was retired."""
        self._publish({"event": "retired", "namespace": namespace, "cause": why}, namespace)

    def _changed(self, change: StoreChange) -> None:
        event = asdict(change)
        event["bytes"] = event.pop("nbytes")
        self._publish(event, change.namespace)

    def _publish(self, event: Message, namespace: bytes) -> None:
        for one in self._subscriptions:
            if one.namespaces is None or namespace in one.namespaces:
                if len(one.pending) < MAX_PENDING:
                    one.pending.append(event)
                else:
                    one.lost += 1
        if self._subscriptions and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_SECONDS, self._send)

    def _send(self) -> None:
        self._timer = None
        for one in list(self._subscriptions):
            if one.session.closed:
                self._subscriptions.remove(one)
            elif one.session.queued > MAX_UNREAD_BYTES:
                one.lost += len(one.pending)
                one.pending.clear()
            elif one.pending or one.lost:
                part: Message = {"events": one.pending}
                if one.lost:
                    part["lost"] = one.lost
                one.session.more(one.request_id, part)
                one.pending, one.lost = [], 0
        if not self._subscriptions and self._changed in self._journal.listeners:
            self._journal.listeners.remove(self._changed)
