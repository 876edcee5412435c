"""Why a prompt is, or is not, restored: block by block, and where it leaves the nearest stored chain.

The daemon knows blocks by hashes and never sees token ids, so this runs where the prompt is. What it
needs of the daemon is the :class:`Source` below.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from omlxd.engines.caches import KNOWN, Group
from omlxd.storage.chain import chain_hashes
from omlxd.storage.layout import Layout

Decode = Callable[[Sequence[int]], str]


class State(Enum):
    """What became of one block."""

    HOT = "hot"
    """In shared memory."""
    SSD = "SSD"
    REMOTE = "another machine"
    """On the Valkey server that machines share, as far as is known."""
    PENDING = "being stored"
    EVICTED = "evicted"
    """It was here. ``Fate.cause`` and ``Fate.at`` say why it left, and when."""
    REFUSED = "refused"
    """An engine offered it and it was declined. ``Fate.cause`` says why."""
    ELSEWHERE = "other namespace"
    """The same tokens are stored, but for another fingerprint, layout, block size or salt."""
    NEVER = "never stored"
    """As far as the daemon remembers."""

    @property
    def restorable(self) -> bool:
        """Could it be loaded now?"""
        return self in (State.HOT, State.SSD, State.REMOTE)


@dataclass(frozen=True, slots=True)
class Fate:
    """What the daemon says of one block."""

    state: State
    cause: str = ""
    at: float | None = None
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class NamespaceSeen:
    """A namespace that the daemon knows."""

    id: bytes
    model: str
    fingerprint: str
    block_tokens: int
    layout: bytes = b""
    salted: bool = False

    @property
    def group(self) -> Group:
        """The KV group that its layout is of, told from the tensors' names; attention for layouts of other engines."""
        if self.layout:
            for tensor in Layout.from_bytes(self.layout).tensors:
                leaf = KNOWN.get(tensor.name.partition(":")[2].partition("(")[0])
                if leaf is not None:
                    return leaf.group
        return Group.ATTENTION


class Source(Protocol):
    """What is asked of the daemon (or of a store whose daemon is not running)."""

    def namespaces(self) -> Sequence[NamespaceSeen]:
        """All that are known."""

    def fates(self, namespace: NamespaceSeen, hashes: Sequence[bytes]) -> Sequence[Fate]:
        """What became of each block: ``HOT``, ``SSD``, ``REMOTE``, ``PENDING``, ``EVICTED``, ``REFUSED`` or ``NEVER``."""

    def following(self, namespace: NamespaceSeen, chain_hash: bytes | None) -> int:
        """How many stored blocks come directly after a block; after None: heads of chains."""


@dataclass(frozen=True, slots=True)
class Line:
    """One block of the prompt."""

    index: int
    start: int
    """Its first token, ..."""
    stop: int
    """... and the one after its last."""
    fate: Fate
    text: str = ""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the prompt leaves the nearest stored chain: somewhere in tokens ``start`` to ``stop``."""

    start: int
    stop: int
    others: int
    """Stored blocks that follow the same past with other tokens. 0: the stored chain ends there."""
    text: str = ""
    """The prompt's text there, when there is a tokenizer."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The whole answer for one namespace."""

    namespace: NamespaceSeen
    tokens: int
    lines: Sequence[Line]
    restorable: int
    """Tokens of the longest prefix that could be restored now."""
    divergence: Divergence | None
    """None when every block of the prompt is stored."""
    tail: int
    """Tokens after the last whole block; never stored."""
    notes: Sequence[str] = field(default_factory=tuple)


def explain(
    source: Source,
    tokens: Sequence[int],
    *,
    fingerprint: str | None = None,
    model: str | None = None,
    decode: Decode | None = None,
) -> list[Explanation]:
    """Explain a prompt in every namespace of one model, most restorable first.

    ``fingerprint`` picks the namespaces of these very weights, ``model`` those of a model's name; with neither, all are looked
    at. Blocks that are missing there and stored in another namespace say so. Empty when no namespace fits.
    """
    known = list(source.namespaces())
    mine = [
        seen
        for seen in known
        if (fingerprint is None or seen.fingerprint == fingerprint) and (model is None or seen.model == model)
    ]
    answers = []
    for namespace in mine:
        others = [seen for seen in known if seen.id != namespace.id and seen.group is namespace.group]
        answers.append(_explain(source, tokens, namespace, others, decode))
    return sorted(answers, key=lambda answer: -answer.restorable)


def _explain(
    source: Source,
    tokens: Sequence[int],
    namespace: NamespaceSeen,
    others: Sequence[NamespaceSeen],
    decode: Decode | None,
) -> Explanation:
    size = namespace.block_tokens
    hashes = chain_hashes(namespace.id, tokens, size)
    fates = list(source.fates(namespace, hashes))
    if any(fate.state is State.NEVER for fate in fates):
        _look_elsewhere(source, tokens, namespace, others, fates)
    lines = [
        Line(index, index * size, (index + 1) * size, fate, _text(decode, tokens[index * size : (index + 1) * size]))
        for index, fate in enumerate(fates)
    ]
    first = next((index for index, fate in enumerate(fates) if not fate.state.restorable), len(fates))
    # The last token is always left to be computed.
    most = max(0, len(tokens) - 1) // size
    divergence = None
    if first < len(fates):
        after = hashes[first - 1] if first else None
        divergence = Divergence(first * size, (first + 1) * size, source.following(namespace, after), lines[first].text)
    return Explanation(
        namespace,
        len(tokens),
        lines,
        _restorable(namespace, fates, most) * size,
        divergence,
        len(tokens) - len(fates) * size,
        _notes(namespace, len(tokens), fates),
    )


def _restorable(namespace: NamespaceSeen, fates: Sequence[Fate], most: int) -> int:
    """In blocks, at most ``most``. State is whole at each of its blocks; other groups need every block before."""
    there = [fate.state.restorable for fate in fates[:most]]
    if namespace.group is Group.STATE:
        return max((index + 1 for index, restorable in enumerate(there) if restorable), default=0)
    return there.index(False) if False in there else len(there)


def _look_elsewhere(
    source: Source,
    tokens: Sequence[int],
    namespace: NamespaceSeen,
    others: Sequence[NamespaceSeen],
    fates: list[Fate],
) -> None:
    """Replace "never stored" where the same tokens are stored in another namespace of the same block size, the most alike."""

    def alike(other: NamespaceSeen) -> tuple[bool, bool, bool]:
        return (
            other.model == namespace.model,
            other.fingerprint == namespace.fingerprint,
            other.layout == namespace.layout,
        )

    for other in sorted(others, key=alike, reverse=True):
        if other.block_tokens != namespace.block_tokens:
            continue
        found = source.fates(other, chain_hashes(other.id, tokens, other.block_tokens))
        for index, fate in enumerate(found):
            if fate.state.restorable and fates[index].state is State.NEVER:
                fates[index] = Fate(State.ELSEWHERE, _difference(namespace, other))


def _difference(one: NamespaceSeen, other: NamespaceSeen) -> str:
    """What keeps two namespaces apart, the first thing that does."""
    if one.model != other.model:
        return f"stored for the model {other.model}"
    if one.fingerprint != other.fingerprint:
        return f"stored for other weights or settings of {other.model} (fingerprint {other.fingerprint[:12]})"
    if one.layout != other.layout:
        return "stored in another precision or with other cache classes"
    return "stored with another salt"


def _notes(namespace: NamespaceSeen, count: int, fates: Sequence[Fate]) -> list[str]:
    notes = []
    if count < namespace.block_tokens:
        notes.append(f"the prompt has {count} tokens, a block {namespace.block_tokens}: it is too short to be kept")
    elif count % namespace.block_tokens == 0 and fates:
        notes.append(
            "the prompt ends with a block: that block is computed again, to give the first token of the answer"
        )
    gaps = [index for index, fate in enumerate(fates) if not fate.state.restorable]
    behind = sum(fate.state.restorable for fate in fates[gaps[0] :]) if gaps else 0
    if behind and namespace.group is not Group.STATE:
        notes.append(f"{behind} blocks behind the first missing one are stored and of no use without it")
    return notes


def _text(decode: Decode | None, tokens: Sequence[int]) -> str:
    return decode(tokens) if decode is not None else ""


def tokenizer_of(folder: str | os.PathLike[str]) -> tuple[Callable[[str], list[int]], Decode]:
    """A model folder's tokenizer: ``encode(text)`` with its special tokens, and ``decode(tokens)``.

    Raises:
        FileNotFoundError: the folder has no ``tokenizer.json``.
        ImportError: the package ``tokenizers`` is missing; it comes with ``omlxd[mlx-lm]``.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json: give the tokens with --tokens instead")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    def decode(tokens: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    return encode, decode


def read_tokens(text: str) -> list[int]:
    """Token ids of a file: numbers with commas, spaces, new lines or brackets between them.

    Raises ``ValueError`` that names what is no number.
    """
    words = text.translate(str.maketrans("[](),;", "      ")).split()
    for word in words:
        if not word.isascii() or not word.isdigit():
            raise ValueError(f"{word[:40]!r} is not a token id: whole numbers from 0 are needed")
    return [int(word) for word in words]
