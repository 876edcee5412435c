"""Connections that follow what changes in the store: ``subscribe``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from omlxd.followers import Followers
from omlxd.storage.journal import Journal, StoreChange

if TYPE_CHECKING:
    from omlxd.session import Session


class Subscriptions:
    """All followers of one store."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._followers = Followers(on_none=self._stop)

    def __len__(self) -> int:
        return len(self._followers)

    def add(self, session: Session, request_id: int, namespaces: frozenset[bytes] | None) -> None:
        """Tell ``session`` from now on, as parts of the answer to its request."""
        if self._changed not in self._journal.listeners:
            self._journal.listeners.append(self._changed)
        self._followers.add(session, request_id, namespaces, greeting={"boot": session.server.boot})

    def gone(self, session: Session) -> None:
        """``session`` has ended."""
        self._followers.gone(session)

    def retired(self, namespace: bytes, why: str) -> None:
        """A namespace was retired."""
        self._followers.publish({"event": "retired", "namespace": namespace, "cause": why}, namespace)

    def _changed(self, change: StoreChange) -> None:
        event = asdict(change)
        event["bytes"] = event.pop("nbytes")
        self._followers.publish(event, change.namespace)

    def _stop(self) -> None:
        self._journal.listeners.remove(self._changed)
