"""One blocking connection to a daemon, shared by any number of threads.

There is no reader thread: whichever thread waits for an answer reads, and hands what belongs to others to them. A lone
caller so pays for one ``send``, one ``poll`` and one ``recv``, nothing else; that is what a lookup costs.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from typing import NoReturn

from omlxd.connection import READ_BYTES, receive_into
from omlxd.errors import Refused, Unavailable
from omlxd.operations import Limits
from omlxd.protocol import MIN_VERSION, VERSION, Answer, ClientSide, Message, ProtocolError
from omlxd.storage.mapping import SegmentMap

CALL_SECONDS = 5.0
"""How long a client waits for an answer that needs no work of the daemon before it takes it for dead."""


class Call:
    """An open request: the frames of its answer that have come and were not taken yet."""

    __slots__ = ("finished", "frames", "id")

    def __init__(self, call_id: int) -> None:
        self.id = call_id
        self.frames: deque[Answer] = deque()
        self.finished = False


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
    """A connection that is greeted and ready. Thread-safe. Dead once anything went wrong: make a new one."""

    def __init__(self, path: str, *, name: str, timeout: float = CALL_SECONDS) -> None:
        """Connect and greet.

        Raises:
            Unavailable: nobody listens at ``path``, or what listens does not answer within ``timeout`` seconds.
            Refused: the daemon speaks no version that this client speaks.
        """
        self.path = path
        self.segments = SegmentMap()
        self.handles: dict[bytes, int] = {}
        """Namespace id to the number that this connection has for it."""
        self._protocol = ClientSide()
        self._calls: dict[int, Call] = {}
        self._fds: deque[int] = deque()
        self._later: deque[tuple[str, Message]] = deque()
        self._dead: str | None = None
        self.hung = False
        """Did it die because the daemon did not answer in time (rather than hang up)?"""
        self._buffer = bytearray(READ_BYTES)
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._arrived = threading.Condition()
        self._waiting = 0
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(timeout)
        try:
            self._sock.connect(path)
        except OSError as error:
            self._sock.close()
            raise Unavailable(
                f"no daemon listens at {path}: {error.strerror or error}; start one with 'omlxd serve'"
            ) from None
        self._sock.setblocking(False)
        self._poll_in = select.poll()
        self._poll_in.register(self._sock, select.POLLIN)
        self._poll_out = select.poll()
        self._poll_out.register(self._sock, select.POLLOUT)
        try:
            self.limits = limits_of(self.ask("hello", greeting(name), timeout))
        except Refused:
            self.close("refused")
            raise
        self._protocol.max_frame = self.limits.max_frame

    @property
    def dead(self) -> str | None:
        """Why it can't be used any more; None while it can."""
        return self._dead

    def check_alive(self) -> bool:
        """False when the daemon has closed it meanwhile. Costs one system call, reads what is there."""
        if self._dead is None and not self._calls and self._poll_in.poll(0) and self._reading.acquire(blocking=False):
            try:
                self._read(time.monotonic())
            except Unavailable:
                pass
            finally:
                self._reading.release()
        return self._dead is None

    def ask(self, verb: str, fields: Message, timeout: float = CALL_SECONDS) -> Message:
        """Ask and wait at most ``timeout`` seconds for the whole answer.

        Raises:
            Refused: the daemon refuses.
            Unavailable: it has gone, or does not answer in time (the link is dead then).
        """
        call = self.begin(verb, fields, timeout)
        while (answer := self.next(call, timeout)).kind == "more":
            pass
        return answer.body

    def begin(self, verb: str, fields: Message, timeout: float = CALL_SECONDS) -> Call:
        """Send a request; its answer is taken with :meth:`next`."""
        with self._sending:
            if self._dead is not None:
                raise Unavailable(self._dead)
            call_id, frame = self._protocol.request(verb, fields)
            call = Call(call_id)
            self._calls[call_id] = call
            self._send(frame, time.monotonic() + timeout)
        if self._later:
            self._send_later()
        return call

    def abandon(self, call: Call) -> None:
        """What still comes for ``call`` is of no interest."""
        self._calls.pop(call.id, None)

    def next(self, call: Call, timeout: float) -> Answer:
        """The next frame of the answer. Raises as :meth:`ask` does."""
        deadline = time.monotonic() + timeout
        while not call.frames:
            if self._dead is not None:
                raise Unavailable(self._dead)
            if self._reading.acquire(blocking=False):
                try:
                    while not call.frames and self._dead is None:
                        self._read(deadline)
                finally:
                    self._reading.release()
                    if self._waiting:
                        with self._arrived:
                            self._arrived.notify_all()
            else:
                with self._arrived:
                    self._waiting += 1
                    try:
                        if not call.frames and self._dead is None and self._reading.locked():
                            self._arrived.wait(min(1.0, max(0.0, deadline - time.monotonic())))
                    finally:
                        self._waiting -= 1
                if not call.frames and time.monotonic() >= deadline:
                    self._fail(f"the daemon at {self.path} did not answer within {timeout:.1f} s", hung=True)
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

    def _send_later(self) -> None:
        while self._later and self._dead is None and self._sending.acquire(blocking=False):
            # Who fails to get the lock leaves its request to the holder, which looks again after letting go.
            try:
                with contextlib.suppress(IndexError, Unavailable):
                    while self._dead is None:
                        _, frame = self._protocol.request(*self._later.popleft())
                        self._send(frame, time.monotonic() + CALL_SECONDS)
            finally:
                self._sending.release()

    def close(self, reason: str = "closed by its owner") -> None:
        """Close it. What is mapped stays readable as long as views of it live."""
        if self._dead is None:
            self._dead = reason
        self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())
        self.segments.close()

    def _fail(self, reason: str, *, hung: bool = False) -> NoReturn:
        if self._dead is None:
            self._dead = reason
            self.hung = hung
        # shutdown, not close: another thread may be polling this very descriptor
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        raise Unavailable(self._dead)

    def _send(self, frame: bytes, deadline: float) -> None:
        view = memoryview(frame)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except (BlockingIOError, InterruptedError):
                if not self._poll_out.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                    self._fail(f"the daemon at {self.path} takes no data", hung=True)
            except OSError as error:
                self._fail(f"the daemon at {self.path} has gone: {error.strerror or error}")

    def _read(self, deadline: float) -> None:
        """Read what is there, waiting for it at most until ``deadline``; the reading lock is held."""
        if not self._poll_in.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            self._fail(f"the daemon at {self.path} did not answer in time", hung=True)
        try:
            count, fds = receive_into(self._sock, self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(f"the daemon at {self.path} has gone: {error.strerror or error}")
            return
        self._fds.extend(fds)
        if not count:
            self._fail(f"the daemon at {self.path} has gone")
        try:
            for answer in self._protocol.feed(memoryview(self._buffer)[:count]):
                self._dispatch(answer)
        except ProtocolError as error:
            self._fail(f"what listens at {self.path} does not speak omlxd's protocol: {error}")

    def _dispatch(self, answer: Answer) -> None:
        for segment, nbytes in answer.fds:
            if not self._fds:
                self._fail("the daemon announced a segment and sent no descriptor")
            self.segments.add(segment, self._fds.popleft(), nbytes)
        if answer.id is None:
            self._fail(f"the daemon ends the connection: {answer.body.get('message')}")
            return
        call = self._calls.get(answer.id)
        if call is None:
            return  # told, not asked
        call.frames.append(answer)
        if answer.kind != "more":
            call.finished = True
            del self._calls[answer.id]
        for segment in answer.body.get("dropped_segments", ()):
            self.segments.drop(segment)
        if self._waiting:
            with self._arrived:
                self._arrived.notify_all()
