"""Reading the fields of a request: typed, bounded, with an error that names field, value and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omlxd.protocol import KEY_BYTES, Code, Message, RequestError

MAX_KEYS = 65_536
MAX_BLOCK_BYTES = 4 << 30
MAX_TIMEOUT_SECONDS = 600.0


def _refuse(name: str, value: object, allowed: str, code: Code = Code.BAD_REQUEST) -> RequestError:
    shown = repr(value)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    return RequestError(code, f"{name} is {shown}; allowed: {allowed}")


class Fields:
    """One request's fields. Every reader raises RequestError for a value that it can't take."""

    __slots__ = ("_map",)

    def __init__(self, message: Message) -> None:
        self._map = message

    def __contains__(self, name: str) -> bool:
        return self._map.get(name) is not None

    def raw(self, name: str) -> Any:  # msgpack's own types; the caller checks
        """The value as it came, or None."""
        return self._map.get(name)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number from ``low`` to ``high``."""
        value = self._map.get(name, default)
        if type(value) is not int or not low <= value <= high:
            raise _refuse(name, value, f"a whole number from {low} to {high}")
        return value

    def seconds(self, name: str, default: float) -> float:
        """A time in seconds, 0 to 600. What is longer is cut to 600: nothing here waits for ever."""
        value = self._map.get(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not value >= 0:
            raise _refuse(name, value, f"seconds from 0 to {MAX_TIMEOUT_SECONDS:.0f}")
        return min(float(value), MAX_TIMEOUT_SECONDS)

    def number(self, name: str) -> float | None:
        """A positive number, or None where the field is absent."""
        value = self._map.get(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not 0 < value < 1e18:
            raise _refuse(name, value, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or False."""
        value = self._map.get(name, default)
        if type(value) is not bool:
            raise _refuse(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None, *, longest: int = 4096) -> str:
        """Text of at most ``longest`` characters."""
        value = self._map.get(name, default)
        if type(value) is not str or len(value) > longest:
            raise _refuse(name, value, f"text of at most {longest} characters")
        return value

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        """One of ``allowed``."""
        value = self._map.get(name, default)
        if value not in allowed:
            raise _refuse(name, value, ", ".join(allowed))
        return str(value)

    def blob(self, name: str, *, longest: int) -> bytes:
        """Bytes, at most ``longest``."""
        value = self._map.get(name)
        if type(value) is not bytes:
            raise _refuse(name, value, "bytes")
        if len(value) > longest:
            raise RequestError(Code.TOO_LARGE, f"{name} has {len(value)} bytes; allowed: {longest}")
        return value

    def keys(self, name: str = "keys", *, most: int = MAX_KEYS) -> list[bytes]:
        """Keys, sent back to back: 36 bytes each."""
        value = self._map.get(name)
        if type(value) is not bytes or len(value) % KEY_BYTES:
            got = f"{len(value)} bytes" if type(value) is bytes else value
            raise _refuse(name, got, f"bytes, {KEY_BYTES} for each key")
        if len(value) > most * KEY_BYTES:
            raise RequestError(Code.TOO_MANY, f"{name} holds {len(value) // KEY_BYTES} keys; at most {most} at once")
        return [value[at : at + KEY_BYTES] for at in range(0, len(value), KEY_BYTES)]

    def sizes(self, name: str, count: int) -> list[int]:
        """Payload sizes in bytes: one number for all ``count`` blocks, or a list of that many."""
        value = self._map.get(name)
        sizes = [value] * count if type(value) is int else value
        if type(sizes) is not list or len(sizes) != count:
            raise _refuse(name, value, f"a size in bytes, or a list of {count}")
        for size in sizes:
            if type(size) is not int or not 0 < size <= MAX_BLOCK_BYTES:
                raise _refuse(name, size, f"payload bytes from 1 to {MAX_BLOCK_BYTES}", Code.TOO_LARGE)
        return sizes

    def numbers(self, name: str, *, most: int = MAX_KEYS) -> list[int]:
        """A list of whole numbers, none negative."""
        value = self._map.get(name)
        if type(value) is not list or len(value) > most or any(type(n) is not int or n < 0 for n in value):
            raise _refuse(name, value, f"a list of at most {most} whole numbers, none negative")
        return value
