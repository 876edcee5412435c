"""Memory that is there before it is needed: the first store into a page would otherwise wait for the system to find it one.

Some of what lies behind the blocks that were allocated last is made present by a thread, as soon as an engine has come
and after each store. An idle daemon takes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from omlxd.storage import pages

if TYPE_CHECKING:
    from omlxd.storage.arena import Arena

log = logging.getLogger(__name__)

MOST_BYTES = 128 << 20
BUDGET_SHARE = 8
"""At most this part of the budget is made present ahead: an eighth."""


class Readying:
    """Makes the arena's next bytes present. Loop's thread; the kernel's work is done on a thread of its own."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._pool = ThreadPoolExecutor(1, "omlxd-ready")
        self._job: Future[None] | None = None
        self._stopped = False

    def go_on(self) -> None:
        """Have some more made present, where less than there should be is."""
        if self._stopped or (self._job is not None and not self._job.done()):
            return
        run = self._arena.take_cold(min(MOST_BYTES, self._arena.budget // BUDGET_SHARE))
        if run is not None:
            loop = asyncio.get_running_loop()
            self._job = self._pool.submit(_populate, run)
            self._job.add_done_callback(lambda _: loop.call_soon_threadsafe(self.go_on))

    def stop(self) -> None:
        """Do no more; waits for what is being done, some 20 ms at most."""
        self._stopped = True
        self._pool.shutdown(wait=True, cancel_futures=True)


def _populate(run: memoryview) -> None:
    try:
        pages.populate(run, write=True)
    except OSError as error:  # no memory: whoever stores there will be told
        log.info("memory could not be made ready ahead: %s", error)
