"""Is the system short of memory, and how much of the RAM tier should then go?

Linux tells by pressure stall information (/proc/pressure/memory: the share of time in which tasks waited for memory) and by the
memory that is available; macOS by its own verdict, ``kern.memorystatus_vm_pressure_level``.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

PSI = Path("/proc/pressure/memory")


class Level(IntEnum):
    """How short memory is."""

    EASE = 0
    """Plenty: what was given up may be taken again."""
    ENOUGH = 1
    """Neither."""
    TIGHT = 2
    CRITICAL = 3


@dataclass(frozen=True, slots=True)
class Reading:
    """What the system says."""

    total: int
    """Bytes of memory."""
    available: int
    """Bytes that programs could get without swapping."""
    stalled: float | None = None
    """Percent of the last ten seconds in which everything waited for memory; None where that is not told."""
    verdict: int | None = None
    """macOS: 1 normal, 2 warning, 4 critical; None elsewhere."""

    @property
    def level(self) -> Level:
        """The reading as one word."""
        share = self.available / max(1, self.total)
        if (self.verdict or 0) >= 4 or share < 0.02:
            return Level.CRITICAL
        stalls = self.stalled or 0.0
        if (self.verdict or 0) >= 2 or share < 0.05 or (stalls > 10.0 and share < 0.15):
            return Level.TIGHT
        return Level.EASE if share > 0.12 and stalls < 1.0 else Level.ENOUGH


def read(memory: Callable[[], tuple[int, int]]) -> Reading:
    """Ask the system. ``memory`` gives (total, available) bytes."""
    total, available = memory()
    if sys.platform == "darwin":
        return Reading(total, available, verdict=_verdict())
    return Reading(total, available, stalled=_stalled())


def _stalled() -> float | None:
    try:
        lines = PSI.read_text().splitlines()
    except OSError:  # a kernel without it, or a container that hides it
        return None
    return parse_stalls(lines)


def parse_stalls(lines: list[str]) -> float | None:
    """The ``avg10`` of the line ``full``; None when there is none."""
    for line in lines:
        kind, *fields = line.split()
        if kind == "full":
            for field in fields:
                name, _, value = field.partition("=")
                if name == "avg10":
                    return float(value)
    return None


def _verdict() -> int | None:
    libc = ctypes.CDLL(None)
    level = ctypes.c_int(0)
    size = ctypes.c_size_t(ctypes.sizeof(level))
    failed = libc.sysctlbyname(
        b"kern.memorystatus_vm_pressure_level", ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return None if failed else level.value


class Governor:
    """How many bytes the RAM tier may have, given what is configured and what the system says.

    Gives way at once, by a quarter of what is used (a half when it is critical), and not again before that can have shown
    its effect. Takes back slowly, an eighth of the configured budget at a time, after half a minute of ease. Between the two is a
    band in which nothing changes, so that it does not swing.
    """

    PAUSE_SECONDS = 5.0
    CALM_SECONDS = 30.0
    LEAST_SHARE = 1 / 16

    def __init__(self, configured: int) -> None:
        self.budget = configured
        """What the tier may have now, in bytes."""
        self._configured = configured
        self._acted = float("-inf")
        self._calm_since: float | None = None

    @property
    def gives_way(self) -> bool:
        """Is the budget lower than what is configured?"""
        return self.budget < self._configured

    def configure(self, configured: int) -> None:
        """Another budget was configured; it holds at once, until there is pressure again."""
        self._configured = self.budget = configured
        self._calm_since = None

    def step(self, level: Level, used: int, now: float) -> int:
        """The budget from now on. ``used``: bytes that the tier has; ``now``: seconds of a clock that never goes back."""
        if level is not Level.EASE:
            self._calm_since = None
        if level >= Level.TIGHT:
            if now - self._acted >= self.PAUSE_SECONDS:
                keep = 0.5 if level is Level.CRITICAL else 0.75
                least = int(self._configured * self.LEAST_SHARE)
                self.budget = max(min(least, self.budget), int(min(self.budget, used) * keep))
                self._acted = now
        elif level is Level.EASE and self.gives_way:
            if self._calm_since is None:
                self._calm_since = now
            elif now - self._calm_since >= self.CALM_SECONDS:
                self.budget = min(self._configured, self.budget + self._configured // 8)
                self._calm_since = now
        return self.budget
