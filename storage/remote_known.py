"""What a remote tier remembers of its server's answers: this block is there, that one is not, each for a while.

Written on the loop's thread only; ``header`` may be read from any thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from omlxd.storage.remote_records import Header


@dataclass(frozen=True, slots=True)
class Memory:
    """For how long what is remembered, and how much."""

    present_seconds: float = 30.0
    absent_seconds: float = 2.0
    """How late a block that another machine stored just now may be found."""
    unanswered_seconds: float = 0.5
    """How long a key that the server did not answer for in time counts as absent."""
    most: int = 32_768
    """Keys; the oldest are forgotten first."""


class Known:
    """Answers by key."""

    def __init__(self, clock: Callable[[], float], memory: Memory) -> None:
        self.memory = memory
        self._clock = clock
        self._answers: OrderedDict[bytes, tuple[Header | None, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def __contains__(self, key: bytes) -> bool:
        """Is there a fresh answer, of either kind?"""
        answer = self._answers.get(key)
        return answer is not None and answer[1] > self._clock()

    def header(self, key: bytes) -> Header | None:
        """The block's header, where it is known to be there."""
        answer = self._answers.get(key)
        return answer[0] if answer is not None and answer[1] > self._clock() else None

    def present(self, headers: Iterable[Header]) -> None:
        """The server has these."""
        until = self._clock() + self.memory.present_seconds
        for header in headers:
            self._put(header.key, (header, until))

    def absent(self, keys: Iterable[bytes], *, answered: bool = True) -> None:
        """The server does not have these, or has not ``answered``."""
        seconds = self.memory.absent_seconds if answered else self.memory.unanswered_seconds
        until = self._clock() + seconds
        for key in keys:
            self._put(key, (None, until))

    def forget(self, keys: Iterable[bytes]) -> None:
        """Nothing is known of these."""
        for key in keys:
            self._answers.pop(key, None)

    def forget_all(self) -> None:
        """Nothing is known any more."""
        self._answers.clear()

    def _put(self, key: bytes, answer: tuple[Header | None, float]) -> None:
        self._answers[key] = answer
        self._answers.move_to_end(key)
        while len(self._answers) > self.memory.most:
            self._answers.popitem(last=False)
