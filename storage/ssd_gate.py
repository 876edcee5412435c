"""Many readers, or one who changes what they read from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """A shared-exclusive lock. Who waits for exclusivity keeps newcomers out, so the wait is short."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._closed = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Be one of many; waits while somebody is alone."""
        with self._changed:
            while self._closed:
                self._changed.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                if not self._readers:
                    self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Be alone; waits until all others have left."""
        with self._changed:
            while self._closed:
                self._changed.wait()
            self._closed = True
            while self._readers:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()
