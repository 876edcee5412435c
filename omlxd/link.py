"""One blocking connection to a daemon, shared by any number of threads.

There is no reader thread: whichever thread waits for an answer reads, and hands what belongs to others to them. A lone
caller so pays for one ``send``, one ``poll`` and one ``recv``, nothing else; that is what a lookup costs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from functools import cache
from typing import NoReturn, Protocol

from omlxd.descriptors import READ_BYTES, receive_into
from omlxd.errors import Refused, Unavailable
from omlxd.holding import Holding
from omlxd.operations import Limits, undo
from omlxd.protocol import MIN_VERSION, VERSION, Answer, ClientSide, Message, ProtocolError, RequestError

CALL_SECONDS = 5.0
"""How long a client waits for an answer that needs no work of the daemon before it takes it for dead."""

NEWCOMER_SECONDS = 0.005
"""How often a daemon whose queue of newcomers is full is tried."""

ENDED: int = getattr(select, "POLLRDHUP", 0)
"""What a poll says of a peer that sends no more."""

FRESH_SECONDS = 0.02
"""A daemon that has said something so lately is taken to be there: none ends and starts again that fast."""


class Call:
    """An open request: the frames of its answer that have come and were not taken yet."""

    __slots__ = ("abandoned", "frames", "id")

    def __init__(self, call_id: int) -> None:
        self.id = call_id
        self.frames: deque[Answer] = deque()
        self.abandoned = False
        """Does nobody wait for it any more? What the daemon gives in answer is then given back."""


class NotYet(Unavailable):
    """The daemon has not answered the greeting so far; it may still."""


def greeting(name: str) -> Message:
    """The fields of ``hello``."""
    return {"versions": [MIN_VERSION, VERSION], "client": name, "pid": os.getpid()}


def limits_of(answer: Message) -> Limits:
    """What the daemon's ``hello`` says."""
    return Limits(
        boot=answer["boot"],
        pid=answer["pid"],
        max_frame=answer["max_frame"],
        max_reserve=answer["max_reserve"],
        version=answer["version"],
        capabilities=frozenset(answer.get("capabilities", ())),
    )


class Link:
    """A connection. Thread-safe. Dead once anything went wrong: make a new one.

    What was leased through it stays leased, and its socket open, until it is given back; see `holding.py`.
    """

    limits: Limits

    def __init__(self, path: str, *, name: str, timeout: float = CALL_SECONDS) -> None:
        """Connect, and send the greeting; it can be used when :meth:`greet` has returned.

        Raises:
            Unavailable: nobody listens at ``path``.
            NotYet: its queue of newcomers is full for ``timeout`` seconds.
        """
        self.path = path
        self.handles: dict[bytes, int] = {}
        """Namespace id to the number that this connection has for it."""
        self.chains = itertools.count()
        """Numbers for chains that are stored in several requests."""
        self.holding = Holding(release=self._release_lease, look=self._look, let_go=self._close_socket)
        self._protocol = ClientSide()
        self._calls: dict[int, Call] = {}
        self._fds: deque[int] = deque()
        self._later: deque[tuple[str, Message]] = deque()
        self._dead: str | None = None
        self.hung = False
        """Did it die because the daemon did not answer in time (rather than hang up)?"""
        self._garbled = False
        """Does what comes in make no sense any more?"""
        self._mute = False
        """Is half a frame out, so that nothing more may be sent?"""
        self._heard = time.monotonic()
        self._buffer = bytearray(READ_BYTES)
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._arrived = threading.Condition()
        self._waiting = 0
        self._sock = _connected(path, timeout)
        self._poll_in = select.poll()
        self._poll_in.register(self._sock, select.POLLIN)
        self._poll_out = select.poll()
        self._poll_out.register(self._sock, select.POLLOUT | ENDED)
        forgotten_in_children().add(self)
        self._hello = self.begin("hello", greeting(name), timeout)

    def greet(self, timeout: float) -> None:
        """Wait for the answer to the greeting.

        Raises:
            NotYet: it has not come within ``timeout`` seconds; may be called again.
            Unavailable: the daemon has gone.
            Refused: the daemon speaks no version that this client speaks.
        """
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            if not self._hello.frames and self._dead is None and not self._poll_in.poll(left * 1e3):
                raise NotYet(f"the daemon at {self.path} takes connections and does not answer: is it stopped?")
            try:
                answer = self.next(self._hello, CALL_SECONDS)
            except Refused:
                self.close("refused")
                raise
            if answer.kind == "ok":
                break
        self.limits = limits_of(answer.body)
        self._protocol.max_frame = self.limits.max_frame
        self.holding.greeted(self.limits.pid)

    @property
    def dead(self) -> str | None:
        """Why it can't be used any more; None while it can."""
        return self._dead

    def check_alive(self) -> bool:
        """False when the daemon has closed it meanwhile. Costs a system call, but not right after an answer."""
        if self._dead is None and time.monotonic() - self._heard > FRESH_SECONDS:
            self._look()
        return self._dead is None

    # -- asking

    def ask(self, verb: str, fields: Message, timeout: float = CALL_SECONDS) -> Message:
        """Ask and wait at most ``timeout`` seconds for the whole answer.

        Raises:
            Refused: the daemon refuses.
            Unavailable: it has gone, or does not answer in time (the link is dead then, unless others get answers).
        """
        call = self.begin(verb, fields, timeout)
        deadline = time.monotonic() + timeout
        try:
            while (answer := self.next(call, deadline - time.monotonic())).kind == "more":
                pass
        except BaseException:
            self.abandon(call)
            raise
        return answer.body

    def begin(self, verb: str, fields: Message, timeout: float = CALL_SECONDS) -> Call:
        """Send a request; its answer is taken with :meth:`next`."""
        if self._dead is not None:
            raise Unavailable(self._dead)
        with self._sending:
            if self._dead is not None:
                raise Unavailable(self._dead)
            try:
                call_id, frame = self._protocol.request(verb, fields)
            except RequestError as error:  # the daemon would say the same
                raise Refused(error.code, str(error)) from None
            call = Call(call_id)
            self._calls[call_id] = call
            self._send(frame, time.monotonic() + timeout)
        if self._later:
            self._send_later()
        return call

    def abandon(self, call: Call) -> None:
        """Nobody waits for ``call`` any more: what it is given is given back. Never raises, never waits."""
        call.abandoned = True
        while call.frames:  # came, and was not taken
            self._undo(call.frames.popleft())

    def next(self, call: Call, timeout: float) -> Answer:
        """The next frame of the answer. Raises as :meth:`ask` does."""
        begun = time.monotonic()
        deadline = begun + timeout
        while not call.frames:
            if self._dead is not None:
                raise Unavailable(self._dead)
            if self._reading.acquire(blocking=False):
                try:
                    while not call.frames and self._dead is None:
                        if not self._poll_in.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                            break
                        self._receive()
                finally:
                    self._reading.release()
                    if self._waiting:
                        with self._arrived:
                            self._arrived.notify_all()
            else:
                self._wait_for_reader(call, deadline)
            if not call.frames and self._dead is None and time.monotonic() >= deadline:
                self._late(begun, timeout)
        answer = call.frames.popleft()
        if answer.kind == "err":
            raise Refused(answer.body.get("code", "?"), answer.body.get("message", "?"))
        return answer

    def tell(self, verb: str, fields: Message) -> None:
        """Send a request whose answer nobody waits for.

        Never raises, never waits for a lock: it may run inside the garbage collector, in a thread that is sending.
        """
        self._later.append((verb, fields))
        self._send_later()

    def close(self, reason: str = "closed by its owner") -> None:
        """End it, and its leases. What arrays still read keeps the socket open, until they are collected."""
        if self._dead is None:
            self._dead = reason
        self.holding.leave(reason)

    def retire(self) -> None:
        """It is dead: let go of the socket when nothing is leased through it any more."""
        self.holding.leave()

    # -- inside

    def _wait_for_reader(self, call: Call, deadline: float) -> None:
        """Another thread reads: wait until it has something, or stops reading."""
        with self._arrived:
            self._waiting += 1
            try:
                # The reader looks at _waiting after it has let go of the lock, and notifies under this condition: either
                # it is still reading here, and will notify, or it sees us, or the lock is free.
                if not call.frames and self._dead is None and self._reading.locked():
                    self._arrived.wait(max(0.0, deadline - time.monotonic()))
            finally:
                self._waiting -= 1

    def _late(self, begun: float, timeout: float) -> NoReturn:
        """An answer is overdue. When the daemon has said nothing at all since it was asked, the link is given up."""
        reason = f"the daemon at {self.path} did not answer within {timeout:.1f} s"
        if self._heard > begun:
            raise Unavailable(reason)
        self._fail(reason, hung=True)

    def _send_later(self) -> None:
        while self._later and self._sending.acquire(blocking=False):
            # Who fails to get the lock leaves its request to the holder, which looks again after letting go.
            try:
                with contextlib.suppress(IndexError, Unavailable, OSError):
                    while True:
                        _, frame = self._protocol.request(*self._later.popleft())
                        self._send(frame, time.monotonic() + CALL_SECONDS)
            finally:
                self._sending.release()

    def _release_lease(self, lease_id: int) -> None:
        self.tell("release", {"lease": lease_id})

    def _fail(self, reason: str, *, hung: bool = False) -> NoReturn:
        """The conversation is over. The socket stays for those who hold leases; they are told by `holding` what they are worth."""
        if self._dead is None:
            self._dead = reason
            self.hung = hung
        if self._waiting:
            with self._arrived:
                self._arrived.notify_all()
        raise Unavailable(self._dead)

    def _cut_off(self, error: OSError | None = None) -> NoReturn:
        why = f": {error.strerror or error}" if error is not None else ""
        reason = f"the daemon at {self.path} has gone{why}"
        self.holding.cut_off(self._dead or reason)
        self._fail(reason)

    def _send(self, frame: bytes, deadline: float) -> None:
        view = memoryview(frame)
        if self._mute:
            raise Unavailable(self._dead or "half a request was sent")
        while view:
            try:
                view = view[self._sock.send(view) :]
            except (BlockingIOError, InterruptedError):
                ready = self._poll_out.poll(max(0.0, deadline - time.monotonic()) * 1e3)
                if not ready:
                    self._mute = len(view) < len(frame)
                    self._fail(f"the daemon at {self.path} takes no data", hung=True)
                if ready[0][1] & ENDED:
                    self._mute = len(view) < len(frame)
                    self._look()  # it may have said why
                    self._fail(f"the daemon at {self.path} has ended the connection")
            except OSError as error:
                self._look()  # it may have said why
                if self._dead is not None:
                    self.holding.cut_off(self._dead)
                    raise Unavailable(self._dead) from None
                self._cut_off(error)

    def _look(self) -> None:
        """Take in what is there, without waiting. Never raises."""
        if self._reading.acquire(blocking=False):
            try:
                while self._poll_in.poll(0):
                    self._receive()
            except Unavailable:
                pass
            finally:
                self._reading.release()
            if self._waiting:
                with self._arrived:
                    self._arrived.notify_all()

    def _receive(self) -> None:
        """Read what is there; the reading lock is held."""
        try:
            count, fds = receive_into(self._sock, self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._cut_off(error)
        self._heard = time.monotonic()
        self._fds.extend(fds)
        if not count:
            self._cut_off()
        if self._garbled:
            return
        try:
            for answer in self._protocol.feed(memoryview(self._buffer)[:count]):
                self._dispatch(answer)
        except (ProtocolError, LookupError, ValueError, OSError) as error:
            self._garbled = True
            self._fail(f"what listens at {self.path} does not speak omlxd's protocol: {error}")

    def _dispatch(self, answer: Answer) -> None:
        self.holding.take(answer, self._fds.popleft)
        if answer.id is None:
            if answer.kind == "err" and self._dead is None:
                self._dead = f"the daemon ended the connection: {answer.body.get('message')}"
                self.holding.cut_off(self._dead)
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
        if call.abandoned:  # meanwhile
            self.abandon(call)
        if self._waiting:
            with self._arrived:
                self._arrived.notify_all()

    def _undo(self, answer: Answer) -> None:
        request = undo(answer.body) if answer.kind != "err" else None
        if request is not None:
            self.tell(*request)

    def _close_socket(self) -> None:
        """Close it. May run twice, and inside the garbage collector."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it; closing does not
        self._sock.close()
        while self._fds:
            with contextlib.suppress(IndexError, OSError):
                os.close(self._fds.popleft())

    def forget(self) -> None:
        """In a child process: this is the parent's."""
        self._dead = "this process was forked: connect again"
        self.holding.forget(self._dead)
        self._sock.close()  # no shutdown: that would be the parent's connection too


def _connected(path: str, timeout: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    deadline = time.monotonic() + timeout
    try:
        while True:
            try:
                sock.connect(path)
                break
            except BlockingIOError:  # Linux does not wait for room among the newcomers, whatever the timeout
                if time.monotonic() >= deadline:
                    raise NotYet(f"the daemon at {path} takes no more connections: is it stopped?") from None
                time.sleep(NEWCOMER_SECONDS)
    except NotYet:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise Unavailable(
            f"no daemon listens at {path}: {error.strerror or error}; start one with 'omlxd serve'"
        ) from None
    sock.setblocking(False)
    return sock


class Forgettable(Protocol):
    """What a forked child must not use as it is: a parent's socket, a lock that another thread of the parent held."""

    def forget(self) -> None:
        """Called in the child."""


@cache
def forgotten_in_children() -> weakref.WeakSet[Forgettable]:
    """All of these in this process."""
    all_of_them: weakref.WeakSet[Forgettable] = weakref.WeakSet()

    def forget() -> None:
        for one in list(all_of_them):
            one.forget()

    os.register_at_fork(after_in_child=forget)
    return all_of_them
