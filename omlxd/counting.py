"""Numbers of things in words for people."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """``1 block``, ``2,345 blocks``: ``thing`` is the word for one, whose plural takes an s."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
