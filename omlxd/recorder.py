"""Connections that record what engines ask and store: ``record``. The daemon writes no file; its client does.

While nobody records, all that it costs is a look at ``on``. Events are maps with ``event`` and what all have: ``at``
(seconds, of the daemon's own clock), ``session``, ``namespace``, ``block_tokens``, ``keys`` (a chain, head to tail, back to
back); and

- ``lookup``: ``found``, the length of the prefix that is there;
- ``load``: ``blocks``, how many leading ones the engine got, and ``prefill_tokens_per_s`` where it told;
- ``store``: ``first``, from where on the chain was offered;
- ``touch``: the engine used its own copy.

``block_bytes`` is the (mean) payload of a block, where blocks were seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omlxd.followers import Followers
from omlxd.protocol import Message

if TYPE_CHECKING:
    from omlxd.namespaces import NamespaceInfo
    from omlxd.session import Session

EVENT_BYTES = 128
"""What an event takes beside its keys, about."""


class Recorder:
    """Tells those who record. Lives on the event loop's thread."""

    def __init__(self) -> None:
        self._followers = Followers()

    def __len__(self) -> int:
        return len(self._followers)

    @property
    def on(self) -> bool:
        """Does anybody record?"""
        return len(self._followers) > 0

    def add(
        self, session: Session, request_id: int, namespaces: frozenset[bytes] | None, *, seconds: float | None
    ) -> None:
        """Tell ``session`` from now on, as parts of the answer to its request, which ends after ``seconds``."""
        self._followers.add(session, request_id, namespaces, greeting={"boot": session.server.boot}, seconds=seconds)

    def gone(self, session: Session) -> None:
        """``session`` has ended."""
        self._followers.gone(session)

    def looked_up(self, session: Session, info: NamespaceInfo, keys: bytes, found: int) -> None:
        """A prefix was looked for."""
        self._tell("lookup", session, info, keys, {"found": found})

    def loaded(
        self,
        session: Session,
        info: NamespaceInfo,
        keys: bytes,
        blocks: int,
        *,
        block_bytes: int | None,
        prefill_tokens_per_s: float | None = None,
    ) -> None:
        """A load is finished."""
        more: Message = {"blocks": blocks}
        if block_bytes is not None:
            more["block_bytes"] = block_bytes
        if prefill_tokens_per_s is not None:
            more["prefill_tokens_per_s"] = prefill_tokens_per_s
        self._tell("load", session, info, keys, more)

    def stored(self, session: Session, info: NamespaceInfo, keys: bytes, first: int, sizes: list[int]) -> None:
        """The blocks of a chain from ``first`` on were offered; ``sizes`` are their payload bytes."""
        if sizes:
            self._tell("store", session, info, keys, {"first": first, "block_bytes": sum(sizes) // len(sizes)})

    def touched(self, session: Session, info: NamespaceInfo, keys: bytes) -> None:
        """An engine used its own copy."""
        self._tell("touch", session, info, keys, {})

    def _tell(self, event: str, session: Session, info: NamespaceInfo, keys: bytes, more: Message) -> None:
        message: Message = {
            "event": event,
            "at": session.server.store.now(),
            "session": session.number,
            "namespace": info.id,
            "block_tokens": info.block_tokens,
            "keys": keys,
            **more,
        }
        self._followers.publish(message, info.id, len(keys) + EVENT_BYTES)
