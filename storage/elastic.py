"""A RAM tier that grows and shrinks while it serves: by configuration, and when the system is short of memory.

Runs on the event loop's thread. A budget holds for new blocks at once; what is over it leaves in steps of some 20 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from omlxd.storage.pressure import Governor, Level
from omlxd.storage.sizes import format_size

if TYPE_CHECKING:
    from omlxd.storage.ram import RamTier

log = logging.getLogger(__name__)

BETWEEN_STEPS_SECONDS = 0.001


class Elastic:
    """The budget of a RAM tier."""

    def __init__(self, ram: RamTier, *, press: Callable[[], None], clock: Callable[[], float]) -> None:
        """``press`` is called when dirty blocks are in the way: have them written."""
        self.level = Level.EASE
        """How short memory was when somebody looked last."""
        self._ram = ram
        self._press = press
        self._clock = clock
        self._governor = Governor(ram.arena.budget)
        self._task: asyncio.Task[None] | None = None

    @property
    def gives_way(self) -> bool:
        """Has the tier less than is configured, for the system's sake?"""
        return self._governor.gives_way

    def configure(self, budget: int) -> int:
        """Another budget (bytes) is configured; returns the bytes that are still over it."""
        self._governor.configure(budget)
        return self._set(budget)

    def note(self, level: Level) -> None:
        """So short is memory now; called every second or so."""
        self.level = level
        before = self._ram.arena.budget
        budget = self._governor.step(level, self._ram.arena.used, self._clock())
        if budget != before:
            log.warning(
                "memory is %s: the RAM tier may have %s now instead of %s",
                level.name.lower(),
                format_size(budget),
                format_size(before),
            )
            self._set(budget)
        self._ram.arena.look_for_strays()
        self._go_on()

    def advance(self) -> None:
        """Something has become free, or clean: go on shrinking, where that is to be done."""
        if self._ram.arena.reserved > self._ram.arena.budget and self._ram.shrink():
            self._press()

    async def stop(self) -> None:
        """Shrink no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def _set(self, budget: int) -> int:
        over = self._ram.resize(budget)
        if over:
            self._press()
        self._go_on()
        return over

    def _go_on(self) -> None:
        if self._ram.shrinks and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._shrink(), name="omlxd-shrink")

    async def _shrink(self) -> None:
        while self._ram.shrinks:
            self._ram.shrink()
            await asyncio.sleep(BETWEEN_STEPS_SECONDS)  # sockets first
