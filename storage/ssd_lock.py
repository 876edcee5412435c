"""One owner a store: a lock that the kernel drops with its owner, and a file that tells about it.

The file ``owner`` has five lines: the process id, the machine's boot, the durability of its commits, how many
owners in a row came to no good end, and ``open`` or ``closed``. From the last one's the next owner knows whether the file system's
cache can have been lost (another boot) and whether the store kills its owners (several in a row).
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass, replace
from pathlib import Path

from omlxd.storage.ssd_errors import SsdLocked

LOCK_NAME = "owner"


@dataclass(frozen=True, slots=True)
class Owner:
    """What the file says; ``failures``: owners in a row, up to this one, that did not close the store."""

    pid: int
    boot: str
    durability: str
    failures: int
    closed: bool

    def format(self) -> bytes:
        """As it is in the file."""
        state = "closed" if self.closed else "open"
        return f"{self.pid}\n{self.boot}\n{self.durability}\n{self.failures}\n{state}\n".encode()

    @classmethod
    def parse(cls, text: bytes) -> Owner | None:
        """None for anything that is no such file."""
        lines = text.decode("ascii", "replace").split("\n")
        try:
            return cls(int(lines[0]), lines[1], lines[2], int(lines[3]), {"closed": True, "open": False}[lines[4]])
        except (ValueError, IndexError, KeyError):
            return None


class StoreLock:
    """Holds ``flock`` on ``path/owner``.

    The kernel releases the lock when the process ends, however it ends: a file that a dead daemon
    left behind is no obstacle, and its pid is not believed.
    """

    def __init__(self, path: Path, descriptor: int, previous: Owner | None, current: Owner) -> None:
        self.path = path
        self.previous = previous
        """Who had it before; None when nobody had, or the file cannot be read."""
        self._current = current
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, path: Path, boot: str, durability: str) -> StoreLock:
        """Lock the store at ``path``, an existing directory. Raises ``SsdLocked`` that names the owner."""
        descriptor = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            previous = Owner.parse(os.pread(descriptor, 4096, 0))
            failures = 0 if previous is None or previous.closed else previous.failures + 1
            lock = cls(path, descriptor, previous, Owner(os.getpid(), boot, durability, failures, closed=False))
            lock._write()
        except BlockingIOError:
            os.close(descriptor)
            raise SsdLocked(path, read_owner(path)) from None
        except BaseException:
            os.close(descriptor)
            raise
        return lock

    def _write(self) -> None:
        text = self._current.format()
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))

    @property
    def failures(self) -> int:
        """Owners in a row before this one that did not close the store."""
        return self._current.failures

    def is_well(self) -> None:
        """This owner has got on with the store: the failures before it are forgotten."""
        if self._current.failures:
            self._current = replace(self._current, failures=0)
            self._write()

    def release(self, *, closed: bool = False) -> None:
        """Give the store up, ``closed`` in good order or not; does nothing the second time."""
        if self._descriptor < 0:
            return
        if closed:
            self._current = replace(self._current, failures=0, closed=True)
            self._write()
            os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1


def read_owner(path: Path) -> int | None:
    """The process id in the store's lock file, whether or not it still holds the lock."""
    try:
        owner = Owner.parse((path / LOCK_NAME).read_bytes())
    except OSError:
        return None
    return None if owner is None else owner.pid
