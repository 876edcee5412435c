from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from array import array
from pathlib import Path

import mlx.core as mx
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.storage.chain import (
    MAX_TOKEN,
    ExtraKey,
    Namespace,
    block_hash,
    chain_hashes,
    resolve_block_extra_keys,
    token_bytes,
)
from omlxd.storage.framing import frame

ROOT = Path(__file__).parents[2]
SPACE = Namespace("org/name", "sha256:abc", 64, b"\x01layout")
SALTED = Namespace("org/name", "sha256:abc", 64, b"\x01layout", "tenant-1")
MIXED: ExtraKey = ("lora", 7, None, True, b"\0\xff", ("ü", -1))

# Every byte of a name is pinned here. A change of any of these makes all caches cold: raise FORMAT with it.
GOLDEN = {
    "namespace": "a44bf27c30492711f2db8b860d24763bec0288d5ea5cb67e4320be6cc916306e",
    "salted": "836a8b140e9694a3bb7765ff46d8c481b8f467dbdd16aea35904aa90bf7958e6",
    "salt": "f7e3b5af509dfb03d242bbbfa47081dbde65a57db3b5fb1275f4acf648a48557",
    "plain": [
        "02a56aa6ffe8962c3f8cd28e80c57fd3f44e7aca768317a137c0d2e577deac13",
        "4ffa20201d5de2c0d1f3f6565a7d4ca593dbf92b0cddd1a914c5cd69b4b220ab",
        "ba03699b72e25b6432591e34b8ffd9d25df689d2ce83f536d0b6bc9266d60e4a",
    ],
    "ranges": [
        "02a56aa6ffe8962c3f8cd28e80c57fd3f44e7aca768317a137c0d2e577deac13",
        "3ad56148b963fe2347fc92781447c5203337fb08cbd82fe3a9c84ece840bcea3",
        "e87d3a58837aed580c6f032f5edaedf4b94d79cd0d8540e1b704448e4d37f981",
    ],
    "short": "47e838e85c373a468e56d64e21682856be8f6108eac15973c85261054e6aacc1",
}


def computed() -> dict[str, object]:
    salt = SALTED.descriptor()["salt"]
    return {
        "namespace": SPACE.id.hex(),
        "salted": SALTED.id.hex(),
        "salt": salt,
        "plain": [name.hex() for name in chain_hashes(SPACE.id, range(200), 64)],
        "ranges": [name.hex() for name in chain_hashes(SPACE.id, range(200), 64, extra_key_ranges=[(70, MIXED)])],
        "short": block_hash(SPACE.id, None, [0, 1, MAX_TOKEN]).hex(),
    }


def test_names_are_the_golden_ones() -> None:
    assert computed() == GOLDEN


@pytest.mark.parametrize("hash_seed", ["0", "4711", "random"])
def test_names_are_the_same_in_every_process(hash_seed: str) -> None:
    script = (
        f"import sys, json; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]\n"
        "import test_chain; print(json.dumps(test_chain.computed()))"
    )
    child = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "LC_ALL": "C", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(child.stdout) == GOLDEN


def test_a_name_is_the_hash_of_the_framed_parts_as_documented() -> None:
    """Written out with nothing of the module, so that the documentation is a specification."""

    def part(tag: bytes, data: bytes) -> bytes:
        return tag + len(data).to_bytes(8, "little") + data

    tokens = b"".join(token.to_bytes(4, "little") for token in range(64))
    common = part(b"S", b"omlxd block 1") + part(b"B", SPACE.id)
    head = hashlib.sha256(common + part(b"N", b"") + part(b"B", tokens) + part(b"N", b"")).digest()
    assert head.hex() == GOLDEN["plain"][0]
    tokens = b"".join(token.to_bytes(4, "little") for token in range(64, 128))
    second = hashlib.sha256(common + part(b"B", head) + part(b"B", tokens) + part(b"N", b"")).digest()
    assert second.hex() == GOLDEN["plain"][1]


# -- frames


@pytest.mark.parametrize(
    ("part", "encoded"),
    [
        (None, "4e0000000000000000"),
        (True, "540000000000000000"),
        (False, "460000000000000000"),
        (0, "49010000000000000000"),
        (-1, "490100000000000000ff"),
        (255, "490200000000000000ff00"),
        ("ü", "530200000000000000c3bc"),
        (b"\0", "42010000000000000000"),
        ((), "280000000000000000"),
        (("a", (b"",)), "281c0000000000000053010000000000000061280900000000000000420000000000000000"),
    ],
)
def test_a_part_is_its_type_its_length_and_its_bytes(part: object, encoded: str) -> None:
    assert frame(part).hex() == encoded


parts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4).map(tuple),
    max_leaves=8,
)


def typed(part: object) -> object:
    """Python holds True, 1 and 1.0 equal; a name must not."""
    return tuple(map(typed, part)) if isinstance(part, tuple) else (type(part), part)


@given(st.lists(parts, max_size=4), st.lists(parts, max_size=4))
def test_different_parts_never_give_the_same_bytes(one: list[object], other: list[object]) -> None:
    joined = b"".join(map(frame, one)), b"".join(map(frame, other))
    assert (joined[0] == joined[1]) == (typed(tuple(one)) == typed(tuple(other)))


@given(st.lists(st.integers()))
def test_a_list_is_the_same_as_a_tuple(items: list[int]) -> None:
    assert frame(items) == frame(tuple(items))


@pytest.mark.parametrize("part", [1.5, float("nan"), {1}, {"a": 1}, object(), np.int64(1), ("ok", 2.0)])
def test_what_has_no_canonical_form_is_refused(part: object) -> None:
    with pytest.raises(TypeError, match="what names a block is str, bytes"):
        frame(part)


# -- tokens

WAYS = [
    list,
    tuple,
    lambda ids: array("I", ids),
    lambda ids: np.array(ids, np.int64),
    lambda ids: np.array(ids, np.uint32),
    lambda ids: np.array(ids, ">u4"),
    lambda ids: np.array([ids, ids], np.uint32).T[:, 0],
    lambda ids: mx.array(np.array(ids, np.uint32)),
    lambda ids: mx.array(np.array(ids, np.int64)),
    lambda ids: [np.uint32(i) for i in ids],
]


@pytest.mark.parametrize("way", WAYS)
@given(ids=st.lists(st.integers(0, MAX_TOKEN), max_size=20))
def test_the_same_ids_are_the_same_bytes_however_they_come(way: object, ids: list[int]) -> None:
    expected = b"".join(i.to_bytes(4, "little") for i in ids)
    assert token_bytes(way(ids)) == expected  # type: ignore[operator]


def test_ranges_and_lazy_mlx_arrays_are_tokens() -> None:
    assert token_bytes(range(3)) == token_bytes([0, 1, 2]) == token_bytes(mx.array([0, 1]) + 0) + bytes([2, 0, 0, 0])
    assert token_bytes(mx.arange(6, dtype=mx.int32)[::2]) == token_bytes([0, 2, 4])


@pytest.mark.parametrize(
    ("tokens", "error", "named"),
    [
        ([1, -1], ValueError, "outside 0 to"),
        ([MAX_TOKEN + 1], ValueError, "outside 0 to"),
        (range(-1, 2), ValueError, "outside 0 to"),
        (np.array([1, -1]), ValueError, "from -1 to 1"),
        (np.array([1 << 32]), ValueError, "outside 0 to"),
        (mx.array([-1]), ValueError, "outside 0 to"),
        (np.zeros((2, 2), np.int32), ValueError, "one dimension"),
        (np.array(5), ValueError, "one dimension"),
        (mx.zeros((1, 3), mx.int32), ValueError, "one dimension"),
        ([1.0], TypeError, "whole numbers"),
        ([None], TypeError, "whole numbers"),
        (["1"], TypeError, "whole numbers"),
        ([[1]], TypeError, "whole numbers"),
        (np.array([1.0]), TypeError, "float64"),
        (np.array([True]), TypeError, "bool"),
        (mx.array([1.0]), TypeError, "float32"),
        (mx.array([1.0], mx.bfloat16), TypeError, "whole numbers"),
        ("123", TypeError, "str"),
        (b"123", TypeError, "bytes"),
        (5, TypeError, "int"),
        (iter([1]), TypeError, "list_iterator"),
    ],
)
def test_what_is_no_sequence_of_token_ids_is_refused(tokens: object, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        token_bytes(tokens)  # type: ignore[arg-type]


# -- chains

token_lists = st.lists(st.integers(0, 9), min_size=0, max_size=40)


@given(token_lists, st.integers(1, 7))
def test_there_is_one_name_for_each_full_block(tokens: list[int], block_tokens: int) -> None:
    assert len(chain_hashes(SPACE.id, tokens, block_tokens)) == len(tokens) // block_tokens


@given(token_lists, token_lists, st.integers(1, 5))
def test_names_are_equal_exactly_as_far_as_the_tokens_are(one: list[int], other: list[int], block_tokens: int) -> None:
    names = chain_hashes(SPACE.id, one, block_tokens), chain_hashes(SPACE.id, other, block_tokens)
    for index, (left, right) in enumerate(zip(*names, strict=False)):
        end = (index + 1) * block_tokens
        assert (left == right) == (one[:end] == other[:end])


salts = st.none() | st.integers(0, 2) | st.sampled_from(["a", b"a", ("a",)])
ascending = st.lists(st.tuples(st.integers(0, 40), salts), max_size=4, unique_by=lambda r: r[0]).map(
    lambda ranges: sorted(ranges, key=lambda r: r[0])
)


@given(token_lists, st.integers(1, 5), salts, st.none() | st.integers(0, 40), st.none() | ascending)
def test_each_block_is_salted_as_the_rule_for_its_end_says(
    tokens: list[int],
    block_tokens: int,
    keys: ExtraKey,
    token_start: int | None,
    ranges: list[tuple[int, ExtraKey]] | None,
) -> None:
    names = chain_hashes(
        SPACE.id,
        tokens,
        block_tokens,
        extra_keys=keys,
        extra_key_token_start=token_start,
        extra_key_ranges=ranges,
    )
    parent = None
    for index, name in enumerate(names):
        end = (index + 1) * block_tokens
        salt = resolve_block_extra_keys(end, keys, token_start, ranges)
        assert name == block_hash(SPACE.id, parent, tokens[end - block_tokens : end], salt)
        parent = name


@given(token_lists, st.integers(1, 5), st.integers(0, 8), ascending)
def test_a_chain_continued_from_any_block_has_the_names_of_the_whole(
    tokens: list[int], block_tokens: int, known: int, ranges: list[tuple[int, ExtraKey]]
) -> None:
    whole = chain_hashes(SPACE.id, tokens, block_tokens, extra_key_ranges=ranges)
    known = min(known, len(whole))
    start = known * block_tokens
    rest = chain_hashes(
        SPACE.id,
        tokens[start:],
        block_tokens,
        extra_key_ranges=ranges,
        parent=whole[known - 1] if known else None,
        start=start,
    )
    assert whole[:known] + rest == whole


@pytest.mark.parametrize(
    ("end", "keys", "start", "ranges", "expected"),
    [
        (64, "k", None, None, "k"),
        (64, "k", 64, None, None),
        (65, "k", 64, None, "k"),
        (64, "k", None, [], "k"),
        (64, "k", None, [(64, "r")], None),
        (65, "k", None, [(64, "r")], "r"),
        (200, "k", 500, [(0, "a"), (100, "b"), (200, "c")], "b"),
        (300, None, None, [(0, "a"), (100, None)], None),
    ],
)
def test_the_last_range_that_starts_before_the_end_of_a_block_salts_it(
    end: int, keys: ExtraKey, start: int | None, ranges: list[tuple[int, ExtraKey]] | None, expected: ExtraKey
) -> None:
    assert resolve_block_extra_keys(end, keys, start, ranges) == expected


@pytest.mark.parametrize("ranges", [[(5, "a"), (5, "b")], [(5, "a"), (4, "b")], [(-1, "a")]])
def test_ranges_that_do_not_ascend_are_refused(ranges: list[tuple[int, ExtraKey]]) -> None:
    with pytest.raises(ValueError, match="extra_key_ranges"):
        resolve_block_extra_keys(1, extra_key_ranges=ranges)
    with pytest.raises(ValueError, match="extra_key_ranges"):
        chain_hashes(SPACE.id, range(8), 4, extra_key_ranges=ranges)


def test_wrong_seeds_parents_starts_and_block_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="a seed has 32 bytes"):
        chain_hashes(b"x", range(8), 4)
    with pytest.raises(ValueError, match="a parent has 32 bytes"):
        chain_hashes(SPACE.id, range(8), 4, parent=b"x", start=4)
    with pytest.raises(ValueError, match="block_tokens 0"):
        chain_hashes(SPACE.id, range(8), 0)
    with pytest.raises(ValueError, match="start 4 without a parent"):
        chain_hashes(SPACE.id, range(8), 4, start=4)


def test_a_parent_in_another_namespace_does_not_make_equal_names() -> None:
    parent = chain_hashes(SPACE.id, range(4), 4)[0]
    here, there = (chain_hashes(space.id, range(4), 4, parent=parent, start=4) for space in (SPACE, SALTED))
    assert here != there


# -- namespaces


@pytest.mark.parametrize(
    "change",
    [
        {"model": "org/other"},
        {"fingerprint": "sha256:abd"},
        {"block_tokens": 65},
        {"layout": b"\x01layouu"},
        {"salt": ""},
        {"salt": "tenant-1"},
        {"salt": b"tenant-1"},
        {"model": "org/names", "fingerprint": "ha256:abc"},
    ],
)
def test_every_field_makes_another_namespace(change: dict[str, object]) -> None:
    other = dataclasses.replace(SPACE, **change)  # type: ignore[arg-type]
    assert other.id != SPACE.id
    assert chain_hashes(other.id, range(64), 64) != chain_hashes(SPACE.id, range(64), 64)


def test_text_and_bytes_are_different_salts() -> None:
    assert Namespace("m", "", 1, b"", "a").id != Namespace("m", "", 1, b"", b"a").id


@pytest.mark.parametrize("space", [SPACE, SALTED])
def test_a_descriptor_travels_as_json_and_msgpack_and_back(space: Namespace) -> None:
    for travelled in (
        json.loads(json.dumps(space.descriptor())),
        msgpack.unpackb(msgpack.packb(space.descriptor())),
    ):
        again = Namespace.from_descriptor({**travelled, "field of a later version": 1})
        assert again == space
        assert again.id == space.id
    assert dataclasses.replace(space, model=space.model) == space, "a salt is not digested twice"


def test_the_salt_itself_is_neither_kept_nor_sent() -> None:
    assert "tenant-1" not in repr(SALTED)
    assert "tenant-1" not in json.dumps(SALTED.descriptor())
    assert b"tenant-1".hex() not in json.dumps(SALTED.descriptor())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"id": "00" * 32}, "its fields give"),
        ({"id": None}, "its fields give"),
        ({"model": "other"}, "its fields give"),
        ({"block_tokens": 32}, "its fields give"),
        ({"salt": "00" * 32}, "its fields give"),
        ({"salt": "00"}, "32 bytes"),
        ({"salt": 5}, "wrong field"),
        ({"format": 2}, "format 2"),
        ({"format": None}, "format None"),
        ({"model": 7}, "wrong field"),
        ({"model": ""}, "model is empty"),
        ({"block_tokens": 0}, "block_tokens 0"),
        ({"block_tokens": True}, "wrong field"),
        ({"layout": "zz"}, "hexadecimal"),
        ({"layout": 3}, "wrong field"),
    ],
)
def test_a_descriptor_that_cannot_be_true_is_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Namespace.from_descriptor({**SPACE.descriptor(), **change})


@pytest.mark.parametrize("field", ["model", "fingerprint", "block_tokens", "layout"])
def test_a_descriptor_without_a_field_is_refused(field: str) -> None:
    descriptor = SPACE.descriptor()
    del descriptor[field]
    with pytest.raises(ValueError, match=field):
        Namespace.from_descriptor(descriptor)


def test_a_salt_that_is_no_text_or_bytes_is_refused() -> None:
    with pytest.raises(TypeError, match="salt is str, bytes or None, not int"):
        Namespace("m", "f", 1, b"", 5)  # type: ignore[arg-type]
