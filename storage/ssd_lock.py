"""One owner a store: a lock that the kernel drops with its owner, and whose file names it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from omlxd.storage.ssd_errors import SsdLocked

LOCK_NAME = "owner"


class StoreLock:
    """Holds ``flock`` on ``path/owner``, whose text is the owner's process id.

    The kernel releases the lock when the process ends, however it ends: a file that a dead daemon
    left behind is no obstacle, and its pid is not believed.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, path: Path) -> StoreLock:
        """Lock the store at ``path``, an existing directory. Raises ``SsdLocked`` that names the owner."""
        descriptor = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            os.close(descriptor)
            raise SsdLocked(path, read_owner(path)) from None
        except OSError:
            os.close(descriptor)
            raise
        return cls(path, descriptor)

    def release(self) -> None:
        """Give the store up; does nothing the second time."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_owner(path: Path) -> int | None:
    """The process id in the store's lock file, whether or not it still holds the lock."""
    try:
        return int((path / LOCK_NAME).read_text("ascii").strip())
    except (OSError, ValueError):
        return None
