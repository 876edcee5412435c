"""What can go wrong with the SSD tier, as the callers of its worker-thread methods see it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from omlxd.storage import tier


class SsdError(Exception):
    """Base of the SSD tier's errors."""


class SsdLocked(SsdError):
    """Another process owns the store; ``pid`` is its process id where its lock file says so."""

    def __init__(self, path: Path, pid: int | None) -> None:
        owner = f"process {pid}" if pid is not None else "another process"
        super().__init__(f"the store {path} belongs to {owner}; stop it first, or give this one another path")
        self.path = path
        self.pid = pid


class StoreBroken(SsdError):
    """The environment at a path cannot be used; ``reason`` says why. ``open`` moves it aside."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"the store {path} cannot be used: {reason}")
        self.path = path
        self.reason = reason


class Missing(SsdError, tier.Missing):
    """No such record (any more)."""


class Departed(Missing):
    """The record left, or the file was exchanged, while it was being read."""


class Damaged(SsdError, tier.Damaged):
    """The record's bytes are not those that were stored; ``reason`` says what did not match."""


class DiskTrouble(Missing, tier.Trouble):
    """The disk does not answer: I/O error, vanished volume, truncated file, no space, read-only.

    For a reader it is a miss like any other (hence the base class), but the record itself is not
    to blame and stays. ``state`` is what the tier becomes: "read-only", "gone" or "full".
    """

    state: Literal["read-only", "gone", "full"]

    def __init__(self, state: Literal["read-only", "gone", "full"], reason: str) -> None:
        tier.Trouble.__init__(self, state, reason)
