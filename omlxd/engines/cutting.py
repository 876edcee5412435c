"""Prompt caches cut into block tensors, and block tensors put together to a prompt cache.

Pure functions over the cache classes of :mod:`omlxd.engines.caches`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omlxd.engines.caches import TOKENS, Arrays, CacheObject, Group, Held, Span, leaf_of, leaves
from omlxd.storage.layout import Layout

if TYPE_CHECKING:
    import mlx.core as mx


@dataclass(frozen=True)
class Schema:
    """What one block of a model's cache consists of, group by group.

    ``layouts`` has an entry for each group that the model uses. Tensor names say path, class and
    parameters, so that caches which can't be exchanged can't have equal layouts.
    """

    block_tokens: int
    layouts: dict[Group, Layout]

    @classmethod
    def of(cls, cache: Sequence[CacheObject], block_tokens: int) -> Schema:
        """From a prompt cache that holds at least one block (its arrays need not be computed).

        Raises :class:`UnsupportedCacheError` for a class that is not known.
        """
        arrays: dict[Group, Arrays] = {}
        names: dict[Group, list[str]] = {}
        for path, cached in leaves(cache):
            leaf = leaf_of(cached)
            if leaf.group is Group.STATE:
                tensors: Arrays | None = leaf.snapshot(cached)
            else:
                held = leaf.held(cached)
                tensors = held.cut(held.stop - min(block_tokens, held.stop), held.stop)
                if held.stop < block_tokens and any(a is not None for a in held.arrays):
                    raise ValueError(f"the cache holds {held.stop} tokens, not {block_tokens}")
            assert tensors is not None
            parameters = ",".join(map(str, leaf.parameters(cached)))
            arrays.setdefault(leaf.group, []).extend(tensors)
            names.setdefault(leaf.group, []).extend(
                f"{path}:{type(cached).__name__}({parameters}):{index}" for index in range(len(tensors))
            )
        layouts = {group: Layout.of(arrays[group], names[group]) for group in arrays}
        return cls(block_tokens, layouts)

    def limit(self, cache: Sequence[CacheObject]) -> int | None:
        """The longest prefix, in tokens, that can be restored exactly; None: any."""
        limits = [leaf_of(cached).limit(cached) for _, cached in leaves(cache)]
        known = [limit for limit in limits if limit is not None]
        return min(known) if known else None

    def window_blocks(self, cache: Sequence[CacheObject], blocks: int) -> list[int]:
        """Indices of the window blocks that a restore at ``blocks`` blocks needs."""
        size = self.block_tokens
        needed: set[int] = set()
        for _, cached in leaves(cache):
            leaf = leaf_of(cached)
            if leaf.group is Group.WINDOW:
                for start, stop in leaf.needs(cached, blocks * size):
                    needed.update(range(start // size, -(-stop // size)))
        return sorted(needed)


class Cutter:
    """Cuts the payloads of one group out of a prompt cache. Puts rings in order once, not per block."""

    def __init__(self, cache: Sequence[CacheObject], group: Group, block_tokens: int) -> None:
        self._size = block_tokens
        self._held: list[Held] = []
        for _, cached in leaves(cache):
            leaf = leaf_of(cached)
            if leaf.group is group:
                self._held.append(leaf.held(cached))

    def payload(self, index: int) -> Arrays | None:
        """The tensors of block ``index``; None when some of its tokens are not held."""
        payload: Arrays = []
        for held in self._held:
            if all(a is None for a in held.arrays):
                payload.extend(held.arrays)
                continue
            tensors = held.cut(index * self._size, (index + 1) * self._size)
            if tensors is None:
                return None
            payload.extend(tensors)
        return payload


def snapshot(cache: Sequence[CacheObject]) -> Arrays:
    """The tensors of the state group, as they are now."""
    tensors: Arrays = []
    for _, cached in leaves(cache):
        leaf = leaf_of(cached)
        if leaf.group is Group.STATE:
            tensors.extend(leaf.snapshot(cached))
    return tensors


def fill(
    cache: Sequence[CacheObject],
    tokens: int,
    block_tokens: int,
    blocks: Callable[[Group], dict[int, Arrays]],
    state: Arrays,
) -> None:
    """Fill an empty prompt cache with ``tokens`` tokens (whole blocks).

    ``blocks(group)`` gives the payloads by block index, at least those that the group needs;
    ``state`` are the snapshot's tensors at ``tokens``. Everything is copied and computed before
    this returns: the payloads' memory may go away, and what the engine appends never reaches it.
    """
    import mlx.core as mx

    at: dict[Group, int] = dict.fromkeys(Group, 0)
    payloads = {Group.ATTENTION: blocks(Group.ATTENTION), Group.WINDOW: blocks(Group.WINDOW)}
    made: list[mx.array] = []
    for _, cached in leaves(cache):
        leaf = leaf_of(cached)
        first = at[leaf.group]
        if leaf.group is Group.STATE:
            width = len(leaf.snapshot(cached))
            arrays = [None if a is None else _own(a) for a in state[first : first + width]]
        else:
            width = len(leaf.held(cached).arrays)
            source = payloads[leaf.group]
            spans = leaf.needs(cached, tokens)
            rows = leaf.capacity(cached, tokens)
            arrays = [_column(source, index, spans, block_tokens, rows) for index in range(first, first + width)]
        at[leaf.group] = first + width
        made.extend(a for a in arrays if a is not None)
        leaf.fill(cached, arrays, tokens)
    mx.eval(made)


def _column(blocks: dict[int, Arrays], tensor: int, spans: list[Span], size: int, rows: int) -> mx.array | None:
    """One tensor over several blocks: the spans' tokens in order, then zeros up to ``rows``."""
    import mlx.core as mx

    pieces: list[mx.array] = []
    count = 0
    for start, stop in spans:
        for index in range(start // size, -(-stop // size)):
            piece = blocks[index][tensor]
            if piece is None:
                return None
            low, high = max(start - index * size, 0), min(stop - index * size, size)
            pieces.append(piece if high - low == size else piece[..., low:high, :])
            count += high - low
    shape = list(pieces[0].shape)
    shape[TOKENS] = rows - count
    # Zero rows too: of one array alone, concatenate would return that array and not a copy.
    pieces.append(mx.zeros(shape, dtype=pieces[0].dtype))
    return mx.concatenate(pieces, axis=TOKENS)


def _own(array: mx.array) -> mx.array:
    """A copy, for certain: MLX's own copying functions return their argument where they may."""
    import mlx.core as mx

    flat = array.reshape(-1)
    return mx.concatenate([flat, flat[:0]]).reshape(array.shape)
