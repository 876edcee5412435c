"""Which blocks still have to reach the SSD, and the task that takes them there.

A block is *dirty* from the moment it is readable in RAM until its record is committed. A dirty block is pinned (the
writer is a reader of it), so it is never a victim and stays readable. The cleaner keeps the number of dirty bytes low
enough that eviction finds clean victims, coldest first; draining writes all of them.

Everything here runs on the event loop's thread; encoding and committing run on worker threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from omlxd.storage.admission import AdmissionFilter
from omlxd.storage.ssd_errors import SsdError

if TYPE_CHECKING:
    from omlxd.storage.ram import RamBlock, RamTier
    from omlxd.storage.ssd import SsdTier
    from omlxd.storage.ssd_plan import CommitOutcome, CommitPlan
    from omlxd.storage.ssd_records import EncodedBlock

log = logging.getLogger(__name__)


class WriteMode(StrEnum):
    """When a block goes to the SSD."""

    WRITE_BACK = "write_back"
    """Before it leaves RAM, or when too many bytes wait, or when it has waited for long (default)."""
    WRITE_THROUGH = "write_through"
    """At once."""
    SECOND_TOUCH = "second_touch"
    """As write_back, but only blocks that somebody asked for again, or stored again after they had left; others are dropped
    when they leave RAM. The ``TRACKED_KEYS`` stored last are remembered."""


TRACKED_KEYS = 1 << 16
"""Of blocks that were stored and not written, for admission by second touch; about 12 MB."""


@dataclass(frozen=True, slots=True)
class SpillSettings:
    """How the writer works; all of it may be changed while it runs."""

    mode: WriteMode = WriteMode.WRITE_BACK
    max_dirty_bytes: int = 1 << 30
    """Payload bytes that a crash may lose; more than that is refused until the writer has caught up."""
    max_age_seconds: float = 60.0
    """A block that has been dirty for longer is written even when nothing else asks for it."""
    group_bytes: int = 32 << 20
    """Payload bytes of one transaction."""
    group_blocks: int = 512


class Spiller:
    """The dirty blocks and their writer."""

    def __init__(
        self,
        ram: RamTier,
        ssd: SsdTier,
        settings: SpillSettings,
        *,
        clock: Callable[[], float],
        writer: ThreadPoolExecutor,
        coders: ThreadPoolExecutor,
        on_progress: Callable[[], None],
        on_commit: Callable[[CommitPlan, CommitOutcome], None],
    ) -> None:
        """``writer`` has one thread, the only one that writes to the environment; ``coders`` encode in parallel."""
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self._ram = ram
        self._ssd = ssd
        self._clock = clock
        self._writer = writer
        self._coders = coders
        self._on_progress = on_progress
        self._on_commit = on_commit
        self._stored = AdmissionFilter(2, TRACKED_KEYS)
        self._dirty: OrderedDict[bytes, tuple[RamBlock, float]] = OrderedDict()
        self._parked: dict[bytes, RamBlock] = {}
        self._wake = asyncio.Event()
        self._draining = 0
        self._pressed = False
        self._stopping = False
        self._step: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None
        self._transaction = asyncio.Lock()
        self.dirty_bytes = 0
        self.busy = False

    @property
    def dirty_blocks(self) -> int:
        """Blocks that wait to be written or are being written."""
        return len(self._dirty)

    @property
    def parked_blocks(self) -> int:
        """Blocks that a sick disk did not take; they may be evicted unwritten, and are tried again when it recovers."""
        return len(self._parked)

    def start(self) -> None:
        """Start the writer task on the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="omlxd-spill")

    def takes(self, nbytes: int) -> bool:
        """May ``nbytes`` more become dirty? One block of any size may when none is."""
        return self.dirty_bytes == 0 or self.dirty_bytes + nbytes <= self.settings.max_dirty_bytes

    def add(self, block: RamBlock, *, asked_again: bool = False) -> None:
        """``block`` has become readable, or was asked for again, and is not on the SSD."""
        key = block.meta.key
        if key in self._dirty or key in self._ssd:
            return
        if self.settings.mode is WriteMode.SECOND_TOUCH and not asked_again:
            self._stored.count([key])
            if not self._stored.admitted([key]):
                self.counts["not_admitted"] += 1
                return
        if not self._ssd.writable:
            self._park(block)
            return
        self._parked.pop(key, None)
        self._ram.pin_block(block)
        self._dirty[key] = (block, self._clock())
        self.dirty_bytes += block.meta.nbytes
        self._wake.set()

    def catch_up(self, block: RamBlock) -> None:
        """``block`` was stored while there was no SSD tier: it is written as fast as ``max_dirty_bytes`` allows."""
        if self.settings.mode is not WriteMode.SECOND_TOUCH:
            self._park(block)

    def touch(self, keys: Iterable[bytes]) -> None:
        """``keys`` were used, head to tail: their heads are now the youngest."""
        dirty = self._dirty
        if dirty:
            for key in reversed([key for key in keys if key in dirty]):
                dirty.move_to_end(key)

    def forget(self, block: RamBlock) -> bool:
        """``block`` is being removed: it need not be written any more. Was it dirty? Its pin is then the caller's to undo."""
        entry = self._dirty.get(block.meta.key)
        if entry is None or entry[0] is not block:
            return False
        del self._dirty[block.meta.key]
        self.dirty_bytes -= block.meta.nbytes
        return True

    def left_ram(self, block: RamBlock) -> None:
        """``block`` is not in RAM any more."""
        self._parked.pop(block.meta.key, None)

    def press(self) -> None:
        """Somebody waits for room: write now."""
        self._pressed = True
        self._wake.set()

    async def drain(self, progress: Callable[[int], None] | None = None) -> None:
        """Write all that is dirty now; ``progress`` is told the bytes still to go after each group.

        What becomes dirty meanwhile is not waited for: engines may go on storing. Returns early when the disk refuses;
        what it did not take is parked then.
        """
        self._draining += 1
        if self._ssd.writable:
            self._unpark()
        self._wake.set()
        try:
            waiting = {key: block.meta.nbytes for key, (block, _) in self._dirty.items()}
            while waiting:
                if self._task is None or self._task.done():
                    break
                if progress is not None:
                    progress(sum(waiting.values()))
                self._wake.set()
                if self._step is None:
                    self._step = asyncio.Event()
                await self._step.wait()
                waiting = {key: nbytes for key, nbytes in waiting.items() if key in self._dirty}
            if progress is not None:
                progress(sum(waiting.values()))
        finally:
            self._draining -= 1

    async def stop(self) -> None:
        """End the writer task; a group that is being committed is finished first."""
        if self._task is not None:
            self._stopping = True
            self._wake.set()
            await self._task
            self._task = None

    async def take_in(self, encoded: Sequence[EncodedBlock]) -> int:
        """Store blocks that come from elsewhere than RAM (an archive); how many were stored.

        Raises ``SsdError`` when the disk does not take them.
        """
        outcome = await self._transact(encoded)
        if outcome is not None and outcome.reason:
            raise SsdError(f"the SSD takes no more blocks: {outcome.reason}")
        return sum(block.key in self._ssd for block in encoded)

    async def rewrite(self) -> int:
        """Copy the store's file without its free pages; the bytes that this saved. Raises ``SsdError``."""
        async with self._transaction:
            saved = await asyncio.get_running_loop().run_in_executor(self._writer, self._ssd.rewrite)
        await self.look_after_disk()
        return saved

    async def commit_pending(self) -> None:
        """Carry out what the SSD tier has to do besides storing: discarded records leave the disk."""
        async with self._transaction:
            pass  # what is being written now may be discarded already
        while self._ssd.has_chores:
            outcome = await self._transact(())
            if outcome is None or outcome.reason:
                return

    async def look_after_disk(self) -> None:
        """Find out how the disk is, keep limits while nothing is stored, write recency down. Called on a timer."""
        health = await asyncio.get_running_loop().run_in_executor(self._writer, self._ssd.probe)
        was = self._ssd.state
        self._ssd.observe(health)
        if self._ssd.state != was:
            self._wake.set()
        self._ssd.persist()
        await self.commit_pending()

    async def _run(self) -> None:
        while not self._stopping:
            group = self._due()
            if not group:
                self._wake.clear()
                self._signal()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._patience())
                continue
            self.busy = True
            try:
                await self._spill(self._worth_it(group))
            except Exception:
                log.exception("spilling %d blocks failed; they stay in RAM and may be evicted unwritten", len(group))
                self._settle(group, park=True)
            finally:
                self.busy = False
                self._signal()

    def _signal(self) -> None:
        if self._step is not None:
            self._step.set()
            self._step = None

    def _patience(self) -> float:
        """Seconds until the oldest dirty block is due, or the disk is to be tried again."""
        if self._parked:
            return 1.0
        if not self._dirty:
            return 5.0
        oldest = min(since for _, since in list(self._dirty.values())[:64])
        return max(0.02, oldest + self.settings.max_age_seconds - self._clock())

    def _due(self) -> list[RamBlock]:
        """The next group to write, coldest first; empty when nothing has to be written now."""
        if self._parked and self._ssd.writable:
            self._unpark()
        settings = self.settings
        group_bytes = min(settings.group_bytes, max(1, self._ssd.group_bytes))
        everything = bool(self._draining) or settings.mode is WriteMode.WRITE_THROUGH
        pressed, self._pressed = self._pressed, False
        excess = self.dirty_bytes - settings.max_dirty_bytes // 2
        if pressed:
            excess = max(excess, min(self.dirty_bytes, group_bytes))
        old = self._clock() - settings.max_age_seconds
        group: list[RamBlock] = []
        size = 0
        for block, since in self._dirty.values():
            if not (everything or excess > size or since <= old):
                break
            group.append(block)
            size += block.meta.nbytes
            if size >= group_bytes or len(group) >= settings.group_blocks:
                break
        return group

    def _worth_it(self, group: list[RamBlock]) -> list[RamBlock]:
        """Those of ``group`` that the SSD's policy finds worth a write. The others stay in RAM as long as they may, and are
        offered again when they are asked for again. Who drains wants all of it.
        """
        if self._draining:
            return group
        worth = [block for block in group if self._ssd.worth_writing(block.meta.key)]
        if len(worth) < len(group):
            kept = set(worth)
            passed = [block for block in group if block not in kept]
            self.counts["not_worth_writing"] += len(passed)
            self._settle(passed, park=False)
        return worth

    def _unpark(self) -> None:
        """Have parked blocks written, no more at once than may be dirty: dirty ones can't leave RAM."""
        for key, block in list(self._parked.items()):
            if not self.takes(block.meta.nbytes):
                return
            del self._parked[key]
            if self._ram.blocks.get(key) is block:
                self.add(block, asked_again=True)

    async def _spill(self, group: list[RamBlock]) -> None:
        if not group:
            return
        loop = asyncio.get_running_loop()
        ram, ssd = self._ram, self._ssd
        # A block that is removed meanwhile gives its memory back at once; this keeps it readable until it is written.
        for block in group:
            ram.hold(block)
        try:
            encoded: list[EncodedBlock] = await asyncio.gather(
                *(loop.run_in_executor(self._coders, ssd.encode, block.meta, ram.view(block)) for block in group)
            )
            outcome = await self._transact(encoded, unless_forgotten=True)
        finally:
            for block in group:
                ram.unhold(block)
        for one in encoded:
            if one.meta.key in ssd:
                self.counts["spilled"] += 1
                self.counts["spilled_bytes"] += one.meta.nbytes
            elif one.meta.key in self._dirty:
                self.counts["not_spilled"] += 1
        # What a healthy disk does not take has no room there even when all that may leave has left: it stays in RAM for
        # as long as the policy keeps it. What a sick disk does not take is tried again when it is well.
        self._settle(group, park=not ssd.writable or (outcome is not None and bool(outcome.reason)))

    async def _transact(
        self, encoded: Sequence[EncodedBlock], *, unless_forgotten: bool = False
    ) -> CommitOutcome | None:
        """One plan, committed and booked; None when there was nothing to do.

        ``unless_forgotten``: of ``encoded``, what is not dirty any more when the plan is made was removed, and is left out.
        Whoever waits for it may be cancelled (a client that goes): what was planned is booked all the same.
        """
        return await asyncio.shield(asyncio.ensure_future(self._plan_and_commit(encoded, unless_forgotten)))

    async def _plan_and_commit(self, encoded: Sequence[EncodedBlock], unless_forgotten: bool) -> CommitOutcome | None:
        async with self._transaction:
            if unless_forgotten:
                encoded = [one for one in encoded if one.meta.key in self._dirty]
            plan = self._ssd.plan(encoded)
            if plan is None:
                return None
            outcome = await asyncio.get_running_loop().run_in_executor(self._writer, self._ssd.commit, plan)
            self._ssd.applied(plan, outcome)
            self._on_commit(plan, outcome)
            if outcome.reason:
                self.counts["failed_commits"] += 1
            return outcome

    def _settle(self, group: list[RamBlock], *, park: bool) -> None:
        for block in group:
            if not self.forget(block):
                continue  # removed meanwhile
            block.clean = block.meta.key in self._ssd
            if not block.clean and park:
                self._park(block)
            self._ram.complete_read(block)
        self._on_progress()

    def _park(self, block: RamBlock) -> None:
        self.counts["parked"] += 1
        self._parked[block.meta.key] = block
