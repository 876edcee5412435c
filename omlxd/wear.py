"""How long the flash lasts at the rate at which it is written."""

from __future__ import annotations

FULL_WRITES = 600
"""How often a consumer drive may be written in full: makers of TLC drives promise about 600 TB a TB of capacity."""

LITTLE = 1 << 20
"""Bytes a day under which there is nothing to say."""


def life_years(volume: int, written_per_day: float) -> float | None:
    """Years until ``written_per_day`` bytes have worn out a drive of ``volume`` bytes, were nothing else written.

    None when next to nothing is written, or the drive's size is not known. An estimate: write amplification by the
    drive works against it, and most drives outlast what is promised.
    """
    if not volume or written_per_day < LITTLE:
        return None
    return round(volume * FULL_WRITES / written_per_day / 365, 1)
