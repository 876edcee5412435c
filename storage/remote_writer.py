"""Blocks on their way to the remote tier: behind, each once, at a bounded rate.

The queue holds keys, not bytes: a block's payload is held in place only while it is being sent, and when it has left all
local tiers before its turn came, it is dropped and counted. Loop thread only; sending runs on a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from omlxd.storage.blocks import BlockMeta

log = logging.getLogger(__name__)

QUEUED = 65_536
BATCH = 64
"""Keys whose headers are looked at together, before any of them is sent."""
IDLE_SECONDS = 0.25
"""How often a queue that cannot be sent looks whether it can again."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Which blocks are worth the way."""

    kind: str = "everything"
    """``everything``, ``second_touch``, ``prefix``."""
    tokens: int = 0
    """Of ``prefix``: so many from the head of a chain."""

    @classmethod
    def parse(cls, text: str) -> Admission:
        """``everything``, ``second_touch`` or ``prefix:N``. ``ValueError`` otherwise."""
        kind, _, tokens = text.partition(":")
        if kind in ("everything", "second_touch") and not tokens:
            return cls(kind)
        if kind == "prefix" and tokens.isdigit() and int(tokens) > 0:
            return cls(kind, int(tokens))
        raise ValueError('write "everything", "second_touch", or "prefix:8192" for the first 8,192 tokens of a chain')

    def takes(self, meta: BlockMeta, block_tokens: int, *, asked_again: bool) -> bool:
        """Is this block to be sent?"""
        if self.kind == "second_touch":
            return asked_again
        if self.kind == "prefix":
            return (meta.position + 1) * block_tokens <= self.tokens
        return True


EVERYTHING = Admission()


class Allowance:
    """A token bucket: so many bytes a second, at most a second's worth at once; what is over is waited for afterwards."""

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        """``rate``: bytes a second; 0: no bound."""
        self.rate = rate
        self._clock = clock
        self._has = 0.0
        self._since = clock()

    def owed(self) -> float:
        """Seconds to wait before anything more is sent."""
        if not self.rate:
            return 0.0
        now = self._clock()
        self._has = min(self.rate, self._has + (now - self._since) * self.rate)
        self._since = now
        return max(0.0, -self._has) / self.rate

    def spend(self, nbytes: int) -> None:
        """So many bytes have been sent."""
        if self.rate:
            self._has -= nbytes


class WriteQueue:
    """Keys to be sent, the oldest first; heads of chains come before their tails, as they were stored."""

    def __init__(
        self,
        *,
        send: Callable[[Sequence[bytes]], Awaitable[None]],
        ready: Callable[[], bool],
        counts: Counter[str],
    ) -> None:
        """``send`` takes a batch to the server or drops it; ``ready``: may anything be sent now?"""
        self._queue: OrderedDict[bytes, None] = OrderedDict()
        self._send = send
        self._ready = ready
        self._counts = counts
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._sending = 0

    def __len__(self) -> int:
        return len(self._queue) + self._sending

    def __contains__(self, key: bytes) -> bool:
        return key in self._queue

    def add(self, key: bytes) -> None:
        """Send it when its turn comes; one that waits already does not wait twice."""
        if key in self._queue:
            return
        if len(self._queue) >= QUEUED:
            self._counts["dropped_queue_full"] += 1
            return
        self._queue[key] = None
        self._wake.set()

    def discard(self, key: bytes) -> None:
        """It need not be sent any more."""
        self._queue.pop(key, None)

    def put_back(self, keys: Sequence[bytes]) -> None:
        """These could not be sent: they are first again."""
        for key in reversed(keys):
            self._queue[key] = None
            self._queue.move_to_end(key, last=False)

    def start(self) -> None:
        """Begin to send, on the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="omlxd-remote-write")

    async def stop(self, seconds: float) -> None:
        """Go on for at most ``seconds``, while anything can be sent; what is left then is dropped."""
        if self._task is None:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while len(self) and self._ready() and loop.time() < deadline and not self._task.done():
            await asyncio.wait([self._task], timeout=0.02)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._counts["dropped_at_stop"] += len(self._queue)
        self._queue.clear()

    async def _run(self) -> None:
        while True:
            if not self._queue or not self._ready():
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), IDLE_SECONDS if self._queue else None)
                if not self._ready():
                    await asyncio.sleep(IDLE_SECONDS)
                continue
            batch = [self._queue.popitem(last=False)[0] for _ in range(min(BATCH, len(self._queue)))]
            self._sending = len(batch)
            try:
                await self._send(batch)
            except Exception:
                self._counts["dropped_error"] += len(batch)
                log.exception("%d blocks could not be sent to the remote tier", len(batch))
            finally:
                self._sending = 0


def block_tokens_of(descriptor: Mapping[str, object]) -> int:
    """Tokens of a block, as a namespace's descriptor says; 1 where it says nothing."""
    found = descriptor.get("block_tokens")
    return found if isinstance(found, int) and found > 0 else 1
