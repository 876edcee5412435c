"""The forms that a model's prompt cache has: one, or two when mlx-lm quantises it on the way (``quantized_kv_start``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omlxd.engines.caches import CacheObject, PromptCacheList, UnsupportedCacheError, leaf_of, leaves
from omlxd.engines.cutting import Schema
from omlxd.engines.groups import KeptCaches

#: A loaded mlx-lm model (``mlx.nn.Module``); it is called with tokens and a cache.
Model = Any


@dataclass(slots=True, eq=False)
class Form:
    """A model's cache in one precision, and the lengths (in tokens) at which mlx-lm has it in that precision."""

    signature: tuple[object, ...]
    """Members, classes and parameters; two caches with the same one can be exchanged."""
    schema: Schema
    make: Callable[[], PromptCacheList]
    """Makes an empty one."""
    first: int
    """mlx-lm has a cache in this form from so many tokens on, ..."""
    stop: int | None
    """... up to so many (excluded); None: without end."""
    kept: KeptCaches | None = None
    """Where it is kept, once a daemon was there."""

    @classmethod
    def of(
        cls, model: Model, block_tokens: int, make: Callable[[], PromptCacheList], first: int, stop: int | None
    ) -> Form:
        """Find out what a model's caches look like. Raises :class:`~omlxd.engines.caches.UnsupportedCacheError`."""
        import mlx.core as mx

        cache = make()
        # MLX is lazy: this gives every array's shape and type, and computes none.
        model(mx.zeros((1, block_tokens), dtype=mx.int32), cache=cache)
        return cls(_signature(cache), Schema.of(cache, block_tokens), make, first, stop)

    def covers(self, tokens: int) -> bool:
        """Does mlx-lm have a cache of so many tokens in this form?"""
        return tokens >= self.first and (self.stop is None or tokens < self.stop)

    def bounds(self, tokens: int) -> tuple[int, int]:
        """The fewest and the most blocks that a restore of a prompt of so many tokens can have in this form."""
        size = self.schema.block_tokens
        # The last token is always left to be computed.
        most = (tokens - 1 if self.stop is None else min(tokens, self.stop) - 1) // size
        return max(1, -(-self.first // size)), most


def form_of(cache: PromptCacheList, forms: Sequence[Form]) -> Form:
    """The form that a cache is in. Raises :class:`~omlxd.engines.caches.UnsupportedCacheError` when it is in none."""
    signature = _signature(cache)
    for form in forms:
        if form.signature == signature:
            return form
    raise UnsupportedCacheError(f"this cache is none of the model's: {_differs(forms[0].signature, signature)}")


def _signature(cache: Sequence[CacheObject]) -> tuple[object, ...]:
    return tuple((path, type(cached).__name__, *leaf_of(cached).parameters(cached)) for path, cached in leaves(cache))


def _differs(expected: tuple[object, ...], found: tuple[object, ...]) -> str:
    if len(expected) != len(found):
        return f"it has {len(found)} members, not {len(expected)}"
    return next(f"{b} where {a} is expected" for a, b in zip(expected, found, strict=True) if a != b)
