from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.storage.blocks import HASH_BYTES, KEY_BYTES, MAX_GROUP, BlockMeta, block_key, split_key

HEAD = block_key(bytes(32))
SPACE = bytes([7]) * 32


@given(st.binary(min_size=32, max_size=32), st.integers(0, MAX_GROUP))
def test_a_key_is_the_hash_and_the_group_and_splits_back(chain_hash: bytes, group: int) -> None:
    key = block_key(chain_hash, group)
    assert len(key) == KEY_BYTES
    assert key.startswith(chain_hash)
    assert split_key(key) == (chain_hash, group)


def test_the_groups_of_one_hash_sort_in_order() -> None:
    keys = [block_key(bytes(32), group) for group in (0, 1, 255, 256, 65536)]
    assert keys == sorted(keys)


@pytest.mark.parametrize("length", [0, HASH_BYTES - 1, HASH_BYTES + 1])
def test_a_hash_of_a_wrong_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"this one has {length}"):
        block_key(bytes(length))


@pytest.mark.parametrize("group", [-1, MAX_GROUP + 1])
def test_a_group_outside_four_bytes_is_refused(group: int) -> None:
    with pytest.raises(ValueError, match=str(group)):
        block_key(bytes(32), group)


def test_a_key_of_a_wrong_length_does_not_split() -> None:
    with pytest.raises(ValueError, match="36 bytes"):
        split_key(bytes(32))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"key": bytes(32)}, "block key"),
        ({"namespace": b"short"}, "namespace id"),
        ({"nbytes": -1}, "-1 bytes"),
        ({"position": -1}, "position -1"),
        ({"parent": bytes(32), "position": 1}, "parent's key"),
        ({"parent": HEAD}, "position 0 with a parent"),
    ],
)
def test_a_record_that_cannot_be_true_is_refused(change: dict[str, object], named: str) -> None:
    good = BlockMeta(key=HEAD, namespace=SPACE, nbytes=1, parent=None, position=0)
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(good, **change)  # type: ignore[arg-type]


def test_an_empty_payload_and_a_later_block_are_allowed() -> None:
    later = BlockMeta(key=block_key(SPACE), namespace=SPACE, nbytes=0, parent=HEAD, position=4)
    assert later.layout is None
