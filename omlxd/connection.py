"""A connected unix socket on an event loop: bytes out with back-pressure, descriptors beside them, bytes in.

asyncio's streams can't send descriptors, so the daemon and the asyncio client use this instead. It needs nothing but
``add_reader``/``add_writer`` and works under asyncio and uvloop alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence

from omlxd.descriptors import READ_BYTES, close_all, receive_into, send_with_fds


class Connection:
    """One peer.

    ``on_data(data, fds)`` is called for what arrives (``data`` is only valid during the call), ``on_close(reason)`` once at
    the end, both on the loop's thread, and neither inside :meth:`send`.
    When it is closed, by whichever side, the peer sees the end of what is sent; the socket itself stays open until
    :meth:`let_go`, since its closing says more than that: who closes it does not use the other's memory any more.

    What can't be sent at once is queued up to ``max_queued`` bytes; a peer that reads slower than that is cut off, so a
    sleeping client can't eat the daemon's memory.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        on_data: Callable[[memoryview, list[int]], None],
        on_close: Callable[[str], None],
        max_queued: int = 128 << 20,
        *,
        half_closes: bool = True,
    ) -> None:
        """``half_closes``: when it ends, the peer is told at once that nothing more will come.

        Not so for a client's: the daemon takes the end of a client's socket for a sign that it uses no shared memory
        any more, and it may be in the middle of writing.
        """
        sock.setblocking(False)
        self._half_closes = half_closes
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = loop
        self._on_data = on_data
        self._on_close = on_close
        self._queue: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._queued = 0
        self._max_queued = max_queued
        self._buffer = bytearray(READ_BYTES)
        self._reading = True
        self._closing = False
        self.closed = False
        self.hung_up = False
        """Was it the peer that ended it?"""
        loop.add_reader(self._fd, self._readable)

    @property
    def queued(self) -> int:
        """Bytes that wait to be sent."""
        return self._queued

    @property
    def sock(self) -> socket.socket:
        """The socket (for peer credentials)."""
        return self._sock

    def receive(self) -> None:
        """Take in what is there now, without waiting for the loop to notice it."""
        if not self.closed and self._reading:
            self._readable()

    def pause_reading(self) -> None:
        """Stop taking data, so that the peer feels the back-pressure."""
        if self._reading and not self.closed:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def resume_reading(self) -> None:
        """Undo :meth:`pause_reading`."""
        if not self._reading and not self.closed and not self._closing:
            self._reading = True
            self._loop.add_reader(self._fd, self._readable)

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send a frame, now or as soon as the peer takes it. Takes ``fds`` over: they are closed here once they are sent."""
        if self.closed or self._closing:
            close_all(fds)
            return
        view = memoryview(data)
        attached = tuple(fds)
        if not self._queue:
            try:
                sent = send_with_fds(self._sock, view, attached)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as error:
                close_all(attached)
                self.hung_up = isinstance(error, ConnectionError)
                self._fail(f"send failed: {error}")
                return
            if sent:
                close_all(attached)
                view, attached = view[sent:], ()
                if not view:
                    return
            self._loop.add_writer(self._fd, self._writable)
        self._queue.append((view, attached))
        self._queued += len(view)
        if self._queued > self._max_queued:
            self._fail(f"the peer leaves {self._queued} bytes unread; at most {self._max_queued} are kept for it")

    def finish(self, data: bytes, reason: str) -> None:
        """Send a last frame, then close."""
        self.send(data)
        self._closing = True
        if not self._queue:
            self.close(reason)
        elif self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def close(self, reason: str) -> None:
        """Talk no more; what was queued is dropped."""
        if not self.closed:
            self._end()
            self._on_close(reason)

    def let_go(self) -> None:
        """Close the socket, and the connection with it. May be called again."""
        self.close("let go")
        self._sock.close()

    @property
    def peer_has_let_go(self) -> bool:
        """Has the peer closed its socket, or died?"""
        if self._sock.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLHUP)
        return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))

    def _fail(self, reason: str) -> None:
        """It cannot be sent to any more. Told a step later: who sends is in the middle of something."""
        self._end()
        self._loop.call_soon(self._on_close, reason)

    def _end(self) -> None:
        self.closed = True
        if self._reading:
            self._loop.remove_reader(self._fd)
        if self._queue:
            self._loop.remove_writer(self._fd)
        for _, fds in self._queue:
            close_all(fds)
        self._queue.clear()
        self._queued = 0
        if self._half_closes:
            with contextlib.suppress(OSError):  # the peer has gone
                self._sock.shutdown(socket.SHUT_WR)

    def _readable(self) -> None:
        self._take_in()
        if not self.closed and self._reading and self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            # The peer has gone and left answers unread. libuv stops watching a socket in that state after calling once,
            # so nobody would come back for what is left of its data, nor for its end.
            while not self.closed and self._reading:
                self._take_in()

    def _take_in(self) -> None:
        try:
            count, fds = receive_into(self._sock, self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.hung_up = isinstance(error, ConnectionError)
            self.close("closed by the peer" if self.hung_up else f"receive failed: {error}")
            return
        if not count:
            self.hung_up = True
            self.close("closed by the peer")
            return
        self._on_data(memoryview(self._buffer)[:count], fds)

    def _writable(self) -> None:
        while self._queue:
            view, fds = self._queue[0]
            try:
                sent = send_with_fds(self._sock, view, fds)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.hung_up = isinstance(error, ConnectionError)
                self.close(f"send failed: {error}")
                return
            self._queued -= sent
            close_all(fds)
            if sent < len(view):
                self._queue[0] = (view[sent:], ())
                return
            self._queue.popleft()
        self._loop.remove_writer(self._fd)
        if self._closing:
            self.close("finished")
