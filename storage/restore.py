"""Bringing blocks from a lower tier into RAM slots, each once, however many ask for it.

Runs on the event loop's thread; reading, verifying and decoding run on worker threads, straight into the slot. What
waits for a worker is already being fetched where the tier can, so that the disk has work while others decode.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic

from omlxd.policy.base import RequestContext
from omlxd.storage.blocks import BlockMeta
from omlxd.storage.tier import Damaged, E, LowerTier, Missing, Trouble

if TYPE_CHECKING:
    from omlxd.storage.ram import RamBlock, RamTier

log = logging.getLogger(__name__)

QUEUED_PER_WORKER = 4
"""Restores under way, waiting ones included, for each worker: bounds the slots that are taken ahead of need."""
MIN_SAMPLE_SECONDS = 0.02
STALE_SECONDS = 60.0

Arrived = Callable[["RamBlock | None", str], None]
"""Told the block, readable, in the same step in which it became so; or None and the reason."""


class Throughput:
    """Bytes a second over the time in which anything was under way: what all workers together bring."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._under_way = 0
        self._since = 0.0
        self._bytes = 0
        self._rate = 0.0
        self._measured_at = 0.0

    @property
    def bytes_per_second(self) -> float:
        """A moving mean; 0 while nothing was measured, or nothing in the last minute: then it is time to measure again."""
        return self._rate if self._clock() - self._measured_at < STALE_SECONDS else 0.0

    def begun(self) -> None:
        """A transfer begins."""
        if not self._under_way:
            self._since = self._clock()
            self._bytes = 0
        self._under_way += 1

    def ended(self, nbytes: int) -> None:
        """A transfer ends that brought ``nbytes``; 0 when it failed."""
        self._under_way -= 1
        self._bytes += nbytes
        now = self._clock()
        seconds = now - self._since
        if not self._bytes or (self._under_way and seconds < MIN_SAMPLE_SECONDS):
            return
        rate = self._bytes / max(seconds, 1e-6)
        weight = min(1.0, 0.2 + seconds) if self._rate else 1.0
        self._rate += weight * (rate - self._rate)
        self._measured_at = now
        self._since = now
        self._bytes = 0


class Restorer(Generic[E]):
    """Restores from one tier that are under way, by key."""

    def __init__(
        self,
        ram: RamTier,
        tier: LowerTier[E],
        *,
        name: str,
        parallel: int,
        adopt: Callable[[RamBlock], None],
        on_damage: Callable[[bytes, str], None],
        on_progress: Callable[[], None],
        on_restored: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``name`` is the tier's, for counters and reasons; ``adopt`` is told each block as it becomes readable.

        ``on_restored`` is told the seconds that a restore took, waiting for a worker included.
        """
        self.parallel = parallel
        self.counts: Counter[str] = Counter()
        self.under_way_bytes = 0
        """Payload bytes of all restores under way."""
        self._ram = ram
        self._tier = tier
        self._name = name
        self._adopt = adopt
        self._pool = ThreadPoolExecutor(parallel, f"omlxd-restore-{name}")
        self._ahead = ThreadPoolExecutor(1, "omlxd-ahead")
        self._on_damage = on_damage
        self._on_progress = on_progress
        self._on_restored = on_restored
        self._clock = clock
        self._waiting: dict[bytes, list[Arrived]] = {}
        self._throughput = Throughput(clock)
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False

    def __contains__(self, key: bytes) -> bool:
        return key in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Are as many under way as may be?"""
        return len(self._waiting) >= QUEUED_PER_WORKER * self.parallel

    @property
    def bytes_per_second(self) -> float:
        """Measured payload bytes a second of all workers together; 0 when nothing was measured lately."""
        return self._throughput.bytes_per_second

    def seconds_for(self, nbytes: int) -> float:
        """How long ``nbytes`` more would take, behind what is under way; 0 when nothing is known."""
        rate = self.bytes_per_second
        return (self.under_way_bytes + nbytes) / rate if rate else 0.0

    def start(self, key: bytes, arrived: Arrived | None, ctx: RequestContext | None) -> bool:
        """Begin to restore ``key``, or join who does. False: there is no slot for it now."""
        waiting = self._waiting.get(key)
        if waiting is not None:
            if arrived is not None:
                waiting.append(arrived)
            return True
        record = self._tier.meta(key)
        if record is None or self._stopping or not self._tier.pin(key):
            if arrived is not None:
                arrived(None, "shutting_down" if self._stopping else f"not_on_{self._name}")
            return True
        meta = BlockMeta(key, record.namespace, record.nbytes, record.parent, record.position, record.layout)
        reserved = self._ram.reserve([meta], (), ctx)
        if not reserved:
            self._tier.unpin(record)
            return False
        block = reserved[0]
        block.restoring = True
        self._begin(block, record, arrived)
        return True

    async def stop(self) -> None:
        """Finish what is under way; nothing new is begun."""
        self._stopping = True
        await self._idle.wait()
        self._pool.shutdown(wait=True)
        self._ahead.shutdown(wait=True)

    def _begin(self, block: RamBlock, record: E, arrived: Arrived | None) -> None:
        key = block.meta.key
        if len(self._waiting) >= self.parallel:
            self._ahead.submit(self._tier.read_ahead, [key])
        self._waiting[key] = [arrived] if arrived is not None else []
        self._idle.clear()
        self.under_way_bytes += block.meta.nbytes
        self._throughput.begun()
        loop = asyncio.get_running_loop()
        begun = self._clock()
        future = self._pool.submit(self._tier.read_into, key, self._ram.view(block))
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(self._finish, block, record, begun, done))

    def _finish(self, block: RamBlock, record: E, begun: float, done: Future[int]) -> None:
        key, nbytes = block.meta.key, block.meta.nbytes
        waiting = self._waiting.pop(key)
        self.under_way_bytes -= nbytes
        block.restoring = False
        self._tier.unpin(record)
        error = CancelledError() if done.cancelled() else done.exception()
        self._throughput.ended(0 if error else nbytes)
        reason = self._note_failure(key, error) if error is not None else ""
        if error is None:
            self._on_restored(self._clock() - begun)
            self.counts["restored"] += 1
            self.counts["restored_bytes"] += nbytes
        readable = self._ram.complete(block, success=error is None)
        if readable:
            self._adopt(block)
            self._ram.pin_block(block)  # nothing may take it before those who waited have had it
        for arrived in waiting:
            arrived(block if readable else None, reason or "removed")
        if readable:
            self._ram.complete_read(block)
        if not self._waiting:
            self._idle.set()
        self._on_progress()

    def _note_failure(self, key: bytes, error: BaseException) -> str:
        reason = (
            "damaged"
            if isinstance(error, Damaged)
            else f"{self._name}_trouble"
            if isinstance(error, Trouble)
            else f"not_on_{self._name}"
            if isinstance(error, Missing)
            else "read_error"
        )
        self.counts[reason] += 1
        if isinstance(error, Damaged):
            self._on_damage(key, str(error))
        elif not isinstance(error, Missing):
            log.warning("restore of block %s failed: %s: %s", key[:8].hex(), type(error).__name__, error)
        return reason
