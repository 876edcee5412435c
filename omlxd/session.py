"""One client of the daemon: what it has been given, and how it is answered."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from omlxd.chains import Chains
from omlxd.connection import Connection
from omlxd.fields import Fields
from omlxd.peer import Peer
from omlxd.protocol import Code, Message, ProtocolError, Request, RequestError, ServerSide
from omlxd.storage.ram import RamBlock
from omlxd.storage.tiers import UnknownId
from omlxd.verbs import VERBS

if TYPE_CHECKING:
    from omlxd.namespaces import NamespaceInfo
    from omlxd.server import Server

log = logging.getLogger(__name__)

FDS_PER_FRAME = 32


class Session:
    """A connection, greeted or not. Owner of leases and reservations in the store."""

    def __init__(self, server: Server, sock: socket.socket, peer: Peer, number: int) -> None:
        self.server = server
        self.peer = peer
        self.number = number
        self.name = f"pid {peer.pid}"
        self.since = time.time()
        self.namespaces: list[NamespaceInfo] = []
        self.requests = 0
        self.looked_up: bytes | None = None
        """The last key of the chain that was looked up last: its misses are counted."""
        self.chains = Chains()
        """What it is in the middle of storing."""
        self._known_segments: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._protocol = ServerSide(server.settings.max_frame, server.settings.max_open_requests)
        self._connection = Connection(
            sock, asyncio.get_running_loop(), self._received, self._closed, server.settings.max_queued
        )

    def __str__(self) -> str:
        """``client 66 (omlxd command, pid 2596)``."""
        pid = f"pid {self.peer.pid}"
        return f"client {self.number} ({pid if self.name == pid else f'{self.name}, {pid}'})"

    @property
    def is_ours(self) -> bool:
        """Is it a command of this program? They come and go, and change nothing by that."""
        return self.name.startswith("omlxd ")

    @property
    def closed(self) -> bool:
        """Has the connection ended?"""
        return self._connection.closed

    @property
    def queued(self) -> int:
        """Bytes that the client has not read yet."""
        return self._connection.queued

    def namespace(self, fields: Fields) -> NamespaceInfo:
        """The namespace that a request names by the number it has on this connection."""
        if not self.namespaces:
            raise RequestError(
                Code.UNKNOWN_NAMESPACE, "no namespace is registered on this connection: send 'namespace' first"
            )
        return self.namespaces[fields.integer("ns", 0, len(self.namespaces) - 1)]

    def greeted(self) -> None:
        """``hello`` succeeded."""
        self._protocol.greeted = True

    # -- answering

    def ok(self, request_id: int, result: Message, blocks: Sequence[RamBlock] = ()) -> None:
        """The last frame of an answer. ``blocks``: what it refers to; unknown segments' descriptors go with it."""
        self.ok_with_segments(request_id, result, _segments_of(blocks))

    def ok_with_segments(self, request_id: int, result: Message, segments: Iterable[int]) -> None:
        """As ``ok``; the descriptors of these segments go with it, where the client has not got them."""
        pairs, fds = self._new_segments(request_id, segments)
        self._connection.send(self._protocol.ok(request_id, result, pairs), fds)

    def more(self, request_id: int, part: Message, blocks: Sequence[RamBlock] = ()) -> None:
        """A part of an answer."""
        pairs, fds = self._new_segments(request_id, _segments_of(blocks))
        self._connection.send(self._protocol.more(request_id, part, pairs), fds)

    def error(self, request_id: int, code: Code, message: str) -> None:
        """Refuse a request."""
        self.server.counts[f"refused_{code}"] += 1
        self._connection.send(self._protocol.error(request_id, code, message))

    def tell(self, event: Message) -> None:
        """Say something that the client did not ask for."""
        self._connection.send(self._protocol.event(event))

    def segment_dropped(self, segment: int) -> None:
        """A segment is no more: the client lets go of it, or its memory would not go back to the system."""
        if segment in self._known_segments:
            self._known_segments.discard(segment)
            self.tell({"dropped_segments": [segment]})

    def close(self, reason: str, code: Code | None = None) -> None:
        """End the connection; with ``code`` the client is told why."""
        if code is None:
            self._connection.close(reason)
        else:
            self._connection.finish(self._protocol.farewell(ProtocolError(code, reason)), reason)

    def let_go(self) -> None:
        """The client is of no interest any more."""
        self._connection.let_go()

    @property
    def uses_nothing(self) -> bool:
        """Has the client closed its socket, and so said that it does not use the daemon's memory any more?"""
        return self._connection.peer_has_let_go

    @property
    def hung_up(self) -> bool:
        """Has the client ended the connection, rather than the daemon? It then does not use the memory any more."""
        return self._connection.hung_up

    def _new_segments(self, request_id: int, of: Iterable[int]) -> tuple[list[tuple[int, int]], list[int]]:
        new = set(of) - self._known_segments
        if not new:
            return [], []
        self._known_segments |= new
        segments = self.server.store.ram.arena.segments
        pairs: list[tuple[int, int]] = []
        fds: list[int] = []
        for segment_id in sorted(new):
            if len(fds) == FDS_PER_FRAME:
                self._connection.send(self._protocol.more(request_id, {}, pairs), fds)
                pairs, fds = [], []
            segment = segments[segment_id]
            pairs.append((segment_id, segment.nbytes))
            fds.append(os.dup(segment.fd))
        return pairs, fds

    # -- being asked

    def _received(self, data: memoryview, fds: list[int]) -> None:
        for fd in fds:  # no verb takes descriptors
            os.close(fd)
        try:
            for item in self._protocol.feed(data):
                if isinstance(item, Request):
                    self._handle(item)
                else:
                    self._connection.send(item)
                if self._connection.closed:
                    return
        except ProtocolError as error:
            self.server.counts["bad_frames"] += 1
            log.warning("%s is cut off: %s", self, error)
            self._connection.finish(self._protocol.farewell(error), str(error))

    def _handle(self, request: Request) -> None:
        self.requests += 1
        verb = VERBS.get(request.verb)
        if verb is None:
            known = ", ".join(sorted(VERBS))
            self.error(request.id, Code.UNKNOWN_VERB, f"verb {request.verb[:40]!r} is unknown; known: {known}")
            return
        try:
            result = verb(self, Fields(request.fields), request.id)
        except Exception as error:
            self._refuse(request, error)
            return
        if result is None:
            return  # the verb answers by itself
        if inspect.iscoroutine(result):
            task = asyncio.get_running_loop().create_task(self._finish(request, result))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            assert isinstance(result, dict)
            self.ok(request.id, result)

    async def _finish(self, request: Request, result: object) -> None:
        try:
            answer = await result  # type: ignore[misc]
        except Exception as error:
            self._refuse(request, error)
            return
        if answer is not None:
            self.ok(request.id, answer)

    def _refuse(self, request: Request, error: Exception) -> None:
        if isinstance(error, RequestError):
            self.error(request.id, error.code, str(error))
        elif isinstance(error, UnknownId):
            code = Code.UNKNOWN_LEASE if request.verb == "release" else Code.UNKNOWN_RESERVATION
            self.error(request.id, code, str(error))
        else:
            self.server.counts["internal_errors"] += 1
            log.exception("%s of %s failed", request.verb, self, exc_info=error)
            self.error(
                request.id, Code.INTERNAL, f"{request.verb} failed in the daemon: {type(error).__name__}: {error}"
            )

    def _closed(self, reason: str) -> None:
        for task in self._tasks:
            task.cancel()
        self.server.session_closed(self, reason)


def _segments_of(blocks: Sequence[RamBlock]) -> set[int]:
    return {block.extent.segment for block in blocks if block.extent is not None}
