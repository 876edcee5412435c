"""Bringing blocks from the SSD into RAM slots, each once, however many ask for it.

Runs on the event loop's thread; reading, verifying and decoding run on worker threads, straight into the slot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from omlxd.policy.base import RequestContext
from omlxd.storage.blocks import BlockMeta
from omlxd.storage.ssd_errors import Damaged, Missing

if TYPE_CHECKING:
    from omlxd.storage.ram import RamBlock, RamTier
    from omlxd.storage.ssd import SsdTier
    from omlxd.storage.ssd_index import Entry

log = logging.getLogger(__name__)

Arrived = Callable[["RamBlock | None", str], None]
"""Told the block, readable, in the same step in which it became so; or None and the reason."""


class Restorer:
    """Restores under way, by key."""

    def __init__(
        self,
        ram: RamTier,
        ssd: SsdTier,
        pool: ThreadPoolExecutor,
        *,
        parallel: int,
        on_damage: Callable[[bytes, str], None],
        on_progress: Callable[[], None],
        on_restored: Callable[[float], None],
    ) -> None:
        self.parallel = parallel
        self.counts: Counter[str] = Counter()
        self._ram = ram
        self._ssd = ssd
        self._pool = pool
        self._on_damage = on_damage
        self._on_progress = on_progress
        self._on_restored = on_restored
        self._waiting: dict[bytes, list[Arrived]] = {}
        self._rate = 0.0

    def __contains__(self, key: bytes) -> bool:
        return key in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def bytes_per_second(self) -> float:
        """Measured payload bytes per second of one restore (a moving mean); 0 when nothing was measured yet."""
        return self._rate

    def start(self, key: bytes, arrived: Arrived | None, ctx: RequestContext | None) -> bool:
        """Begin to restore ``key``, or join who does. False: there is no slot for it now."""
        waiting = self._waiting.get(key)
        if waiting is not None:
            if arrived is not None:
                waiting.append(arrived)
            return True
        record = self._ssd.meta(key)
        if record is None:
            if arrived is not None:
                arrived(None, "not_on_ssd")
            return True
        if not self._ssd.pin(key):
            if arrived is not None:
                arrived(None, "not_on_ssd")
            return True
        meta = BlockMeta(key, record.namespace, record.nbytes, record.parent, record.position, record.layout)
        reserved = self._ram.reserve([meta], (), ctx)
        if not reserved:
            self._ssd.unpin(record)
            return False
        block = reserved[0]
        block.restoring = True
        self._waiting[key] = [arrived] if arrived is not None else []
        loop = asyncio.get_running_loop()
        future = self._pool.submit(self._read, key, self._ram.view(block))
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(self._finish, block, record, done))
        return True

    def forsake(self, key: bytes, arrived: Arrived) -> None:
        """Who waited does so no more; the restore itself goes on."""
        waiting = self._waiting.get(key)
        if waiting is not None and arrived in waiting:
            waiting.remove(arrived)

    def _read(self, key: bytes, out: memoryview) -> float:
        begun = time.monotonic()
        self._ssd.read_into(key, out)
        return time.monotonic() - begun

    def _finish(self, block: RamBlock, record: Entry, done: Future[float]) -> None:
        key = block.meta.key
        waiting = self._waiting.pop(key)
        block.restoring = False
        self._ssd.unpin(record)
        error = done.exception()
        reason = ""
        if error is not None:
            reason = (
                "damaged"
                if isinstance(error, Damaged)
                else "not_on_ssd"
                if isinstance(error, Missing)
                else "read_error"
            )
            self.counts[reason] += 1
            if isinstance(error, Damaged):
                self._on_damage(key, str(error))
            elif not isinstance(error, Missing):
                log.warning("restore of block %s failed: %s: %s", key[:8].hex(), type(error).__name__, error)
        else:
            seconds = max(1e-6, done.result())
            rate = block.meta.nbytes / seconds
            self._rate = rate if not self._rate else 0.9 * self._rate + 0.1 * rate
            self._on_restored(seconds)
            self.counts["restored"] += 1
            self.counts["restored_bytes"] += block.meta.nbytes
        readable = self._ram.complete(block, success=error is None)
        if readable:
            block.clean = True
            self._ram.pin_block(block)  # nothing may take it before those who waited have had it
        elif not reason:
            reason = "removed"
        for arrived in waiting:
            arrived(block if readable else None, reason)
        if readable:
            self._ram.complete_read(block)
        self._on_progress()
