"""A circuit breaker for one server: after failures nobody waits for it, until a probe has found it well again.

Loop thread only. After M. Nygard, *Release It!*, "Circuit Breaker".
"""

from __future__ import annotations

from collections.abc import Callable

FAILURES = 3
"""So many timeouts in a row open it; what is certain (refused, unreachable) opens it at once."""
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 15.0
DOUBTFUL = frozenset({"slow"})


class Breaker:
    """Closed while the server answers; open, as at first: it is left alone but for a probe now and then."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.state = "connecting"
        """``ok``, ``connecting`` before the first probe, or what is wrong: ``gone``, ``slow``, ``refused``, ..."""
        self.reason = "it has not been reached yet"
        self.opened = 0
        """How often it has opened."""
        self._clock = clock
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._next_probe = 0.0
        self._probing = False

    @property
    def closed(self) -> bool:
        """May the server be used?"""
        return self.state == "ok"

    def succeeded(self, *, probe: bool = False) -> None:
        """It has answered in time. After a ``probe`` it has yet to show that it answers more than that."""
        if self.closed or not probe:
            self._pause = FIRST_PAUSE
        self._failures = 0
        self._probing = False
        self.state, self.reason = "ok", ""

    def failed(self, state: str, reason: str) -> bool:
        """It has not; did that open the breaker?"""
        self._failures += 1
        self._probing = False
        was_closed = self.closed
        if was_closed and state in DOUBTFUL and self._failures < FAILURES:
            return False
        self.state, self.reason = state, reason
        self._next_probe = self._clock() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self.opened += was_closed
        return was_closed

    def probe_due(self) -> bool:
        """Is it time to try? True once; ``succeeded`` or ``failed`` must follow."""
        if self.closed or self._probing or self._clock() < self._next_probe:
            return False
        self._probing = True
        return True
