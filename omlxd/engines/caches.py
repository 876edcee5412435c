"""The cache classes of mlx-lm: what each holds, what a restore needs of it, how it is filled.

No daemon, no model, no blocks yet (:mod:`omlxd.engines.cutting`). A model's prompt cache is a list with one
object per layer, some of them lists of caches themselves (``CacheList``). Every object at the ends,
here a *leaf*, belongs to one of three KV groups by what a restore at ``n`` tokens needs of it:

========= ==================================== ======================================
group     needs                                classes
========= ==================================== ======================================
attention every token before ``n``             KVCache, QuantizedKVCache,
                                               ConcatenateKVCache
window    the last tokens before ``n``         RotatingKVCache, ChunkedKVCache
          (and the first few)
state     the state exactly at ``n``           ArraysCache (Mamba, GatedDeltaNet, ...)
========= ==================================== ======================================

The first two are cut into blocks of tokens. State can't be cut: it is taken at block boundaries.
Classes are recognised exactly: a subclass may mean anything by its arrays, so it is refused, as is
every class that is not listed. Attributes are read, not ``state``, whose tuples differ between
mlx-lm 0.31 and 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    import mlx.core as mx

#: A cache object of mlx-lm. It ships without types, and its classes share no base that says anything.
CacheObject: TypeAlias = Any
PromptCacheList: TypeAlias = "list[CacheObject]"
Arrays: TypeAlias = "list[mx.array | None]"
Span: TypeAlias = tuple[int, int]

#: The axis of tokens in keys and values: (batch, heads, tokens, head dimension).
TOKENS: Final = -2


class UnsupportedCacheError(TypeError):
    """The model's cache holds something that can't be kept in blocks; the message names it."""


class Group(Enum):
    """What a restore needs of a leaf; see the table above."""

    ATTENTION = "attention"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Held:
    """The tokens ``[start, stop)`` that a leaf still has, in order, along axis ``TOKENS``."""

    arrays: Arrays
    start: int
    stop: int

    def cut(self, start: int, stop: int) -> Arrays | None:
        """The arrays of tokens ``[start, stop)``, or None when some of them are gone."""
        if not self.start <= start <= stop <= self.stop:
            return None
        low, high = start - self.start, stop - self.start
        return [None if a is None else a[..., low:high, :] for a in self.arrays]


class Leaf:
    """A cache class as this module knows it. Stateless: the cache object is always an argument."""

    group: Group

    def parameters(self, cache: CacheObject) -> tuple[object, ...]:
        """What two caches must have in common for the tensors of one to be usable in the other."""
        return ()

    def held(self, cache: CacheObject) -> Held:
        """The tokens it has. Not for ``STATE``."""
        raise NotImplementedError

    def needs(self, cache: CacheObject, tokens: int) -> list[Span]:
        """The spans of tokens that a restore at ``tokens`` needs."""
        return [(0, tokens)]

    def limit(self, cache: CacheObject) -> int | None:
        """The longest prefix, in tokens, that can be restored exactly; None: any."""
        return None

    def capacity(self, cache: CacheObject, tokens: int) -> int:
        """Rows that the engine's own buffer would have with ``tokens`` tokens in it."""
        return tokens

    def fill(self, cache: CacheObject, arrays: Arrays, tokens: int) -> None:
        """Make an empty cache hold ``tokens`` tokens. ``arrays`` are its own, of ``capacity`` rows."""
        raise NotImplementedError

    def snapshot(self, cache: CacheObject) -> Arrays:
        """The whole state. Only for ``STATE``."""
        raise NotImplementedError


def _steps(rows: int, step: int) -> int:
    return -(-rows // step) * step


class _KeyValues(Leaf):
    group = Group.ATTENTION

    def held(self, cache: CacheObject) -> Held:
        return Held([cache.keys, cache.values], 0, cache.offset)

    def fill(self, cache: CacheObject, arrays: Arrays, tokens: int) -> None:
        cache.keys, cache.values = arrays
        # A layer that shares another one's keys never fills its own cache.
        cache.offset = 0 if cache.keys is None else tokens


class _SteppedKeyValues(_KeyValues):
    def capacity(self, cache: CacheObject, tokens: int) -> int:
        return _steps(tokens, cache.step)


class _Quantized(Leaf):
    group = Group.ATTENTION

    def parameters(self, cache: CacheObject) -> tuple[object, ...]:
        return cache.group_size, cache.bits

    def held(self, cache: CacheObject) -> Held:
        if cache.keys is None:
            return Held([None] * 6, 0, cache.offset)
        return Held([*cache.keys, *cache.values], 0, cache.offset)

    def capacity(self, cache: CacheObject, tokens: int) -> int:
        return _steps(tokens, cache.step)

    def fill(self, cache: CacheObject, arrays: Arrays, tokens: int) -> None:
        if arrays[0] is None:
            return
        cache.keys, cache.values = tuple(arrays[:3]), tuple(arrays[3:])
        cache.offset = tokens


class _Rotating(Leaf):
    """A ring of ``max_size`` rows; the first ``keep`` stay, the others are overwritten in turn.

    During a prefill it may hold more than ``max_size`` rows. The surplus is cut off before it is
    read again, so a restore doesn't need it.
    """

    group = Group.WINDOW

    def parameters(self, cache: CacheObject) -> tuple[object, ...]:
        return cache.max_size, cache.keep

    def held(self, cache: CacheObject) -> Held:
        if cache.keys is None:
            return Held([None, None], 0, 0)
        keys, values = (self._in_order(cache, a) for a in (cache.keys, cache.values))
        rows = keys.shape[TOKENS]
        if rows == cache.offset:
            return Held([keys, values], 0, cache.offset)
        first = cache.offset - (rows - cache.keep)
        return Held([a[..., cache.keep :, :] for a in (keys, values)], first, cache.offset)

    @staticmethod
    def _in_order(cache: CacheObject, rows: mx.array) -> mx.array:
        import mlx.core as mx

        at, keep = cache._idx, cache.keep
        if at == rows.shape[TOKENS]:
            return rows
        if at < cache.offset:  # it went round: the oldest rows are those after the last written one
            return mx.concatenate([rows[..., :keep, :], rows[..., at:, :], rows[..., keep:at, :]], axis=TOKENS)
        return rows[..., :at, :]

    def needs(self, cache: CacheObject, tokens: int) -> list[Span]:
        if tokens <= cache.max_size:
            return [(0, tokens)]
        recent = (tokens - (cache.max_size - cache.keep), tokens)
        return [(0, cache.keep), recent] if cache.keep else [recent]

    def capacity(self, cache: CacheObject, tokens: int) -> int:
        return min(tokens, int(cache.max_size))

    def fill(self, cache: CacheObject, arrays: Arrays, tokens: int) -> None:
        cache.keys, cache.values = arrays
        if cache.keys is None:
            return
        cache.offset = tokens
        cache._idx = cache.keys.shape[TOKENS]


class _Chunked(Leaf):
    """Keys and values whose front is cut off when they outgrow ``chunk_size``."""

    group = Group.WINDOW

    def parameters(self, cache: CacheObject) -> tuple[object, ...]:
        return (cache.chunk_size,)

    def held(self, cache: CacheObject) -> Held:
        return Held([cache.keys, cache.values], cache.start_position, cache.offset)

    def needs(self, cache: CacheObject, tokens: int) -> list[Span]:
        return [(max(0, tokens - cache.chunk_size), tokens)]

    def limit(self, cache: CacheObject) -> int | None:
        # mlx-lm 0.31 counts unused rows of its buffer when it cuts the front, so what it holds past
        # the first chunk depends on how it got there. 0.32 (it has keys_and_values) does not.
        return None if hasattr(cache, "keys_and_values") else int(cache.chunk_size)

    def capacity(self, cache: CacheObject, tokens: int) -> int:
        return _steps(min(tokens, cache.chunk_size), cache.step)

    def fill(self, cache: CacheObject, arrays: Arrays, tokens: int) -> None:
        cache.keys, cache.values = arrays
        if cache.keys is None:
            return
        cache.offset = tokens
        cache.start_position = max(0, tokens - cache.chunk_size)


class _State(Leaf):
    group = Group.STATE

    def parameters(self, cache: CacheObject) -> tuple[object, ...]:
        return (len(cache.cache),)

    def snapshot(self, cache: CacheObject) -> Arrays:
        return list(cache.cache)

    def fill(self, cache: CacheObject, arrays: Arrays, tokens: int) -> None:
        cache.cache = list(arrays)


#: By the name of the class in ``mlx_lm.models.cache``.
KNOWN: Final[dict[str, Leaf]] = {
    "KVCache": _SteppedKeyValues(),
    "ConcatenateKVCache": _KeyValues(),
    "QuantizedKVCache": _Quantized(),
    "RotatingKVCache": _Rotating(),
    "ChunkedKVCache": _Chunked(),
    "ArraysCache": _State(),
}
#: Several sequences in one cache; :func:`row` takes one out.
BATCHED: Final = frozenset({"BatchKVCache", "BatchRotatingKVCache"})


def _is_exactly(cache: CacheObject, name: str) -> bool:
    from mlx_lm.models import cache as module

    return type(cache) is getattr(module, name, None)


def leaf_of(cache: CacheObject) -> Leaf:
    """How to treat a cache object. Raises :class:`UnsupportedCacheError`, which names its class."""
    name = type(cache).__name__
    if name in KNOWN and _is_exactly(cache, name):
        return KNOWN[name]
    if name in BATCHED:
        raise UnsupportedCacheError(f"{name} holds several sequences: save one with row=")
    raise UnsupportedCacheError(
        f"omlxd does not know the cache class {type(cache).__module__}.{name}: "
        "prompts of this model are computed as usual and not kept"
    )


def leaves(cache: Sequence[CacheObject]) -> Iterator[tuple[str, CacheObject]]:
    """Every leaf of a prompt cache with its path, ``"3"`` or ``"3.1"``, in order."""
    for index, layer in enumerate(cache):
        yield from _leaves(str(index), layer)


def _leaves(path: str, cache: CacheObject) -> Iterator[tuple[str, CacheObject]]:
    if _is_exactly(cache, "CacheList"):
        for index, member in enumerate(cache.caches):
            yield from _leaves(f"{path}.{index}", member)
    else:
        yield path, cache


def row(cache: Sequence[CacheObject], index: int) -> PromptCacheList:
    """One sequence out of a batched prompt cache, as a prompt cache of its own."""
    return [layer.extract(index) for layer in cache]


def state_survives_batches() -> bool:
    """Is recurrent state right when prompts of different lengths were computed as one batch?

    mlx-lm 0.31 lets the padding into it (measured: logits off by 4), 0.32 does not.
    """
    return mlx_lm_release() >= (0, 32)


def mlx_lm_release() -> tuple[int, int]:
    """Major and minor number of the mlx-lm that is installed."""
    import mlx_lm

    major, minor = mlx_lm.__version__.split(".")[:2]
    return int(major), int(minor)


def position(cache: Sequence[CacheObject]) -> int | None:
    """How many tokens a prompt cache holds; None when its classes don't say (only state)."""
    offsets = [leaf.offset for _, leaf in leaves(cache) if hasattr(leaf, "offset")]
    if offsets:
        # A layer that shares another one's keys stays at 0.
        return int(max(offsets))
    return 0 if all(leaf.empty() for _, leaf in leaves(cache)) else None
