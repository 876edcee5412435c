from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.storage.paged import BlockHashToBlockMap, BlockTable, CacheBlock, FreeKVCacheBlockQueue


def blocks_of(n: int) -> list[CacheBlock]:
    return [CacheBlock(i) for i in range(n)]


def test_a_block_says_whether_it_is_full_and_shared() -> None:
    block = CacheBlock(3, ref_count=1, token_count=63)
    assert (block.is_full(64), block.is_shared()) == (False, False)
    block.token_count, block.ref_count = 64, 2
    assert (block.is_full(64), block.is_shared()) == (True, True)


def test_a_blocks_repr_shows_id_references_tokens_and_the_head_of_the_hash() -> None:
    block = CacheBlock(3, ref_count=2, block_hash=bytes.fromhex("0123456789abcdef" * 4), token_count=64)
    shown = repr(block)
    assert [part in shown for part in ("3", "2", "64", "01234567")] == [True] * 4
    assert "0123456789" not in shown
    block.reset_hash()
    assert block.block_hash is None
    assert "None" in repr(block)


def test_the_repr_of_a_queued_block_does_not_follow_its_links() -> None:
    queued = blocks_of(50)
    FreeKVCacheBlockQueue(queued)
    assert len(repr(queued[25])) < 100


def test_touch_moves_last_access_forward() -> None:
    block = CacheBlock(1, last_access=0.0)
    block.touch()
    assert block.last_access > 0.0


class TestQueue:
    def test_blocks_leave_in_order_and_an_empty_queue_says_so(self) -> None:
        queue = FreeKVCacheBlockQueue(blocks_of(2))
        assert [queue.popleft().block_id, queue.popleft().block_id] == [0, 1]
        with pytest.raises(ValueError, match="free block"):
            queue.popleft()

    def test_taking_too_many_takes_none(self) -> None:
        queue = FreeKVCacheBlockQueue(blocks_of(3))
        with pytest.raises(AssertionError):
            queue.popleft_n(4)
        assert queue.num_free_blocks == 3
        assert queue.popleft_n(0) == []
        assert [block.block_id for block in queue.popleft_n(3)] == [0, 1, 2]

    def test_a_block_can_neither_leave_nor_enter_twice(self) -> None:
        blocks = blocks_of(3)
        queue = FreeKVCacheBlockQueue(blocks)
        queue.remove(blocks[1])
        with pytest.raises(RuntimeError):
            queue.remove(blocks[1])
        with pytest.raises(RuntimeError):
            queue.append(blocks[0])
        with pytest.raises(RuntimeError):
            queue.remove(CacheBlock(9))
        assert [block.block_id for block in queue.get_all_free_blocks()] == [0, 2]

    @given(st.lists(st.tuples(st.sampled_from(["pop", "pop_n", "remove", "append", "append_n"]), st.integers(0, 9))))
    def test_it_is_a_list(self, steps: list[tuple[str, int]]) -> None:
        blocks = blocks_of(10)
        queue, model = FreeKVCacheBlockQueue(blocks[:6]), blocks[:6]
        for step, n in steps:
            if step == "pop" and model:
                assert queue.popleft() is model.pop(0)
            elif step == "pop_n" and n <= len(model):
                assert queue.popleft_n(n) == model[:n]
                del model[:n]
            elif step == "remove" and blocks[n] in model:
                queue.remove(blocks[n])
                model.remove(blocks[n])
            elif step == "append" and blocks[n] not in model:
                queue.append(blocks[n])
                model.append(blocks[n])
            elif step == "append_n":
                absent = [block for block in blocks[n:] if block not in model]
                queue.append_n(absent)
                model += absent
            assert queue.get_all_free_blocks() == model
            assert queue.num_free_blocks == len(model)


class TestMap:
    def test_a_hash_can_name_several_blocks_and_each_leaves_by_its_id(self) -> None:
        index, blocks = BlockHashToBlockMap(), blocks_of(3)
        for block in blocks:
            index.insert(b"h", block)
        assert len(index) == 1
        assert index.get_block(b"h") in blocks
        assert index.pop(b"h", 1) is blocks[1]
        assert index.pop(b"h", 1) is None
        assert index.pop(b"h", 0) is blocks[0]
        assert index.get_block(b"h") is blocks[2]
        assert index.pop(b"h", 2) is blocks[2]
        assert index.get_block(b"h") is None
        assert len(index) == 0

    def test_a_wrong_id_or_hash_changes_nothing(self) -> None:
        index, block = BlockHashToBlockMap(), CacheBlock(1)
        index.insert(b"h", block)
        assert index.pop(b"h", 2) is None
        assert index.pop(b"g", 1) is None
        assert index.get_block(b"h") is block
        index.clear()
        assert len(index) == 0

    @given(st.lists(st.tuples(st.booleans(), st.sampled_from([b"a", b"b"]), st.integers(0, 2))))
    def test_it_is_a_set_of_pairs(self, steps: list[tuple[bool, bytes, int]]) -> None:
        index, blocks = BlockHashToBlockMap(), blocks_of(3)
        model: set[tuple[bytes, int]] = set()
        for insert, name, number in steps:
            if insert:
                index.insert(name, blocks[number])
                model.add((name, number))
            else:
                expected = blocks[number] if (name, number) in model else None
                assert index.pop(name, number) is expected
                model.discard((name, number))
            for one in (b"a", b"b"):
                ids = {number for name, number in model if name == one}
                found = index.get_block(one)
                assert (found.block_id in ids) if found else not ids
            assert len(index) == len({name for name, _ in model})


def test_a_copied_table_has_a_list_of_its_own() -> None:
    table = BlockTable("a")
    table.add_block(3, 64)
    copy = table.copy("b")
    copy.add_block(4, 10)
    assert (table.request_id, table.block_ids, table.num_tokens, len(table)) == ("a", [3], 64, 1)
    assert (copy.request_id, copy.block_ids, copy.num_tokens, len(copy)) == ("b", [3, 4], 74, 2)
