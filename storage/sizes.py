"""One parser for every size a person or a program gives: flags, configuration, the protocol.

Whole bytes are counted with Python integers and fractions are exact, so ``1.5GiB`` means the same
everywhere and no float rounding decides about a byte.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_BYTES = (1 << 63) - 1
"""The largest size: what a signed 64-bit file offset can hold."""

MIN_SSD_BYTES = 4 << 20
"""The smallest limit of an SSD tier: below it LMDB's own pages would leave no room for blocks."""

_DECIMAL = {prefix: 1000**power for power, prefix in enumerate(["", "k", "m", "g", "t", "p", "e"])}
_BINARY = {prefix: 1024**power for power, prefix in enumerate(["", "k", "m", "g", "t", "p", "e"])}
_UNITS = {
    "": 1,
    "b": 1,
    **{prefix: n for prefix, n in _DECIMAL.items() if prefix},
    **{prefix + "b": n for prefix, n in _DECIMAL.items() if prefix},
    **{prefix + "i": n for prefix, n in _BINARY.items() if prefix},
    **{prefix + "ib": n for prefix, n in _BINARY.items() if prefix},
}
_SIZE = re.compile(r"(?P<number>[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?) ?(?P<unit>%|[a-z]*)", re.ASCII | re.IGNORECASE)

_LONGEST = 64  # characters; Python refuses to read very long numbers, with an error that is not ours

ALLOWED = (
    "bytes (1048576, 1_048_576), a number with a unit: k, M, G, T (or kB, MB, GB, TB) mean powers "
    "of 1000, KiB, MiB, GiB, TiB powers of 1024 (8GiB, 1.5 GiB, 500MB), a percentage of what there "
    "is (20%), auto, or 0 to switch it off"
)
"""What a size may look like; part of every error."""


def parse_size(text: str | int, *, total: int | None = None, auto: int | None = None) -> int:
    """Return ``text`` in bytes; 0 means "off".

    ``total`` is what a percentage is a percentage of, in bytes; ``auto`` is what ``auto`` stands
    for. Where one is None, that form is refused. Case does not matter, a fraction of a byte is cut
    off. Raises ``ValueError`` that names the value, what is wrong with it and what is allowed.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise _refusal(text, "neither a whole number nor text")
    if isinstance(text, int):
        return _within_range(text, text)
    stripped = text.strip()
    if not stripped:
        raise _refusal(text, "empty")
    if stripped.lower() == "auto":
        if auto is None:
            raise _refusal(text, "there is no automatic value for this setting")
        return _within_range(text, auto)
    if stripped.startswith("-"):
        raise _refusal(text, "negative")
    match = _SIZE.fullmatch(stripped)
    if match is None or len(stripped) > _LONGEST:
        raise _refusal(text, "not a size")
    number = Fraction(match["number"].replace("_", ""))
    unit = match["unit"].lower()
    if unit == "%":
        return _share(text, number, total)
    if unit not in _UNITS:
        raise _refusal(text, f"unknown unit {match['unit']!r}")
    if _UNITS[unit] == 1 and "." in match["number"]:
        raise _refusal(text, "a fraction of a byte")
    nbytes = int(number * _UNITS[unit])
    if nbytes == 0 and number > 0:
        raise _refusal(text, "less than a byte; write 0 for off")
    return _within_range(text, nbytes)


BLOCKS_ALLOWED = (
    "a number of blocks (5000), a percentage of the different blocks (5%), or bytes with a unit (8GiB, 500MB), for which "
    "it must be known how large a block is"
)
"""What a number of blocks may look like; part of every error."""


def parse_blocks(text: str, *, distinct: int, block_bytes: int | None) -> int:
    """Return ``text`` as a number of blocks, at least 1.

    ``distinct`` is what a percentage is a percentage of; ``block_bytes`` is what a block takes, None where that is not
    known. Raises ``ValueError`` that names the value, what is wrong with it and what is allowed.
    """
    stripped = text.strip()
    match = _SIZE.fullmatch(stripped)
    if match is None or len(stripped) > _LONGEST:
        raise _no_blocks(text, "not a size")
    unit = match["unit"].lower()
    if not unit and "." in stripped:
        raise _no_blocks(text, "a fraction of a block")
    try:
        number = parse_size(stripped, total=distinct)
    except ValueError as error:
        raise _no_blocks(text, str(error).split(": ", 1)[1].split(". Allowed")[0]) from None
    if unit not in ("", "%"):
        if block_bytes is None:
            raise _no_blocks(text, "bytes, and how many a block has is not known: give --block-bytes")
        number //= block_bytes
    if number < 1:
        raise _no_blocks(text, "less than one block")
    return number


def format_size(nbytes: int) -> str:
    """Return ``nbytes`` for people: ``8.0 GiB``, ``512 B``; binary units, as ``parse_size`` reads."""
    if nbytes < 0:
        return "-" + format_size(-nbytes)
    if nbytes < 1024:
        return f"{nbytes} B"
    tenths, unit = 0, ""
    for prefix in "KMGTPE":
        unit = prefix + "iB"
        # Round half up in whole tenths: 1023.95 KiB must read 1.0 MiB, never 1024.0 KiB.
        scale = _BINARY[prefix.lower()]
        tenths = (nbytes * 10 + scale // 2) // scale
        if tenths < 10240:
            break
    return f"{tenths // 10}.{tenths % 10} {unit}"


def _no_blocks(text: str, why: str) -> ValueError:
    return ValueError(f"size {text!r}: {why}. Allowed: {BLOCKS_ALLOWED}.")


def _share(text: str, percent: Fraction, total: int | None) -> int:
    if percent > 100:
        raise _refusal(text, "more than 100%")
    if total is None:
        raise _refusal(text, "a percentage, but there is no total to take it of")
    return int(percent * total / 100)


def _within_range(text: object, nbytes: int) -> int:
    if nbytes < 0:
        raise _refusal(text, "negative")
    if nbytes > MAX_BYTES:
        raise _refusal(text, f"more than {MAX_BYTES} bytes")
    return nbytes


def _refusal(text: object, why: str) -> ValueError:
    return ValueError(f"size {text!r}: {why}. Allowed: {ALLOWED}.")
