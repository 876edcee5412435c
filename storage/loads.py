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

WAIT = "wait"
"""What ``Source.ask_for`` answers when the block may be had later."""


@dataclass(slots=True)
class Part:
    """Some more blocks of a load, in the chain's order; ``stopped`` says why no more follow, when ``last``."""

    lease: int
    """The load's id."""
    blocks: list[RamBlock]
    last: bool
    stopped: str | None = None


class Source(Protocol):
    """What a load needs of the store."""

    def take_ready(self, load: Load, keys: Sequence[bytes], *, past_holes: bool = False) -> list[RamBlock | None]:
        """Pin and return the blocks of ``keys`` that are readable in RAM, up to the first that is not.

        ``past_holes``: up to the first that can't be had at all; None stands for one that has to be brought.
        """

    def ask_for(self, load: Load, index: int) -> str | None:
        """Have the block brought; ``load.arrived`` or ``load.failed`` follows. Or why it can't be; ``WAIT``: try later."""

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
        self.restored: dict[bytes, str] = {}
        """Keys that came from a lower tier for this load, and its name."""
        self.stopped: str | None = None
        self.finished = False
        self.released = False
        self.revoked = False
        """Did an operator end it? Its blocks then stay until the client gives them back, or its time for that is over."""
        self.noted = True
        """Does the policy know of the blocks that it has?"""
        self.starved = False
        """Does it wait for room?"""
        self.compute_blocks_per_s = compute_blocks_per_s
        """How many blocks a second the engine computes by itself; 0: it did not say."""
        self.counted = counted
        """Is it an engine's, and so a hit or a miss?"""
        self.misses_of = misses_of
        """The namespace whose misses the keys are that cannot be had; None: nobody's, or counted already."""
        self._source = source
        self._window = window
        self._early: dict[int, RamBlock] = {}
        self._under_way: set[int] = set()
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
        self._take_what_is_there(past_holes=deadline is not None)
        if len(self.blocks) == self._limit:
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
        self.starved = False
        while not self.finished and self._asked < self._limit and len(self._under_way) < self._window:
            index = self._asked
            if index < len(self.blocks) or index in self._early or index in self._under_way:
                self._asked += 1
                continue
            ready = self._source.take_ready(self, self.keys[index : index + 1])
            if ready and ready[0] is not None:
                self._asked += 1
                self._place(index, ready[0])
                continue
            self._under_way.add(index)
            refusal = self._source.ask_for(self, index)
            if refusal == WAIT:
                self._under_way.discard(index)
                return
            self._asked += 1
            if refusal is not None:
                self.failed(index, refusal)

    def arrived(self, index: int, block: RamBlock) -> None:
        """Block ``index`` is readable and pinned for this load."""
        self._under_way.discard(index)
        if self.finished or index >= self._limit:
            self._source.give_back(self, [block])
            return
        self._place(index, block)
        self._tell(last=False)
        self.advance()

    def failed(self, index: int, reason: str) -> None:
        """Block ``index`` can't be had: the load ends before it."""
        self._under_way.discard(index)
        if self.finished or index >= self._limit:
            return
        self._limit = index
        self.stopped = reason
        self._drop_early(index)
        if len(self.blocks) >= self._limit:
            self._finish(reason)

    def give_up_tail(self, index: int) -> bool:
        """Let go of blocks behind ``index`` that were taken early, so that what comes before them gets room. Were there any?"""
        self._asked = min(self._asked, index + 1)  # they are to be had again
        return self._drop_early(index + 1)

    def end(self, reason: str) -> None:
        """Nothing more comes; what has come stays leased."""
        if not self.finished:
            self._finish(reason)

    def release(self) -> None:
        """Give all back."""
        if self.released:
            return
        self.end("released")
        self.released = True
        self._source.give_back(self, self.blocks)

    def _take_what_is_there(self, *, past_holes: bool) -> None:
        """Pin what is in RAM; also what lies behind a hole, or the restore of the hole might evict it."""
        for index, block in enumerate(self._source.take_ready(self, self.keys, past_holes=past_holes)):
            if index == len(self.blocks) and block is not None:
                self.blocks.append(block)
            elif block is not None:
                self._early[index] = block

    def _drop_early(self, index: int) -> bool:
        beyond = [block for at, block in self._early.items() if at >= index]
        if beyond:
            self._early = {at: block for at, block in self._early.items() if at < index}
            self._source.give_back(self, beyond)
        return bool(beyond)

    def _place(self, index: int, block: RamBlock) -> None:
        self._early[index] = block
        self._move_up()
        if len(self.blocks) >= self._limit:
            self._finish(self.stopped)

    def _move_up(self) -> None:
        while (head := self._early.pop(len(self.blocks), None)) is not None:
            self.blocks.append(head)

    def _finish(self, reason: str | None) -> None:
        if self.finished:
            return
        self.finished = True
        self.starved = False
        self.stopped = reason
        if self._timer is not None:
            self._timer.cancel()
        self._drop_early(0)
        self._tell(last=True)
        self._source.load_finished(self)

    def _tell(self, *, last: bool) -> None:
        new = self.blocks[self._told :]
        if self._emit is not None and (new or last):
            self._told = len(self.blocks)
            self._emit(Part(self.id, new, last, self.stopped if last else None))
