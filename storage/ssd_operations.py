"""What an operator, or an upkeep, asks of a store: check it, carry it elsewhere, make its file smaller, count it again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from omlxd.storage.environment import Environment
from omlxd.storage.ssd_archive import ArchivedNamespace, export_blocks
from omlxd.storage.ssd_commit import read_quarantine
from omlxd.storage.ssd_contents import SsdContents
from omlxd.storage.ssd_maintenance import import_blocks, rewrite
from omlxd.storage.ssd_plan import Quarantined
from omlxd.storage.ssd_rows import count_rows
from omlxd.storage.ssd_verify import VerifyReport, verify

if TYPE_CHECKING:
    from omlxd.storage.ssd import SsdTier


class SsdOperations(SsdContents):
    """The part of ``SsdTier`` that goes through all of a store."""

    _environment: Environment
    _free_space: Callable[[Path], int]

    def quarantined(self) -> list[Quarantined]:
        """Worker. The damaged records that were written down, oldest first; a bounded number of the newest."""
        return read_quarantine(self._environment)

    def recount(self) -> dict[bytes, tuple[int, int, int]]:
        """Worker. ``(blocks, payload bytes, stored bytes)`` that the disk's own accounting has for each namespace."""
        return count_rows(self._environment)

    def rewrite(self) -> int:
        """Writer. Copy the data file without its free pages, for disks that cannot make holes; returns the bytes saved.

        Raises ``SsdError`` where the copy would not fit the limit or the volume, ``DiskTrouble``.
        """
        return rewrite(self._environment, self._ledger.room, self._free_space)

    def verify(
        self,
        *,
        progress: Callable[[VerifyReport], bool] = lambda report: True,
        after: bytes = b"",
        bytes_per_second: float = 0.0,
    ) -> VerifyReport:
        """Worker. Check every record's bytes; the caller tells ``damaged`` of what is found, on the loop.

        ``progress`` is called after each block and ends the run by False; ``after``: resume behind that key.
        """
        return verify(
            self._environment, self._reader, progress=progress, after=after, bytes_per_second=bytes_per_second,
            timer=time.monotonic, sleep=time.sleep,
        )  # fmt: skip

    def export(self, keys: Sequence[bytes], file: Path, progress: Callable[[int], None] = lambda blocks: None) -> int:
        """Worker. Write records into an archive; returns how many. Raises ``OSError``."""
        spaces = {space.number: ArchivedNamespace(space.id, space.descriptor) for space in self.namespaces()}
        return export_blocks(self._environment, keys, spaces, file, progress)

    def import_(self, file: Path, progress: Callable[[int], None] = lambda blocks: None) -> int:
        """Take in an archive, all of it or, when it is not whole, nothing; returns the blocks that were stored.

        For a store that nobody else works with: it plans and commits by itself. A daemon calls ``check_archive`` and
        ``read_archive`` on a worker and spills what they give. Raises ``ArchiveBroken``, ``SsdError``, ``OSError``.
        """
        return import_blocks(cast("SsdTier", self), file, progress)

    def sync(self) -> None:
        """Writer. Make durable what was committed (durability ``interval`` calls for it). Raises ``OSError``."""
        self._environment.sync()
