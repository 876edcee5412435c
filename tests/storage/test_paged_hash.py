from __future__ import annotations

import os
import subprocess
import sys
from array import array
from hashlib import sha256
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.storage.framing import frame
from omlxd.storage.paged import compute_block_hash, resolve_block_extra_keys
from omlxd.storage.paged_hash import prompt_hashes

PARENT = bytes(range(32))
GOLDEN = [
    ((None, []), "bd0375ba458c59ea451170e2d16837e7000be6502bd47f65b0b2474a93076ed0"),
    ((None, [1, 2, 3]), "f0b46d632dd8bfceec8eac8f62f0120d3b6db7fccc325b029c5d6d59ce747639"),
    ((PARENT, [1, 2, 3]), "56eb9a49a01681b40b2c01f017127675b4e67194848346769f777161db44a13f"),
    ((PARENT, [0, 2**32 - 1]), "2f0bfb7a0a3fffe5c1a9959d57c4cd5fe6a012e34742fbab20c0afd9a68b28f7"),
    ((None, [1, 2, 3], ("lora", 7)), "35c033410e1dabc8c1538249da9bdcffd8b4bfc93905b960b9ebfb81ad428f79"),
    ((None, [1, 2, 3], None, "org/model"), "ffe9cd5303fb0ce2205e679bdea1f5522204459d0fe067fd460806d634e91fb3"),
    (
        (PARENT, list(range(256)), (("image", b"\x00\xff"), True, None), "org/model"),
        "4a2665a2a89d0ee98c6f4e83c071f16bd0d9edb01bf322286fd7879af1a8e68f",
    ),
]


@pytest.mark.parametrize(("arguments", "expected"), GOLDEN)
def test_hashes_are_the_golden_ones(arguments: tuple, expected: str) -> None:
    assert compute_block_hash(*arguments).hex() == expected


def test_a_golden_hash_can_be_computed_from_the_description_alone() -> None:
    def part(tag: bytes, payload: bytes) -> bytes:
        return tag + len(payload).to_bytes(8, "little") + payload

    tokens = b"".join(token.to_bytes(4, "little") for token in (1, 2, 3))
    nothing = part(b"N", b"")
    framed = part(b"S", b"omlxd paged block 1") + nothing + part(b"B", PARENT) + part(b"B", tokens) + nothing
    assert compute_block_hash(PARENT, [1, 2, 3]) == sha256(framed).digest()


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_hashes_do_not_depend_on_the_process(seed: str) -> None:
    code = (
        "from omlxd.storage.paged import compute_block_hash as h;"
        "print(h(bytes(range(32)), list(range(256)), (('image', b'\\x00\\xff'), True, None), 'org/model').hex())"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert run.stdout.strip() == GOLDEN[-1][1]


@pytest.mark.parametrize(
    "tokens",
    [
        (1, 2, 3),
        range(1, 4),
        array("I", [1, 2, 3]),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], np.uint32),
        mx.array([1, 2, 3]),
    ],
)
def test_the_kind_of_sequence_does_not_matter(tokens: object) -> None:
    assert compute_block_hash(PARENT, tokens) == compute_block_hash(PARENT, [1, 2, 3])  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [[-1], [2**32], np.array([-1]), np.array([2**40])])
def test_a_token_that_does_not_fit_is_refused(tokens: object) -> None:
    with pytest.raises(ValueError, match="outside"):
        compute_block_hash(None, tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("keys", [1.5, ("a", 2.0), {"a": 1}, object()])
def test_extra_keys_without_a_canonical_form_are_refused(keys: object) -> None:
    with pytest.raises(TypeError):
        compute_block_hash(None, [1], keys)  # type: ignore[arg-type]


EXTRA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.tuples(inner) | st.tuples(inner, inner),
    max_leaves=4,
)
PARTS = st.tuples(
    st.none() | st.binary(max_size=33),
    st.lists(st.integers(0, 2**32 - 1), max_size=4),
    EXTRA,
    st.none() | st.text(min_size=1, max_size=4),
)


@given(PARTS, PARTS)
def test_different_parts_give_different_hashes(one: tuple, other: tuple) -> None:
    def plain(parts: tuple) -> tuple:
        return (*parts[:2], frame(parts[2]), parts[3])  # 1 == True in Python, and not here

    same = plain(one) == plain(other)
    assert (compute_block_hash(*one) == compute_block_hash(*other)) is same


def test_an_empty_model_name_is_no_name_and_a_list_of_keys_is_a_tuple() -> None:
    assert compute_block_hash(None, [1], None, "") == compute_block_hash(None, [1])
    assert compute_block_hash(None, [1], ["a", [1]]) == compute_block_hash(None, [1], ("a", (1,)))  # type: ignore[list-item]


@given(
    tokens=st.lists(st.integers(0, 9), max_size=20),
    block_size=st.integers(1, 5),
    keys=st.none() | st.text(max_size=2),
    token_start=st.none() | st.integers(0, 12),
    ranges=st.none() | st.dictionaries(st.integers(0, 20), st.none() | st.text(max_size=2), max_size=4),
)
def test_a_prompts_hashes_are_those_of_its_blocks_one_by_one(
    tokens: list[int], block_size: int, keys: str | None, token_start: int | None, ranges: dict[int, str | None] | None
) -> None:
    pairs = None if ranges is None else sorted(ranges.items())
    parent, expected = None, []
    for end in range(block_size, len(tokens) + 1, block_size):
        salt = resolve_block_extra_keys(end, keys, token_start, pairs)
        parent = compute_block_hash(parent, tokens[end - block_size : end], salt, "m")
        expected.append(parent)
    assert list(prompt_hashes(tokens, block_size, "m", keys, token_start, pairs)) == expected


@pytest.mark.parametrize(
    ("block_end", "arguments", "expected"),
    [
        (64, {}, None),
        (64, {"extra_keys": ("lora",)}, ("lora",)),
        (64, {"extra_keys": "k", "extra_key_token_start": 64}, None),
        (65, {"extra_keys": "k", "extra_key_token_start": 64}, "k"),
        (64, {"extra_keys": "k", "extra_key_ranges": [(64, "a")]}, None),
        (65, {"extra_keys": "k", "extra_key_ranges": [(64, "a")]}, "a"),
        (129, {"extra_key_ranges": [(0, "a"), (128, "b")]}, "b"),
        (128, {"extra_key_ranges": [(0, "a"), (128, "b")]}, "a"),
        (200, {"extra_key_ranges": [(0, "a"), (128, None)]}, None),
        (64, {"extra_keys": "k", "extra_key_ranges": []}, "k"),
    ],
)
def test_which_keys_salt_a_block(block_end: int, arguments: dict, expected: object) -> None:
    assert resolve_block_extra_keys(block_end, **arguments) == expected


def test_ranges_that_do_not_ascend_are_refused_also_before_the_first_hash() -> None:
    with pytest.raises(ValueError, match="ascend"):
        resolve_block_extra_keys(64, extra_key_ranges=[(10, "a"), (5, "b")])
    with pytest.raises(ValueError, match="ascend"):
        prompt_hashes([1, 2, 3], 4, "m", extra_key_ranges=[(10, "a"), (5, "b")])
