"""Every cache class of mlx-lm, cut into blocks and put together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import cache as mlx_cache

from omlxd.engines import caches, cutting
from omlxd.engines.caches import Group, UnsupportedCacheError
from omlxd.engines.cutting import Schema

SIZE = 8
WINDOW = 20


def feed(cache: Any, start: int, stop: int) -> None:
    """Give a cache the keys and values of tokens, each recognisable by its position."""
    positions = mx.arange(start, stop, dtype=mx.float32)[None, None, :, None]
    keys = positions + mx.arange(4, dtype=mx.float32) / 8 + mx.zeros((1, 2, 1, 1))
    if type(cache).__name__ == "QuantizedKVCache":
        keys = mx.repeat(keys, 8, axis=-1)
    for member in getattr(cache, "caches", [cache]):
        if type(member).__name__ == "ArraysCache":
            member[0] = positions[:, 0, -1:]
        elif hasattr(member, "caches"):
            feed(member, start, stop)
        else:
            if hasattr(member, "maybe_trim_front"):
                member.maybe_trim_front()
            member.update_and_fetch(keys, -keys)


def prefilled(make: Callable[[], Any], tokens: int) -> list[Any]:
    cache = [make()]
    for start in range(0, tokens, SIZE):
        feed(cache[0], start, min(start + SIZE, tokens))
    return cache


def payloads(cache: list[Any], group: Group, blocks: int) -> dict[int, caches.Arrays]:
    cutter = cutting.Cutter(cache, group, SIZE)
    found = {index: cutter.payload(index) for index in range(blocks)}
    return {index: payload for index, payload in found.items() if payload is not None}


def kept_while_prefilling(make: Callable[[], Any], blocks: int) -> dict[Group, dict[int, caches.Arrays]]:
    """What an engine stores that stores each block when it is done."""
    cache = [make()]
    kept: dict[Group, dict[int, caches.Arrays]] = {group: {} for group in Group}
    for index in range(blocks):
        feed(cache[0], index * SIZE, (index + 1) * SIZE)
        for group in (Group.ATTENTION, Group.WINDOW):
            payload = cutting.Cutter(cache, group, SIZE).payload(index)
            assert payload is not None
            kept[group][index] = payload
        kept[Group.STATE][index] = cutting.snapshot(cache)
    return kept


def nested() -> Any:
    inner = mlx_cache.CacheList(mlx_cache.ArraysCache(size=1), mlx_cache.RotatingKVCache(max_size=WINDOW))
    return mlx_cache.CacheList(mlx_cache.KVCache(), inner)


MAKERS: dict[str, Callable[[], Any]] = {
    "KVCache": mlx_cache.KVCache,
    "ConcatenateKVCache": mlx_cache.ConcatenateKVCache,
    "QuantizedKVCache": lambda: mlx_cache.QuantizedKVCache(group_size=32, bits=8),
    "RotatingKVCache": lambda: mlx_cache.RotatingKVCache(max_size=WINDOW),
    "RotatingKVCache with kept tokens": lambda: mlx_cache.RotatingKVCache(max_size=WINDOW, keep=4),
    "ArraysCache": lambda: mlx_cache.ArraysCache(size=1),
    "CacheList": lambda: mlx_cache.CacheList(mlx_cache.KVCache(), mlx_cache.ArraysCache(size=2)),
    "CacheList of CacheLists": nested,
}
if hasattr(mlx_cache.ChunkedKVCache, "keys_and_values"):  # 0.31 loses tokens when a chunk is smaller than its buffer
    MAKERS["ChunkedKVCache"] = lambda: mlx_cache.ChunkedKVCache(WINDOW)


def read(cache: Any) -> list[Any]:
    """What the next token would attend to, without the order of a ring and what is about to be cut off it."""
    if hasattr(cache, "caches"):
        return [read(member) for member in cache.caches]
    if type(cache).__name__ == "ArraysCache":
        return [None if a is None else a.tolist() for a in cache.cache]
    feed(cache, cache.offset, cache.offset + 1)
    if cache.keys is None:
        return []
    held = caches.leaf_of(cache).held(cache)
    if type(cache).__name__ == "ChunkedKVCache":
        return [a[..., -WINDOW:, :].tolist() for a in held.arrays if a is not None]
    return [a.tolist() for a in held.arrays if a is not None]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 9])
def test_a_restored_cache_reads_as_the_one_it_was_cut_from(name: str, blocks: int) -> None:
    make = MAKERS[name]
    kept = kept_while_prefilling(make, blocks)
    restored = [make()]
    cutting.fill(restored, blocks * SIZE, SIZE, kept.__getitem__, kept[Group.STATE][blocks - 1])
    original = prefilled(make, blocks * SIZE)
    assert caches.position(restored) == caches.position(original)
    assert read(restored[0]) == read(original[0])


@pytest.mark.parametrize("name", MAKERS)
def test_continuing_a_restored_cache_leaves_the_blocks_as_they_were(name: str) -> None:
    make = MAKERS[name]
    kept = kept_while_prefilling(make, 2)
    before = {(g, i): [None if a is None else a.tolist() for a in kept[g][i]] for g in Group for i in kept[g]}
    restored = [make()]
    cutting.fill(restored, 2 * SIZE, SIZE, kept.__getitem__, kept[Group.STATE][1])
    for start in range(2 * SIZE, 6 * SIZE):
        feed(restored[0], start, start + 1)
    mx.eval([leaf.state for _, leaf in caches.leaves(restored)])
    after = {(g, i): [None if a is None else a.tolist() for a in kept[g][i]] for g in Group for i in kept[g]}
    assert after == before


@pytest.mark.parametrize("name", MAKERS)
def test_a_restored_cache_shares_no_memory_with_the_blocks(name: str) -> None:
    kept = kept_while_prefilling(MAKERS[name], 4)
    restored = [MAKERS[name]()]
    for blocks in kept.values():
        mx.eval([a for payload in blocks.values() for a in payload if a is not None])
    cutting.fill(restored, 4 * SIZE, SIZE, kept.__getitem__, kept[Group.STATE][3])
    sources = {address(a) for blocks in kept.values() for p in blocks.values() for a in p if a is not None}
    targets = {
        address(array)
        for _, leaf in caches.leaves(restored)
        for array in (cutting.snapshot([leaf]) or caches.leaf_of(leaf).held(leaf).arrays)
        if array is not None
    }
    assert targets
    assert not sources & targets


def address(array: mx.array) -> int:
    import numpy as np

    return int(np.array(array, copy=False).__array_interface__["data"][0])


@settings(max_examples=60, deadline=None)
@given(
    prefill=st.integers(1, 6),
    decoded=st.integers(0, 3 * WINDOW),
    keep=st.sampled_from([0, 4]),
    restore=st.integers(1, 12),
)
def test_a_ring_gives_up_only_blocks_whose_tokens_it_has_overwritten(
    prefill: int, decoded: int, keep: int, restore: int
) -> None:
    def make() -> Any:
        return mlx_cache.RotatingKVCache(max_size=WINDOW, keep=keep)

    cache = prefilled(make, prefill * SIZE)
    for start in range(prefill * SIZE, prefill * SIZE + decoded):
        feed(cache[0], start, start + 1)
    total = prefill * SIZE + decoded
    for index, payload in payloads(cache, Group.WINDOW, total // SIZE).items():
        keys = payload[0]
        assert keys is not None
        assert keys[0, 0, :, 0].tolist() == [float(t) for t in range(index * SIZE, (index + 1) * SIZE)]
    held = payloads(cache, Group.WINDOW, total // SIZE)
    oldest = total - (min(WINDOW, total) - keep) if total > WINDOW else 0
    missing = [i for i in range(total // SIZE) if i not in held]
    assert all(index * SIZE < oldest for index in missing)


@pytest.mark.parametrize(
    "make",
    [mlx_cache.KVCache, lambda: mlx_cache.RotatingKVCache(max_size=WINDOW)],
    ids=["BatchKVCache", "BatchRotatingKVCache"],
)
def test_a_row_of_a_batch_is_kept_like_the_sequence_alone(make: Callable[[], Any]) -> None:
    alone = [prefilled(make, tokens)[0] for tokens in (SIZE * 2, SIZE * 2 + 3)]
    batch = [type(alone[0]).merge(alone)]
    group = caches.leaf_of(alone[0]).group
    for index, one in enumerate(alone):
        row = caches.row(batch, index)
        expected = payloads([one], group, 2)
        found = payloads(row, group, 2)
        assert sorted(found) == sorted(expected) == [0, 1]
        for block in expected:
            for a, b in zip(found[block], expected[block], strict=True):
                assert a is not None
                assert b is not None
                assert mx.array_equal(a, b)


def test_a_batch_is_refused_as_a_whole() -> None:
    batch = mlx_cache.BatchKVCache([0, 0])
    with pytest.raises(UnsupportedCacheError, match=r"BatchKVCache.*row="):
        caches.leaf_of(batch)


class LookalikeKVCache(mlx_cache.KVCache):
    """Who knows what a subclass means by its arrays."""


KVCacheOfAnother = type("KVCache", (), {})


@pytest.mark.parametrize("make", [LookalikeKVCache, KVCacheOfAnother, mlx_cache.TokenBuffer])
def test_an_unknown_class_is_refused_by_its_name(make: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedCacheError, match=make.__name__):
        Schema.of([mlx_cache.KVCache(), make()], SIZE)


def test_every_cache_class_of_this_mlx_lm_is_known() -> None:
    theirs = {
        name
        for name, value in vars(mlx_cache).items()
        if isinstance(value, type) and issubclass(value, mlx_cache._BaseCache) and value is not mlx_cache._BaseCache
    }
    assert theirs <= {*caches.KNOWN, *caches.BATCHED, "CacheList"}


def test_layers_without_keys_of_their_own_stay_empty() -> None:
    cache = [mlx_cache.KVCache(), mlx_cache.KVCache()]
    feed(cache[0], 0, SIZE)
    schema = Schema.of(cache, SIZE)
    assert [spec.shape for spec in schema.layouts[Group.ATTENTION].tensors][2:] == [None, None]
    kept = payloads(cache, Group.ATTENTION, 1)
    restored = [mlx_cache.KVCache(), mlx_cache.KVCache()]
    cutting.fill(restored, SIZE, SIZE, lambda group: kept, [])
    assert caches.position(restored) == SIZE
    assert restored[1].empty()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (mlx_cache.KVCache, mlx_cache.ConcatenateKVCache),
        (lambda: mlx_cache.RotatingKVCache(max_size=32), lambda: mlx_cache.RotatingKVCache(max_size=64)),
        (lambda: mlx_cache.RotatingKVCache(32, keep=0), lambda: mlx_cache.RotatingKVCache(32, keep=4)),
        (
            lambda: mlx_cache.QuantizedKVCache(group_size=32, bits=8),
            lambda: mlx_cache.QuantizedKVCache(group_size=32, bits=4),
        ),
    ],
)
def test_caches_that_cannot_be_exchanged_have_different_layouts(
    one: Callable[[], Any], other: Callable[[], Any]
) -> None:
    layouts = [Schema.of(prefilled(make, SIZE), SIZE).layouts for make in (one, other)]
    assert list(layouts[0].values()) != list(layouts[1].values())
