"""One parser for durations that people write."""

from __future__ import annotations

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}


def parse_duration(text: str | float) -> float:
    """Seconds of ``"50ms"``, ``"90s"``, ``"15m"``, ``"12h"``, ``"7d"``, ``"2w"``, or of a plain number of seconds.

    Raises ``ValueError`` for anything else, and for what is not more than 0.
    """
    if isinstance(text, bool):
        raise ValueError(f"{text!r} is no duration")
    number, unit = (text, 1.0) if isinstance(text, int | float) else _split(text.strip())
    seconds = number * unit
    if not 0 < seconds < float("inf"):
        raise ValueError(f"duration {text!r}: it must be more than 0, as in {_EXAMPLES}")
    return seconds


_EXAMPLES = '"90s", "15m", "12h", "7d" or "2w"'


def _split(text: str) -> tuple[float, float]:
    number = text.rstrip("mshdwMSHDW")
    unit = text[len(number) :].lower()
    try:
        return float(number), UNITS[unit] if unit else 1.0
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is no duration: write {_EXAMPLES}, or a number of seconds") from None
