"""Histograms of what takes or lasts how long."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

FAST_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Bounds for what an engine waits for."""
LONG_SECONDS = (1.0, 10.0, 60.0, 300.0, 900.0, 3_600.0, 14_400.0, 43_200.0, 86_400.0, 259_200.0, 604_800.0)
"""Bounds for what passes between two uses: a second to a week."""


class Histogram:
    """Counts of observations by upper bound; constant memory, a microsecond an observation."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, ``times`` times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """All observations."""
        return sum(self._counts)

    def cumulative(self) -> list[int]:
        """How many were at or under each bound, and how many there were in all."""
        total = 0
        found = []
        for count in self._counts:
            total += count
            found.append(total)
        return found
