"""A little space that is ours when the disk is full.

To remove records LMDB has to write some pages first. On a disk without any room that fails, and a tier that
cannot trim itself would stay stuck. So a file of zeros lies beside the data file, to be deleted then.
Writer's thread.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

BALLAST_NAME = "ballast"


def ballast_bytes(limit: int) -> int:
    """How much for a store of that limit: what removing a few records takes."""
    return max(128 << 10, min(1 << 20, limit >> 6))


def lay_ballast(path: Path, nbytes: int) -> bool:
    """Make sure that the store at ``path`` has its ballast; False when the disk has no room for it."""
    file = path / BALLAST_NAME
    try:
        if file.exists() and file.stat().st_size == nbytes:
            return True
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            written = os.write(descriptor, bytes(nbytes))
        finally:
            os.close(descriptor)
    except OSError:
        written = 0
    if written == nbytes:
        return True
    drop_ballast(path)
    return False


def drop_ballast(path: Path) -> bool:
    """Give the space to whoever needs it now; False when there was none."""
    with contextlib.suppress(OSError):
        (path / BALLAST_NAME).unlink()
        return True
    return False
