"""Parts to bytes, one way only: what is hashed can be read in exactly one way.

Every part is a type tag (one byte), its length (eight little-endian bytes) and its bytes, so
``("ab", "c")`` and ``("a", "bc")``, ``1`` and ``"1"``, ``None`` and ``b""`` differ. Nothing here
depends on ``hash()``, ``str()`` of objects, the locale or the process.
"""

from __future__ import annotations

import hashlib

_NONE, _FALSE, _TRUE, _INT, _TEXT, _BYTES, _TUPLE = b"N", b"F", b"T", b"I", b"S", b"B", b"("

ALLOWED = "str, bytes, int, bool, None, or tuples of these"


def frame(part: object) -> bytes:
    """Return the canonical encoding of ``part``: str, bytes, int, bool, None, or tuples or lists of these.

    A list is the same as a tuple (JSON and msgpack know no tuples). Raises ``TypeError`` for
    anything else: a float has no one decimal text, an object no text of its own at all.
    """
    if part is None:
        return _framed(_NONE, b"")
    if part is True or part is False:
        return _framed(_TRUE if part else _FALSE, b"")
    if isinstance(part, int):
        return _framed(_INT, part.to_bytes(part.bit_length() // 8 + 1, "little", signed=True))
    if isinstance(part, str):
        return _framed(_TEXT, part.encode())
    if isinstance(part, (bytes, bytearray, memoryview)):
        return _framed(_BYTES, bytes(part))
    if isinstance(part, (tuple, list)):
        return _framed(_TUPLE, b"".join(map(frame, part)))
    raise TypeError(f"{part!r} is a {type(part).__name__}; what names a block is {ALLOWED}")


def bytes_header(nbytes: int) -> bytes:
    """Return what ``frame`` puts before ``nbytes`` bytes, for callers that frame many parts of one length."""
    return _BYTES + nbytes.to_bytes(8, "little")


def digest(domain: str, *parts: object) -> bytes:
    """Return the SHA-256 of the framed domain and parts: 32 bytes. Equal parts of two domains never meet."""
    return hashlib.sha256(b"".join(map(frame, (domain, *parts)))).digest()


def _framed(tag: bytes, payload: bytes) -> bytes:
    return tag + len(payload).to_bytes(8, "little") + payload
