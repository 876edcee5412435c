"""Has a process ended? By a handle on the process itself, so that its number being given to another one does not matter."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop  # engines import this module, and pay for no event loop


class _Closable(Protocol):
    def close(self) -> None: ...


class ProcessWatch:
    """A handle on a process: a pidfd on Linux, a kqueue on macOS.

    ``known`` is False where the system gives none (a process of another user's namespace, an old kernel): then nothing
    can be said, and ``ended`` is always False.
    """

    def __init__(self, pid: int) -> None:
        self._fd = -1
        self._queue: _Closable | None = None
        self._gone = False
        if pid <= 0:
            return
        try:
            if sys.platform == "linux":
                self._fd = os.pidfd_open(pid)
            else:
                self._queue = queue = select.kqueue()
                self._fd = queue.fileno()
                queue.control([select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)], 0)
        except ProcessLookupError:
            self._gone = True
        except OSError:
            self.close()

    @property
    def known(self) -> bool:
        """Can anything be said of it?"""
        return self._gone or self._fd >= 0

    def ended(self, timeout: float = 0.0) -> bool:
        """Has it ended? Waits at most ``timeout`` seconds for that."""
        if not self._gone and self._fd >= 0:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            self._gone = bool(poll.poll(timeout * 1e3))
            if self._gone:
                self.close()
        return self._gone

    def call_when_ended(self, loop: AbstractEventLoop, callback: Callable[[], None], timeout: float) -> None:
        """Call back on ``loop`` when it has ended, unless that takes longer than ``timeout`` seconds. Then closes."""
        if self._gone:
            loop.call_soon(callback)
            return
        if self._fd < 0:
            return
        fd = self._fd

        def stop() -> None:
            loop.remove_reader(fd)
            self.close()

        def ended() -> None:
            giving_up.cancel()
            self._gone = True
            stop()
            callback()

        giving_up = loop.call_later(timeout, stop)
        loop.add_reader(fd, ended)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the handle; what is known by then stays known."""
        queued = self._queue is not None
        if self._queue is not None:
            self._queue.close()
            self._queue = None
        fd, self._fd = self._fd, -1
        if fd >= 0 and not queued:
            with contextlib.suppress(OSError):
                os.close(fd)
