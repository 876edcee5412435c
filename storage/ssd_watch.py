"""Has anybody else changed the data file? Then LMDB may follow it only after its structure was gone through again."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omlxd.storage.ssd_pages import read_header
from omlxd.storage.ssd_structure import check_structure

log = logging.getLogger(__name__)


class FileWatch:
    """Knows the file as this process left it last, by its change time (which nobody can set) and length. Writer's thread."""

    def __init__(self, file: Path, descriptor: int) -> None:
        """The file is known to be in order now. Raises ``OSError``, as all methods do."""
        self._file = file
        self._descriptor = descriptor
        self._known = self._stamp()

    def _stamp(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_ctime_ns, status.st_size

    @property
    def is_unchanged(self) -> bool:
        """Has nobody but this process changed it?"""
        return self._stamp() == self._known

    @contextmanager
    def own_changes(self) -> Iterator[None]:
        """What is done to the file within is this process's doing; what others did before stays noticed."""
        was_unchanged = self.is_unchanged
        yield
        if was_unchanged:
            self._known = self._stamp()

    def go_through(self, *, thorough: bool) -> None:
        """Check the structure where the file was changed, or, ``thorough``, in any case. Raises ``BadFile``."""
        stamp = self._stamp()
        if stamp == self._known and not thorough:
            return
        if stamp != self._known:
            log.warning("%s was changed by another program: its structure is checked", self._file)
        check_structure(self._descriptor, read_header(self._descriptor), thorough=thorough)
        self._known = stamp
