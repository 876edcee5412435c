"""A look at the store of a daemon that does not run: nothing is written, nothing is marked, nothing is moved aside."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omlxd.storage.environment import Environment
from omlxd.storage.ssd_data_file import DATA_NAME
from omlxd.storage.ssd_errors import SsdLocked
from omlxd.storage.ssd_files import refuse_strangers
from omlxd.storage.ssd_index import Entry, Index, SpaceTotals
from omlxd.storage.ssd_lock import LOCK_NAME, read_owner
from omlxd.storage.ssd_reader import Reader
from omlxd.storage.ssd_rows import load_entries, load_spaces

MAP_BYTES = 1 << 20
"""LMDB maps at least what the file's header says."""


@dataclass(frozen=True, slots=True)
class Look:
    """What is there."""

    entries: list[Entry]
    spaces: list[SpaceTotals]
    """Namespaces, with the descriptors that engines gave."""
    unreadable: list[tuple[bytes, str]]
    """Records that cannot be read: key, reason."""
    _environment: Environment

    def payload(self, entry: Entry) -> bytes:
        """A block's payload, verified. Raises ``Damaged``, ``Missing``."""
        out = bytearray(entry.nbytes)
        Reader().read_into(self._environment, entry.key, memoryview(out))
        return bytes(out)


@contextmanager
def look_at(path: Path) -> Iterator[Look]:
    """Open the store at ``path`` for reading only; no daemon can begin to use it meanwhile, so be short.

    Raises ``FileNotFoundError`` (there is none), ``SsdLocked`` (a daemon has it), ``StoreBroken``, ``SsdError``, ``OSError``.
    """
    if not (path / DATA_NAME).exists():
        raise FileNotFoundError(f"there is no store in {path}")
    refuse_strangers(path)
    lock = os.open(path / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SsdLocked(path, read_owner(path)) from None
        environment = Environment(path, map_bytes=MAP_BYTES, readonly=True)
        try:
            index = Index()
            with environment.reading() as reading:
                numbers = load_spaces(reading, environment, index)
            unreadable: list[tuple[bytes, str]] = []
            entries = load_entries(environment, numbers, unreadable)
            yield Look(entries, list(index.spaces.values()), unreadable, environment)
        finally:
            environment.close()
    finally:
        os.close(lock)
