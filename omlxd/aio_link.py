"""One connection of an event loop to a daemon: any number of requests may be under way. Loop's thread only."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import threading
import time
from collections import deque

from omlxd.connection import Connection
from omlxd.errors import Refused, Unavailable
from omlxd.holding import Holding
from omlxd.link import CALL_SECONDS, NEWCOMER_SECONDS, NotYet, greeting, limits_of
from omlxd.operations import Limits, undo
from omlxd.protocol import Answer, ClientSide, Message, ProtocolError, RequestError


class AsyncCall:
    """An open request: the frames of its answer that have come and were not taken yet."""

    __slots__ = ("abandoned", "frames", "id", "waiter")

    def __init__(self, call_id: int) -> None:
        self.id = call_id
        self.frames: deque[Answer] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self.abandoned = False
        """Does nobody wait for it any more? What the daemon gives in answer is then given back."""

    def wake(self) -> None:
        """There is a frame, or there will be none."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class AsyncLink:
    """A connection. Dead once anything went wrong: make a new one. What was leased through it stays leased."""

    limits: Limits

    def __init__(self, path: str, sock: socket.socket, *, name: str) -> None:
        self.path = path
        self.handles: dict[bytes, int] = {}
        """Namespace id to the number that this connection has for it."""
        self.chains = itertools.count()
        """Numbers for chains that are stored in several requests."""
        self.holding = Holding(release=self._release_lease, look=self._look, let_go=self._let_go)
        self.dead: str | None = None
        """Why it can't be used any more; None while it can."""
        self.hung = False
        """Did it die because the daemon did not answer in time (rather than hang up)?"""
        self._protocol = ClientSide()
        self._calls: dict[int, AsyncCall] = {}
        self._fds: deque[int] = deque()
        self._heard = time.monotonic()
        self._garbled = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._connection = Connection(sock, self._loop, self._received, self._closed, half_closes=False)
        self._hello = self.begin("hello", greeting(name))

    @classmethod
    async def connect(cls, path: str, *, name: str, timeout: float = CALL_SECONDS) -> AsyncLink:
        """Connect, and send the greeting. Raises Unavailable when nobody listens at ``path``."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        sock.connect(path)
                        break
                    except BlockingIOError:  # its queue of newcomers is full
                        await asyncio.sleep(NEWCOMER_SECONDS)
        except (OSError, TimeoutError) as error:
            sock.close()
            why = getattr(error, "strerror", None) or error or "it takes no connections"
            raise Unavailable(f"no daemon listens at {path}: {why}; start one with 'omlxd serve'") from None
        except BaseException:
            sock.close()
            raise
        return cls(path, sock, name=name)

    async def greet(self, timeout: float) -> None:
        """Wait for the answer to the greeting. Raises NotYet (may be called again), Unavailable, Refused."""
        while True:
            if not self._hello.frames and self.dead is None and not await self._frame_comes(self._hello, timeout):
                raise NotYet(f"the daemon at {self.path} takes connections and does not answer: is it stopped?")
            try:
                answer = await self.next(self._hello, CALL_SECONDS)
            except Refused:
                self.close("refused")
                raise
            if answer.kind == "ok":
                break
        self.limits = limits_of(answer.body)
        self._protocol.max_frame = self.limits.max_frame
        self.holding.greeted(self.limits.pid)

    async def ask(self, verb: str, fields: Message, timeout: float = CALL_SECONDS) -> Message:
        """Ask and wait at most ``timeout`` seconds for the whole answer. Raises Refused, Unavailable."""
        call = self.begin(verb, fields)
        deadline = time.monotonic() + timeout
        try:
            while (answer := await self.next(call, deadline - time.monotonic())).kind == "more":
                pass
        except BaseException:
            self.abandon(call)
            raise
        return answer.body

    def begin(self, verb: str, fields: Message) -> AsyncCall:
        """Send a request; its answer is taken with :meth:`next`."""
        if self.dead is not None:
            raise Unavailable(self.dead)
        try:
            call_id, frame = self._protocol.request(verb, fields)
        except RequestError as error:  # the daemon would say the same
            raise Refused(error.code, str(error)) from None
        call = self._calls[call_id] = AsyncCall(call_id)
        self._connection.send(frame)
        return call

    async def next(self, call: AsyncCall, timeout: float) -> Answer:
        """The next frame of the answer. Raises as :meth:`ask` does."""
        begun = time.monotonic()
        if not call.frames:
            if self.dead is not None:
                raise Unavailable(self.dead)
            if not await self._frame_comes(call, timeout):
                reason = f"the daemon at {self.path} did not answer within {timeout:.1f} s"
                if self._heard <= begun:  # it has said nothing at all since
                    self.hung = True
                    self._die(reason)
                raise Unavailable(reason)
            if not call.frames:
                raise Unavailable(self.dead or "the daemon has gone")
        answer = call.frames.popleft()
        if answer.kind == "err":
            raise Refused(answer.body.get("code", "?"), answer.body.get("message", "?"))
        return answer

    def abandon(self, call: AsyncCall) -> None:
        """Nobody waits for ``call`` any more: what it is given is given back."""
        call.abandoned = True
        while call.frames:
            self._undo(call.frames.popleft())

    def tell(self, verb: str, fields: Message) -> None:
        """Send a request whose answer nobody waits for. Any thread; inside the garbage collector, too."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the connection with it
            self._loop.call_soon_threadsafe(self._send, verb, fields)

    def close(self, reason: str) -> None:
        """End it, and its leases. What arrays still read keeps the socket open, until they are collected."""
        self._die(reason)
        self.holding.leave(reason)

    def retire(self) -> None:
        """It is dead: let go of the socket when nothing is leased through it any more."""
        self.holding.leave()

    # -- inside

    async def _frame_comes(self, call: AsyncCall, timeout: float) -> bool:
        """Wait for a frame, or the link's end; False when neither comes in time."""
        call.waiter = self._loop.create_future()
        try:
            async with asyncio.timeout(max(0.0, timeout)):
                await call.waiter
        except TimeoutError:
            return bool(call.frames)
        finally:
            call.waiter = None
        return True

    def _send(self, verb: str, fields: Message) -> None:
        _, frame = self._protocol.request(verb, fields)
        self._connection.send(frame)

    def _release_lease(self, lease_id: int) -> None:
        self.tell("release", {"lease": lease_id})

    def _look(self) -> None:
        """Take in what is there. Elsewhere than on the loop's thread the loop is trusted to have done so."""
        if threading.get_ident() == self._thread:
            self._connection.receive()

    def _let_go(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._connection.let_go)

    def _die(self, reason: str) -> None:
        if self.dead is None:
            self.dead = reason
        for call in self._calls.values():
            call.wake()

    def _received(self, data: memoryview, fds: list[int]) -> None:
        self._heard = time.monotonic()
        self._fds.extend(fds)
        if self._garbled:
            return
        try:
            for answer in self._protocol.feed(data):
                self._dispatch(answer)
        except (ProtocolError, LookupError, ValueError, OSError) as error:
            self._garbled = True
            self._die(f"what listens at {self.path} does not speak omlxd's protocol: {error}")

    def _dispatch(self, answer: Answer) -> None:
        self.holding.take(answer, self._fds.popleft)
        if answer.id is None:
            if answer.kind == "err":
                reason = f"the daemon ended the connection: {answer.body.get('message')}"
                self.holding.cut_off(reason)
                self._die(reason)
            return
        call = self._calls.get(answer.id)
        if call is None:
            return  # told, not asked
        if answer.kind != "more":
            del self._calls[answer.id]
        if call.abandoned:
            self._undo(answer)
            return
        call.frames.append(answer)
        call.wake()

    def _undo(self, answer: Answer) -> None:
        request = undo(answer.body) if answer.kind != "err" else None
        if request is not None:
            self.tell(*request)

    def _closed(self, reason: str) -> None:
        reason = f"the daemon at {self.path} has gone: {reason}"
        self.holding.cut_off(self.dead or reason)
        self._die(reason)
        while self._fds:
            os.close(self._fds.popleft())
