"""What every tier says of a block: its key, its size, and its place in a chain.

A block is named by its *key*: the 32-byte chain hash of its content and of everything before it,
then the index of its KV group as four big-endian bytes (so that the groups of one position sort
together, in order).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

HASH_BYTES = 32
GROUP_BYTES = 4
KEY_BYTES = HASH_BYTES + GROUP_BYTES
MAX_GROUP = (1 << (8 * GROUP_BYTES)) - 1


def block_key(chain_hash: bytes, group: int = 0) -> bytes:
    """Return the key of KV group ``group`` of the block named ``chain_hash`` (``KEY_BYTES`` long).

    Raises ``ValueError`` when the hash is not ``HASH_BYTES`` long or the group does not fit.
    """
    if len(chain_hash) != HASH_BYTES:
        raise ValueError(f"a chain hash has {HASH_BYTES} bytes, this one has {len(chain_hash)}")
    if not 0 <= group <= MAX_GROUP:
        raise ValueError(f"KV group {group} is not between 0 and {MAX_GROUP}")
    return bytes(chain_hash) + group.to_bytes(GROUP_BYTES, "big")


def split_key(key: bytes) -> tuple[bytes, int]:
    """Return ``(chain hash, KV group)`` of a key; ``ValueError`` when it is not ``KEY_BYTES`` long."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a block key has {KEY_BYTES} bytes, this one has {len(key)}")
    return bytes(key[:HASH_BYTES]), int.from_bytes(key[HASH_BYTES:], "big")


class Described(Protocol):
    """A block, in whatever tier."""

    @property
    def key(self) -> bytes: ...  # noqa: D102
    @property
    def namespace(self) -> bytes: ...  # noqa: D102
    @property
    def nbytes(self) -> int: ...  # noqa: D102
    @property
    def parent(self) -> bytes | None: ...  # noqa: D102
    @property
    def position(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """One block as every tier knows it.

    Raises ``ValueError`` for a key, namespace or parent of a wrong length, a negative size or
    position, and for a head with a parent: records come from a socket and from a disk, and a
    wrong one must not get further than this.
    """

    key: bytes
    """``KEY_BYTES`` long."""
    namespace: bytes
    """The 32-byte id of the namespace (``Namespace.id``)."""
    nbytes: int
    """Payload bytes, before any codec."""
    parent: bytes | None
    """Key of the block before it in the chain; None for the head (or where nobody said)."""
    position: int
    """Index in the chain; 0 is the head."""
    layout: bytes | None = None
    """``Layout.to_bytes()`` of an own layout, where it differs from the namespace's."""

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"a block key has {KEY_BYTES} bytes, this one has {len(self.key)}")
        if len(self.namespace) != HASH_BYTES:
            raise ValueError(f"a namespace id has {HASH_BYTES} bytes, this one has {len(self.namespace)}")
        if self.nbytes < 0:
            raise ValueError(f"a payload of {self.nbytes} bytes: it cannot be negative")
        if self.position < 0:
            raise ValueError(f"chain position {self.position}: the head is 0")
        if self.parent is not None and len(self.parent) != KEY_BYTES:
            raise ValueError(f"a parent's key has {KEY_BYTES} bytes, this one has {len(self.parent)}")
        if self.parent is not None and self.position == 0:
            raise ValueError("position 0 with a parent: the head of a chain has none")
