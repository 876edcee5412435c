from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.policy import CachePolicy, ChunkStatus, LRUCachePolicy, RequestContext, order_request_keys
from tests.policy.models import key_of

A, B, C, D = (key_of(number) for number in range(4))


def ready(chunk_id: int, ref_cnt: int = 0) -> ChunkStatus:
    chunk = ChunkStatus(chunk_id)
    chunk.ref_cnt = ref_cnt
    return chunk


class Plain(CachePolicy):
    """The least that a policy from outside has: FIFO, written before the later hooks existed."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.entries: dict[bytes, ChunkStatus] = {}
        self.touched: list[list[bytes]] = []

    def get(self, key: bytes) -> ChunkStatus | None:
        return self.entries.get(key)

    def insert(self, key: bytes, chunk: ChunkStatus) -> None:  # type: ignore[override]
        self.entries[key] = chunk

    def remove(self, key: bytes) -> None:
        del self.entries[key]

    def touch(self, keys, ctx=None) -> None:  # type: ignore[no-untyped-def]
        self.touched.append(list(keys))

    def evict(self, n, protected):  # type: ignore[no-untyped-def]
        found = [(key, c) for key, c in self.entries.items() if c.ref_cnt == 0 and key not in protected][:n]
        if len(found) < n:
            return None
        for key, _ in found:
            del self.entries[key]
        return found

    def clear(self) -> None:
        self.entries.clear()


def test_a_new_chunk_is_allocated_and_not_readable() -> None:
    chunk = ChunkStatus(7)
    assert (chunk.chunk_id, chunk.ref_cnt, chunk.is_ready) == (7, -1, False)
    chunk.ref_cnt = 0
    assert chunk.is_ready
    assert "7" in repr(chunk)
    assert not hasattr(chunk, "__dict__")


def test_a_policys_instances_can_be_patched() -> None:
    policy = LRUCachePolicy(1)
    policy.get = lambda key: None  # type: ignore[method-assign]
    policy.insert(A, ready(0))
    assert policy.get(A) is None


def test_a_context_knows_the_positions_it_was_told() -> None:
    ctx = RequestContext("r")
    ctx.set_offload_key_position(A, 64)
    assert (ctx.req_id, ctx.get_offload_key_position(A), ctx.get_offload_key_position(B)) == ("r", 64, None)
    assert "r" in repr(ctx)


def test_keys_of_all_groups_are_ordered_by_position_if_every_key_has_one() -> None:
    ctx = RequestContext()
    for key, position in ((A, 64), (B, 128), (C, 64)):
        ctx.set_offload_key_position(key, position)
    assert order_request_keys([[B, A], [C]], ctx) == [A, C, B]
    assert order_request_keys([[B, A], [C, D]], ctx) == [B, A, C, D]
    assert order_request_keys([[B, A], [C]], None) == [B, A, C]
    assert order_request_keys([], ctx) == []


@given(
    st.lists(st.lists(st.integers(0, 9).map(key_of))), st.dictionaries(st.integers(0, 9).map(key_of), st.integers(0, 3))
)
def test_the_ordering_is_stable(groups: list[list[bytes]], positions: dict[bytes, int]) -> None:
    ctx = RequestContext()
    for key, position in positions.items():
        ctx.set_offload_key_position(key, position)
    flat = [key for group in groups for key in group]
    known = all(key in positions for key in flat)
    expected = sorted(flat, key=positions.__getitem__) if known else flat
    assert order_request_keys(groups, ctx) == expected


class TestDefaults:
    def test_misses_and_finished_requests_touch(self) -> None:
        policy = Plain(4)
        policy.on_store_miss([A, B], RequestContext())
        policy.on_request_finished([[A], [B, C]], {A}, {B}, RequestContext())
        assert policy.touched == [[A, B], [A], [B, C]]

    def test_the_transitions_and_the_first_access_do_nothing(self) -> None:
        policy = Plain(4)
        policy.insert(A, ready(0))
        policy.mark_evictable(A)
        policy.mark_non_evictable(A)
        policy.on_request_access([A], RequestContext())
        assert policy.touched == []

    def test_victims_until_enough_come_one_by_one(self) -> None:
        policy = Plain(4)
        for number, key in enumerate((A, B, C)):
            policy.insert(key, ready(number))
        victims = policy.evict_until(lambda key, chunk: chunk.chunk_id == 1, frozenset())
        assert [key for key, _ in victims or []] == [A, B]
        assert policy.evict_until(lambda key, chunk: False, {C}) is None
        assert policy.get(C) is not None

    def test_a_policy_that_cannot_list_its_chunks_cannot_be_persisted(self) -> None:
        with pytest.raises(NotImplementedError, match="Plain"):
            Plain(4).state()

    def test_any_policy_takes_the_order_of_anothers_state(self) -> None:
        policy = Plain(4)
        policy.restore_state({"order": [C, A, D]}, {A: ready(0), B: ready(1), C: ready(2)})
        assert list(policy.entries) == [C, A, B]

    @pytest.mark.parametrize("order", [7, "text", [A, 7]])
    def test_a_malformed_state_is_refused_and_changes_nothing(self, order: object) -> None:
        policy = Plain(4)
        policy.insert(A, ready(0))
        with pytest.raises(ValueError, match="'order'"):
            policy.restore_state({"order": order}, {B: ready(1)})
        assert list(policy.entries) == [A]
