"""The daemon's socket: who is let in, and what ends with whom."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omlxd import explain_verbs, keeping_verbs, operator_verbs, ssd_verbs, store_verbs
from omlxd.exits import ProcessWatch
from omlxd.history import History
from omlxd.namespaces import NamespaceInfo, Namespaces
from omlxd.peer import peer_of
from omlxd.pins import Pins
from omlxd.protocol import MAX_FRAME_BYTES, Code, ProtocolError, RequestError, ServerSide
from omlxd.recorder import Recorder
from omlxd.report import About, Reporter
from omlxd.session import Session
from omlxd.storage import upkeep
from omlxd.storage.arena import Segment
from omlxd.storage.ssd import SsdTier
from omlxd.storage.ssd_index import SpaceTotals
from omlxd.storage.tiers import Store
from omlxd.subscriptions import Subscriptions

if TYPE_CHECKING:
    from omlxd.live import Live
    from omlxd.models import ModelFolders

log = logging.getLogger(__name__)

VANISHED_SECONDS = 0.1
"""How often it is looked whether a client that was cut off still uses memory."""

ACCEPT_AGAIN_SECONDS = 1.0
"""How long newcomers wait when the system gives no descriptor for one."""

assert operator_verbs  # importing them registers their verbs
assert explain_verbs
assert keeping_verbs
assert ssd_verbs
assert store_verbs


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits of connections."""

    max_frame: int = MAX_FRAME_BYTES
    max_open_requests: int = 256
    max_queued: int = 128 << 20
    """Bytes that are kept for a client that does not read."""
    max_sessions: int = 512
    max_namespaces: int = 256
    group: int | None = None
    """Group id whose members may connect besides the owner."""


class Server:
    """Accepts clients on listening sockets and keeps their sessions."""

    def __init__(
        self,
        store: Store,
        settings: ServerSettings,
        *,
        on_shutdown: Callable[[], None],
        about: About | None = None,
        uid: int | None = None,
    ) -> None:
        """``on_shutdown`` is called when a client asks the daemon to end; ``uid`` is who may connect (default: our own)."""
        self.store = store
        self.settings = settings
        self.namespaces = Namespaces()
        self.counts: Counter[str] = Counter()
        self.boot = uuid.uuid4().hex
        self.pid = os.getpid()
        self.started = time.time()
        self.sessions: dict[int, Session] = {}
        self.reporter = Reporter(self, about or About())
        self.pins = Pins(store)
        self.subscriptions = Subscriptions(store.journal)
        self.recorder = Recorder()
        self.history = History(store.journal)
        self.live: Live | None = None
        self.models: ModelFolders | None = None
        self.on_shutdown = on_shutdown
        store.ram.arena.on_segment(self._segment_changed)
        self._uid = os.getuid() if uid is None else uid
        self._listening: list[socket.socket] = []
        self._next = 1

    def listen(self, sockets: list[socket.socket]) -> None:
        """Accept clients on these listening sockets."""
        loop = asyncio.get_running_loop()
        for sock in sockets:
            sock.setblocking(False)
            loop.add_reader(sock.fileno(), self._accept, sock)
            self._listening.append(sock)

    def stop_listening(self) -> None:
        """Accept nobody any more."""
        loop = asyncio.get_running_loop()
        for sock in self._listening:
            loop.remove_reader(sock.fileno())
            sock.close()
        self._listening.clear()

    def close_sessions(self, reason: str) -> None:
        """End all connections, for good: clients are told that what they have leased stays as it is."""
        for session in list(self.sessions.values()):
            session.close(reason, Code.SHUTTING_DOWN)

    def refuse_when_closing(self) -> None:
        """Raise RequestError when the daemon is about to end."""
        if self.store.closing:
            raise RequestError(Code.SHUTTING_DOWN, "the daemon is shutting down: compute, and connect again later")

    def register_namespace(self, descriptor: object, model_path: str | None = None) -> NamespaceInfo:
        """Know a namespace from now on, over restarts too. ``model_path``: the folder that its weights came from."""
        info = self.namespaces.add(descriptor)
        if info.retired:
            info.retired = ""
            if self.store.ssd is not None:
                self.store.ssd.retire(info.id, False)
        if model_path is not None:
            info.model_path = model_path
        self.write_down(info)
        if self.live is not None:
            self.live.apply_rules_to(info)
        if self.models is not None:
            self.models.registered(info)
        return info

    def write_down(self, info: NamespaceInfo) -> None:
        """Remember a namespace over restarts."""
        self.store.register_namespace(info.id, info.record())

    def retire(self, info: NamespaceInfo, why: str) -> None:
        """Let the blocks of a namespace leave first; what is on the SSD too leaves RAM now."""
        info.retired = why
        self.write_down(info)
        if self.store.ssd is not None:
            self.store.ssd.retire(info.id, True)
        upkeep.drop_clean(self.store, info.id)
        self.subscriptions.retired(info.id, why)
        log.info("namespace %s of %s is retired: %s", info.id.hex()[:8], info.model, why)

    def adopt_namespaces(self) -> None:
        """Know the namespaces that the SSD tier has kept."""
        if self.store.ssd is not None:
            for space in self.store.ssd.namespaces():
                if space.descriptor:
                    self._adopt(space)

    def _adopt(self, space: SpaceTotals) -> None:
        info = self.namespaces.add(dict(space.descriptor))
        info.recall(space.descriptor)
        if why := space.descriptor.get("retired"):
            self.retire(info, str(why))

    def attach_ssd(self, tier: SsdTier) -> None:
        """Use an SSD tier that was opened while clients were served already: what they registered goes there as well."""
        served = list(self.namespaces)
        self.store.adopt_ssd(tier)
        for space in tier.namespaces():
            if space.descriptor and all(info.id != space.id for info in served):
                self._adopt(space)
        for info in served:
            self.write_down(info)
            if info.retired:
                tier.retire(info.id, True)
        if self.live is not None:
            for info in self.namespaces:
                self.live.apply_rules_to(info)

    def _segment_changed(self, segment: Segment, added: bool) -> None:
        if not added:
            # Telling a client can end its session, and that gives back what it held: not in the middle of making room.
            asyncio.get_running_loop().call_soon(self._tell_dropped, segment.id)

    def _tell_dropped(self, segment: int) -> None:
        for session in list(self.sessions.values()):
            session.segment_dropped(segment)

    def session_closed(self, session: Session, reason: str) -> None:
        """Release all that a client held."""
        self.sessions.pop(session.number, None)
        self.subscriptions.gone(session)
        self.recorder.gone(session)
        log.log(logging.DEBUG if session.is_ours else logging.INFO, "%s has gone: %s", session, reason)
        # The process may live on with the memory mapped. One that hung up by itself does not read there any more; whether
        # it writes is not taken on trust for a while. One that was cut off may not even know: it may have been stopped in
        # the middle of writing, and go on at any time.
        process = ProcessWatch(session.peer.pid)
        lives = not process.ended()
        give_back = self.store.owner_gone(
            session,
            may_still_write=lives,
            may_still_read=lives and not session.hung_up,
            seconds=self.store.settings.seize_seconds if session.hung_up else None,
        )
        if session.hung_up or give_back is None:
            session.let_go()
        if give_back is None:
            process.close()
        elif session.hung_up:
            process.call_when_ended(asyncio.get_running_loop(), give_back, self.store.settings.seize_seconds)
        else:
            log.warning("what %s was using is kept from others until it has closed its socket or ended", session)
            self._give_back_when_done(session, process, give_back)

    def _give_back_when_done(self, session: Session, process: ProcessWatch, give_back: Callable[[], None]) -> None:
        if process.ended() or session.uses_nothing:
            process.close()
            session.let_go()
            give_back()
        else:
            asyncio.get_running_loop().call_later(
                VANISHED_SECONDS, self._give_back_when_done, session, process, give_back
            )

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(16):
            try:
                sock, _ = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.counts["accept_failed"] += 1
                log.error("a client could not be accepted: %s; tried again in %.0f s", error, ACCEPT_AGAIN_SECONDS)
                # It goes on waiting, and the loop would call for it without end.
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening.fileno())
                loop.call_later(ACCEPT_AGAIN_SECONDS, self._accept_again, listening)
                return
            self._admit(sock)

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._listening:
            asyncio.get_running_loop().add_reader(listening.fileno(), self._accept, listening)

    def _admit(self, sock: socket.socket) -> None:
        try:
            peer = peer_of(sock)
        except OSError as error:
            log.warning("a client is refused: the system does not say who it is (%s)", error)
            sock.close()
            return
        allowed = peer.uid in (self._uid, 0) or self.settings.group in (peer.gid, *_groups_of(peer.uid))
        if not allowed or len(self.sessions) >= self.settings.max_sessions:
            why = "too_many_clients" if allowed else "foreign_user"
            self.counts[f"refused_{why}"] += 1
            log.warning("a client (pid %d, uid %d) is refused: %s", peer.pid, peer.uid, why)
            reason = (
                f"{len(self.sessions)} clients are connected, the most that may be"
                if allowed
                else "this daemon is another user's"
            )
            with sock, contextlib.suppress(OSError):  # a new socket's buffer takes it at once
                sock.setblocking(False)
                sock.send(ServerSide.farewell(ProtocolError(Code.TOO_MANY if allowed else Code.REFUSED, reason)))
            return
        session = Session(self, sock, peer, self._next)
        self.sessions[self._next] = session
        self._next += 1
        self.counts["accepted"] += 1


def _groups_of(uid: int) -> list[int]:
    import grp
    import pwd

    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return []
    return [user.pw_gid, *(g.gr_gid for g in grp.getgrall() if user.pw_name in g.gr_mem)]
