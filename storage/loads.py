"""One leased load: blocks arrive in any order, are handed out head to tail, and end at the first that can't be had.

A state machine driven by the event loop's thread, without coroutines, so that a load of which every block is in RAM is
finished before the call returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from omlxd.policy.base import RequestContext

if TYPE_CHECKING:
    from omlxd.storage.ram import RamBlock


@dataclass(slots=True)
class Part:
    """Some more blocks of a load, in the chain's order; ``stopped`` says why no more follow, when ``last``."""

    blocks: list[RamBlock]
    last: bool
    stopped: str | None = None


class Source(Protocol):
    """What a load needs of the store."""

    def take_ready(self, load: Load, index: int) -> RamBlock | None:
        """Pin and return the block when it is readable in RAM."""

    def ask_for(self, load: Load, index: int) -> str | None:
        """Have the block brought; ``load.arrived`` or ``load.failed`` follows. Or why it can't be; ``"wait"``: try later."""

    def give_back(self, load: Load, blocks: Sequence[RamBlock]) -> None:
        """Unpin."""

    def load_finished(self, load: Load) -> None:
        """The last part is out."""


class Load:
    """A lease and how it fills. ``emit`` is told each part, the last one included, once there is something to tell."""

    def __init__(
        self,
        lease_id: int,
        owner: Hashable,
        keys: Sequence[bytes],
        ctx: RequestContext,
        source: Source,
        *,
        window: int,
        since: float,
        compute_blocks_per_s: float = 0.0,
        counted: bool = True,
        misses_of: bytes | None = None,
    ) -> None:
        self.id = lease_id
        self.owner = owner
        self.keys = keys
        self.ctx = ctx
        self.since = since
        self.blocks: list[RamBlock] = []
        """What is leased, head to tail, without holes."""
        self.restored: set[bytes] = set()
        """Keys that came from the SSD for this load."""
        self.stopped: str | None = None
        self.finished = False
        self.released = False
        self.compute_blocks_per_s = compute_blocks_per_s
        """How many blocks a second the engine computes by itself; 0: it did not say."""
        self.counted = counted
        """Is it an engine's, and so a hit or a miss?"""
        self.misses_of = misses_of
        """The namespace whose misses the keys are that cannot be had; None: nobody's, or counted already."""
        self._source = source
        self._window = window
        self._early: dict[int, RamBlock] = {}
        self._asked = 0
        self._limit = len(keys)
        self._told = 0
        self._emit: Callable[[Part], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def nbytes(self) -> int:
        """Payload bytes under lease."""
        return sum(block.meta.nbytes for block in self.blocks)

    def begin(self, deadline: float | None, emit: Callable[[Part], None]) -> None:
        """Take what is there; ask for the rest when there is time (seconds from now; None: don't wait)."""
        self._emit = emit
        for index in range(self._limit):
            block = self._source.take_ready(self, index)
            if block is None:
                break
            self.blocks.append(block)
        self._asked = len(self.blocks)
        if self._asked == self._limit:
            self._finish(None)
        elif deadline is None:
            self._finish("not_in_ram")
        else:
            self._timer = asyncio.get_running_loop().call_later(deadline, self._finish, "deadline")
            self.advance()
            if not self.finished:
                self._tell(last=False)

    def advance(self) -> None:
        """Ask for what fits the window; called again when there is room."""
        while not self.finished and self._asked < self._limit and self._asked < len(self.blocks) + self._window:
            index = self._asked
            block = self._source.take_ready(self, index)
            if block is not None:
                self._asked += 1
                self._place(index, block)
                continue
            refusal = self._source.ask_for(self, index)
            if refusal == "wait":
                return
            self._asked += 1
            if refusal is not None:
                self.failed(index, refusal)

    def arrived(self, index: int, block: RamBlock) -> None:
        """Block ``index`` is readable and pinned for this load."""
        if self.finished or index >= self._limit:
            self._source.give_back(self, [block])
            return
        self._place(index, block)
        self._tell(last=False)
        self.advance()

    def failed(self, index: int, reason: str) -> None:
        """Block ``index`` can't be had: the load ends before it."""
        if self.finished or index >= self._limit:
            return
        self._limit = index
        self.stopped = reason
        beyond = [block for at, block in self._early.items() if at >= index]
        self._early = {at: block for at, block in self._early.items() if at < index}
        self._source.give_back(self, beyond)
        if len(self.blocks) >= self._limit:
            self._finish(reason)

    def release(self) -> None:
        """Give all back."""
        if self.released:
            return
        if not self.finished:
            self._finish("released")
        self.released = True
        self._source.give_back(self, self.blocks)

    def _place(self, index: int, block: RamBlock) -> None:
        self._early[index] = block
        while (head := self._early.pop(len(self.blocks), None)) is not None:
            self.blocks.append(head)
        if len(self.blocks) >= self._limit:
            self._finish(self.stopped)

    def _finish(self, reason: str | None) -> None:
        if self.finished:
            return
        self.finished = True
        self.stopped = reason
        if self._timer is not None:
            self._timer.cancel()
        early = list(self._early.values())
        self._early.clear()
        self._source.give_back(self, early)
        self._source.load_finished(self)
        self._tell(last=True)

    def _tell(self, *, last: bool) -> None:
        new = self.blocks[self._told :]
        if self._emit is not None and (new or last):
            self._told = len(self.blocks)
            self._emit(Part(new, last, self.stopped if last else None))
