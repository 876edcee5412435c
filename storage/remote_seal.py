"""What stands on the server under which name, and who can read it.

Without a key, names are the blocks' keys and bytes are stored as they are. With a pre-shared key, names are a keyed hash
(nobody can test a guessed prompt against them) and headers and pieces are sealed with AES-256-GCM: the server's operator
neither reads a prompt back nor makes one up. All keys are derived from the one in the key file by HKDF-SHA256 (RFC 5869).

A header is sealed under a random 96-bit nonce. The pieces of one write are sealed under a key of their own, derived from
the header's random 16-byte ``write_id``, with the piece's number as nonce: no nonce is ever used twice. The name is
authenticated with the bytes, so that nothing can be moved to another place.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from omlxd.storage.codec import Buffer

PREFIX = b"omlxd:"
"""Every name begins with it: ``~omlxd:*`` is the pattern for an access rule."""
WRITE_ID_BYTES = 16
MIN_KEY_BYTES = 32
_NONCE_BYTES = 12


class Unsealed(Exception):
    """Bytes that nobody with our key has put there."""


class Seal(Protocol):
    """How names and bytes look on the server."""

    overhead: int
    """Bytes that a sealed piece is longer."""

    def name(self, key: bytes) -> bytes:
        """Of the block's header. In braces what places it in a cluster: header and pieces are on one node."""

    def seal_header(self, name: bytes, header: bytes) -> bytes:
        """A header as it is stored."""

    def open_header(self, name: bytes, sealed: bytes) -> bytes:
        """And back. Raises ``Unsealed``."""

    def pieces(self, write_id: bytes) -> PieceSeal:
        """For the pieces of one write."""


class PieceSeal(Protocol):
    """The pieces of one write."""

    def seal(self, number: int, name: bytes, piece: Buffer) -> Buffer:
        """A piece as it is stored."""

    def open(self, number: int, name: bytes, sealed: Buffer) -> Buffer:
        """And back. Raises ``Unsealed``."""


def piece_name(name: bytes, write_id: bytes, number: int) -> bytes:
    """Of a block's piece. Pieces of two writes of one block do not meet."""
    return b"%b:%b:%d" % (name, write_id, number)


def _placed(ident: bytes) -> bytes:
    return b"%b{%02x}:%b" % (PREFIX, ident[0], ident)


def tag_of(name: bytes) -> int:
    """Which of the 256 groups of names it belongs to; a group is on one node of a cluster."""
    return int(name[len(PREFIX) + 1 : len(PREFIX) + 3], 16)


class Plain:
    """No key: bytes are as they are."""

    overhead = 0

    def name(self, key: bytes) -> bytes:
        """See ``Seal``."""
        return _placed(key)

    def seal_header(self, name: bytes, header: bytes) -> bytes:
        """See ``Seal``."""
        return header

    def open_header(self, name: bytes, sealed: bytes) -> bytes:
        """See ``Seal``."""
        return sealed

    def pieces(self, write_id: bytes) -> PieceSeal:
        """See ``Seal``."""
        return _PlainPieces()


class _PlainPieces:
    def seal(self, number: int, name: bytes, piece: Buffer) -> Buffer:
        return piece

    def open(self, number: int, name: bytes, sealed: Buffer) -> Buffer:
        return sealed


class Keyed:
    """Sealed under a pre-shared key."""

    overhead = 16

    def __init__(self, secret: bytes, *, randomness: Callable[[int], bytes] = os.urandom) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._names = _derive(secret, b"omlxd remote names")
        self._header = AESGCM(_derive(secret, b"omlxd remote headers"))
        self._pieces = _derive(secret, b"omlxd remote pieces")
        self._randomness = randomness

    def name(self, key: bytes) -> bytes:
        """See ``Seal``."""
        return _placed(hashlib.blake2b(key, key=self._names, digest_size=32).digest())

    def seal_header(self, name: bytes, header: bytes) -> bytes:
        """See ``Seal``."""
        nonce = self._randomness(_NONCE_BYTES)
        return nonce + self._header.encrypt(nonce, header, name)

    def open_header(self, name: bytes, sealed: bytes) -> bytes:
        """See ``Seal``."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._header.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], name)
        except (InvalidTag, ValueError):
            raise Unsealed("the header was not sealed with this key") from None

    def pieces(self, write_id: bytes) -> PieceSeal:
        """See ``Seal``."""
        return _KeyedPieces(_derive(self._pieces, b"omlxd remote write " + write_id))


class _KeyedPieces:
    def __init__(self, secret: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(secret)

    def seal(self, number: int, name: bytes, piece: Buffer) -> Buffer:
        return self._cipher.encrypt(number.to_bytes(_NONCE_BYTES, "big"), piece, name)

    def open(self, number: int, name: bytes, sealed: Buffer) -> Buffer:
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(number.to_bytes(_NONCE_BYTES, "big"), sealed, name)
        except (InvalidTag, ValueError):
            raise Unsealed(f"piece {number} was not sealed with this key") from None


def _derive(secret: bytes, purpose: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose).derive(secret)


def read_key_file(path: Path) -> bytes:
    """The pre-shared key. ``ValueError`` in words for a file that is missing, short, or readable by others."""
    try:
        mode = path.stat().st_mode
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"the key file {path} cannot be read: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ValueError(f"the key file {path} can be read by others: chmod 600 {path}")
    if len(secret) < MIN_KEY_BYTES:
        raise ValueError(
            f"the key file {path} has {len(secret)} bytes, {MIN_KEY_BYTES} are the least: openssl rand -hex 32 > {path}"
        )
    return secret
