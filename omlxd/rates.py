"""Rates over the last minutes, from counters that only grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

WINDOWS = (60, 300, 900)
"""Seconds that rates are given for: 1, 5 and 15 minutes."""

SAMPLE_SECONDS = 5.0


class Rates:
    """Samples of counters, kept for the longest window.

    Memory is bounded: one sample for each ``every`` seconds of the longest window, however often ``note`` is called.
    A window that reaches back before the first sample is cut to what is known.
    """

    def __init__(self, *, every: float = SAMPLE_SECONDS, longest: float = WINDOWS[-1]) -> None:
        self._every = every
        self._longest = longest
        self._samples: deque[tuple[float, dict[str, float]]] = deque()

    def note(self, now: float, totals: Mapping[str, float]) -> None:
        """Remember the counters as they are at ``now`` (seconds of a clock that never goes back)."""
        if self._samples and now - self._samples[-1][0] < self._every:
            return
        self._samples.append((now, dict(totals)))
        while len(self._samples) > 1 and now - self._samples[1][0] >= self._longest:
            self._samples.popleft()

    def over(self, seconds: float, now: float, totals: Mapping[str, float]) -> dict[str, float]:
        """How much each counter has grown over the last ``seconds``, as growth per second."""
        start = self._sample_at(now - seconds)
        if start is None or now <= start[0]:
            return dict.fromkeys(totals, 0.0)
        span = now - start[0]
        return {name: (value - start[1].get(name, 0.0)) / span for name, value in totals.items()}

    def _sample_at(self, when: float) -> tuple[float, dict[str, float]] | None:
        """The newest sample that is at least as old as ``when``; else the oldest one."""
        best = self._samples[0] if self._samples else None
        for sample in self._samples:
            if sample[0] > when:
                break
            best = sample
        return best
