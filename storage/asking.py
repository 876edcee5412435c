"""Finding out what outer tiers have of the keys that no tier is known to have.

A tier is asked once for all keys of a prefix, and whoever else needs one of them meanwhile waits for the same answer. Loop
thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from omlxd.storage.tier import OuterTier


class Asking:
    """The questions under way."""

    def __init__(self, tiers: Sequence[OuterTier], *, on_answer: Callable[[], None]) -> None:
        """``on_answer`` is called after each question, whatever its outcome."""
        self._tiers = tiers
        self._on_answer = on_answer
        self._under_way: dict[bytes, asyncio.Task[None]] = {}

    def __contains__(self, key: bytes) -> bool:
        """Is the key being asked for?"""
        return key in self._under_way

    def begin(self, keys: Sequence[bytes], timeout: float) -> bool:
        """Ask for those of ``keys``, none of which is here, that nobody has answered for lately. Is any under way now?"""
        new = [key for key in keys if key not in self._under_way]
        for tier in self._tiers:
            unasked = tier.unasked(new)
            if unasked:
                task = asyncio.get_running_loop().create_task(self._ask(tier, unasked, timeout))
                self._under_way.update(dict.fromkeys(unasked, task))
        return any(key in self._under_way for key in keys)

    async def wait(self, keys: Sequence[bytes], timeout: float) -> None:
        """Until all of ``keys`` that are being asked for are answered for, at most ``timeout`` seconds."""
        tasks = {task for key in keys if (task := self._under_way.get(key)) is not None}
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)

    def stop(self) -> None:
        """Nobody waits any more."""
        for task in set(self._under_way.values()):
            task.cancel()

    async def _ask(self, tier: OuterTier, keys: Sequence[bytes], timeout: float) -> None:
        try:
            await tier.ask(keys, timeout)
        finally:
            for key in keys:
                self._under_way.pop(key, None)
            self._on_answer()
