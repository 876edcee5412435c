"""What a client asks and does, step by step, without any I/O.

What takes one request is a :class:`Question`. What takes more is a generator: it yields what is to be asked and is sent
the answer, so the blocking and the asyncio client run the same steps. An operation that is refused gets the error
thrown in where it asked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

from omlxd.errors import OmlxdError
from omlxd.protocol import Message
from omlxd.results import Hit
from omlxd.storage.blocks import HASH_BYTES, block_key
from omlxd.storage.chain import ExtraKey, Namespace, Tokens, chain_hashes
from omlxd.storage.layout import Layout

if TYPE_CHECKING:
    import mlx.core as mx

    from omlxd.holding import Holding

    Payload = bytes | bytearray | memoryview | Sequence[mx.array | None]

MISS, PENDING, RAM, SSD, REMOTE = range(5)
_PENDING = bytes([PENDING])
DEFAULT_LOAD_SECONDS = 30.0
DEFAULT_STORE_SECONDS = 2.0
GRACE_SECONDS = 1.0
"""How much longer than the deadline that the daemon was given a client waits for its answer."""
CHAINS = "chains"
"""The capability of a daemon that remembers a chain which is stored in several requests."""
HEAD_GROUP = bytes(4)
_HASH_LENGTHS = {HASH_BYTES}

T = TypeVar("T")
Ranges: TypeAlias = "Sequence[tuple[int, ExtraKey]] | None"
"""Salts by where they begin: ``(start token, keys)``, ascending."""


@dataclass(slots=True)
class Ask:
    """Ask the daemon; the body of the last frame is sent back into the operation."""

    verb: str
    fields: Message
    space: SpaceCore | None = None
    timeout: float = 0.0
    """Seconds that the daemon itself may take; the client's own patience comes on top."""


@dataclass(slots=True)
class Question(Generic[T]):
    """One request about a namespace whose answer is all there is to it."""

    verb: str
    fields: Message
    """Without the namespace, which is the connection's to name."""
    read: Callable[[Message], T]
    """What the answer's body says."""
    timeout: float = 0.0
    """As of :class:`Ask`."""


@dataclass(slots=True)
class Work:
    """Move bytes: run ``steps`` in order. ``anywhere``: on any thread, rather than on the caller's."""

    steps: Sequence[Callable[[], None]]
    anywhere: bool = True


Operation = Generator[Ask | Work, Message, T]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the daemon said in its ``hello``."""

    boot: str
    pid: int
    max_frame: int
    max_reserve: int
    """Payload bytes that one connection may have reserved at once."""
    version: int = 1
    capabilities: frozenset[str] = field(default_factory=frozenset)


class Owner(Protocol):
    """What an operation needs of the connection that runs it."""

    @property
    def holding(self) -> Holding: ...  # noqa: D102
    @property
    def limits(self) -> Limits: ...  # noqa: D102
    @property
    def chains(self) -> Iterator[int]:
        """Numbers for chains, each given once."""


class SpaceCore:
    """A namespace on the engine's side: names blocks, knows their layout."""

    def __init__(
        self, namespace: Namespace, layout: Layout | None, model_path: str | os.PathLike[str] | None = None
    ) -> None:
        self.namespace = namespace
        self.model_path = None if model_path is None else os.path.abspath(model_path)
        self.layout = layout
        self.block_tokens = namespace.block_tokens
        self.id = namespace.id

    def registration(self) -> Message:
        """The fields of the verb ``namespace``."""
        fields: Message = {"descriptor": self.namespace.descriptor()}
        return fields if self.model_path is None else {**fields, "path": self.model_path}

    def hashes(
        self,
        tokens: Tokens,
        extra_keys: ExtraKey = None,
        extra_key_ranges: Ranges = None,
    ) -> list[bytes]:
        """The chain hash (32 bytes) of each full block of ``tokens``, head to tail."""
        return chain_hashes(
            self.id, tokens, self.block_tokens, extra_keys=extra_keys, extra_key_ranges=extra_key_ranges
        )

    def first_block(self, start: int) -> int:
        """The block that begins at token ``start``. ValueError when none does."""
        if start % self.block_tokens or start < 0:
            raise ValueError(f"start is token {start}; it must be a multiple of block_tokens ({self.block_tokens})")
        return start // self.block_tokens


def namespace_of(
    model: str, fingerprint: str, block_tokens: int, layout: Layout | None, salt: str | bytes | None
) -> Namespace:
    """The namespace of one model in one configuration; see ``Cache.namespace``."""
    raw = layout.to_bytes() if layout is not None else b""
    return Namespace(model=model, fingerprint=fingerprint, block_tokens=block_tokens, layout=raw, salt=salt)


def check_counts(hashes: Sequence[bytes], payloads: Sequence[Payload], start: int) -> None:
    """ValueError when there are more payloads than blocks from block ``start`` on."""
    if len(payloads) > max(0, len(hashes) - start):
        raise ValueError(
            f"{len(payloads)} payloads for {max(0, len(hashes) - start)} full blocks from block {start} on"
        )


def pack_keys(hashes: Sequence[bytes]) -> bytes:
    """Keys back to back, as the wire has them. ``ValueError`` for a hash of another length."""
    if set(map(len, hashes)) - _HASH_LENGTHS:
        odd = next(chain_hash for chain_hash in hashes if len(chain_hash) != HASH_BYTES)
        raise ValueError(f"a chain hash has {HASH_BYTES} bytes, this one has {len(odd)}: {odd[:8].hex()}")
    return HEAD_GROUP.join(hashes) + HEAD_GROUP if hashes else b""


def match(space: SpaceCore, hashes: Sequence[bytes], prefetch: bool = False) -> Question[Hit]:
    """How long a prefix could be restored."""

    def read(answer: Message) -> Hit:
        where: bytes = answer["where"]
        found = where.find(MISS)
        prefix = where if found < 0 else where[:found]
        storing = prefix.find(PENDING)
        pending = 0
        if storing >= 0:
            behind = prefix[storing:]
            pending = len(behind) - len(behind.lstrip(_PENDING))
            prefix = prefix[:storing]
        blocks, ram = len(prefix), prefix.count(RAM)
        remote = prefix.count(REMOTE) if ram < blocks else 0
        return Hit(blocks * space.block_tokens, blocks, ram, blocks - ram - remote, pending, remote)

    return Question("lookup", {"keys": pack_keys(hashes), "prefix": True, "prefetch": prefetch}, read)


def lookup(hashes: Sequence[bytes]) -> Question[list[bool]]:
    """For each hash: can its block be loaded?"""
    return Question("lookup", {"keys": pack_keys(hashes)}, lambda answer: [code >= RAM for code in answer["where"]])


def load_fields(hashes: Sequence[bytes], mode: str, timeout: float, prefill_tokens_per_s: float | None) -> Message:
    """The request for a lease on ``hashes``."""
    fields: Message = {"keys": pack_keys(hashes), "mode": mode, "timeout": timeout}
    if prefill_tokens_per_s is not None:
        fields["prefill_tokens_per_s"] = prefill_tokens_per_s
    return fields


def put(chain_hash: bytes, payload: bytes, parent: bytes | None, position: int) -> Question[bool]:
    """Store one block with its payload inline: for small blocks and clients that can't map memory."""
    fields: Message = {"keys": pack_keys([chain_hash]), "payload": payload, "position": position}
    if parent is not None:
        fields["parent"] = block_key(parent)
    return Question("put", fields, lambda answer: bool(answer["stored"] or answer["present"]))


def get(chain_hash: bytes, timeout: float) -> Question[bytes | None]:
    """One block's payload inline; None when it can't be had."""

    def read(answer: Message) -> bytes | None:
        payload = answer["payload"]
        if payload is not None and not isinstance(payload, bytes):
            raise OmlxdError(f"the daemon answered get with {type(payload).__name__}, not bytes")
        return payload

    return Question("get", {"keys": pack_keys([chain_hash]), "timeout": timeout}, read, timeout)


def undo(body: Message) -> tuple[str, Message] | None:
    """What to tell the daemon about an answer that nobody waits for any more: to take back what it gave."""
    lease = body.get("lease")
    if isinstance(lease, int):
        return "release", {"lease": lease}
    if body.get("slots"):
        return "complete_store", {"reservations": [slot[1] for slot in body["slots"]], "ok": False}
    return None
