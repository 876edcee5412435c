from __future__ import annotations

import msgpack
import pytest

from omlxd.policy import ChunkStatus, LRUCachePolicy, RequestContext, get_policy, lru
from tests.policy.models import key_of
from tests.policy.test_base import ready

K = [key_of(number) for number in range(12)]


def filled(n: int, ref_cnt: int = 0) -> LRUCachePolicy:
    policy = LRUCachePolicy(16)
    for number in range(n):
        policy.insert(K[number], ready(number, ref_cnt))
    return policy


def with_positions(keys: list[bytes], step: int = 64) -> RequestContext:
    ctx = RequestContext("r")
    for number, key in enumerate(keys):
        ctx.set_offload_key_position(key, (number + 1) * step)
    return ctx


def victims(policy: LRUCachePolicy, n: int, protected: frozenset[bytes] = frozenset()) -> list[int] | None:
    found = policy.evict(n, protected)
    return None if found is None else [K.index(key) for key, _ in found]


def test_insertion_gives_the_next_rank_and_get_gives_none() -> None:
    policy = filled(3)
    assert policy.get(K[0]) is not None
    assert policy.get(K[9]) is None
    assert victims(policy, 3) == [0, 1, 2]


def test_evicting_none_gives_an_empty_list_also_from_an_empty_policy() -> None:
    assert filled(0).evict(0, frozenset()) == []
    assert filled(2).evict(0, frozenset()) == []
    assert filled(0).evict(1, frozenset()) is None


def test_touch_goes_from_tail_to_head_and_ignores_strangers() -> None:
    policy = filled(4)
    policy.touch([K[0], K[9], K[1]], RequestContext())
    assert victims(policy, 4) == [2, 3, 1, 0]


def test_removing_a_stranger_is_an_error() -> None:
    policy = filled(1)
    policy.remove(K[0])
    with pytest.raises(KeyError):
        policy.remove(K[0])


def test_a_refused_eviction_changes_nothing_not_even_the_order() -> None:
    policy = filled(5)
    policy.touch([K[1]])
    before = list(policy.chunks())
    assert policy.evict(5, {K[3]}) is None
    assert policy.evict(6, frozenset()) is None
    assert policy.evict_until(lambda key, chunk: False, frozenset()) is None
    assert list(policy.chunks()) == before
    assert victims(policy, 5) == [0, 2, 3, 4, 1]


def test_pending_and_pinned_keys_are_ranked_anew_too_and_come_back_at_that_rank() -> None:
    policy = filled(4)
    pending, pinned = policy.get(K[0]), policy.get(K[1])
    assert pending is not None
    assert pinned is not None
    pending.ref_cnt, pinned.ref_cnt = -1, 1
    policy.mark_non_evictable(K[1])
    policy.touch([K[1], K[0]])
    policy.insert(K[4], ready(4))
    assert victims(policy, 1) == [2]
    assert policy.evict(5, frozenset()) is None  # a search has passed the two by
    pending.ref_cnt = pinned.ref_cnt = 0
    policy.mark_evictable(K[0])
    policy.mark_evictable(K[1])
    assert victims(policy, 4) == [3, 0, 1, 4]


def test_a_transfer_does_not_change_the_rank() -> None:
    policy = filled(3)
    chunk = policy.get(K[0])
    assert chunk is not None
    chunk.ref_cnt = 1
    policy.mark_non_evictable(K[0])
    assert victims(policy, 1) == [1]
    chunk.ref_cnt = 0
    policy.mark_evictable(K[0])
    assert victims(policy, 2) == [0, 2]


def test_pin_cycles_leave_no_residue() -> None:
    policy = filled(4)
    chunk = policy.get(K[0])
    assert chunk is not None

    def cycle() -> None:
        chunk.ref_cnt = 1
        policy.mark_non_evictable(K[0])
        assert policy.evict(4, frozenset()) is None
        chunk.ref_cnt = 0
        policy.mark_evictable(K[0])

    def size() -> int:
        return sum(len(part) for part in (policy._log_keys, policy._heap, policy._heaped, policy._out, policy._shared))

    cycle()
    before = size()
    for _ in range(128):
        cycle()
    assert size() == before


def test_memory_is_bounded_by_the_residents_however_often_they_are_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lru, "_SLACK", 8)
    policy = filled(10)
    for _ in range(1000):
        policy.touch(K[:10])
        policy.insert(K[10], ready(10))
        policy.remove(K[10])
        ctx = RequestContext()
        policy.on_request_access(K[:10], ctx)
    for _ in range(1000):
        policy.on_request_access(K[:10], RequestContext())
        assert policy.evict(11, frozenset()) is None
    for _ in range(1000):
        policy.on_request_access(K[:10], RequestContext())
        assert policy.evict(10, {K[3]}) is None
    assert len(policy._log_keys) <= 2 * 10 + 8 + 10
    assert len(policy._heap) <= 3 * 10 + 8
    assert policy._num_places <= 3 * 10 + 8
    assert len(policy._groups) <= 10


def test_a_finished_request_orders_all_it_saw_by_position_over_all_groups() -> None:
    policy = filled(6)
    ctx = RequestContext()
    for key, position in ((K[0], 64), (K[1], 128), (K[2], 64), (K[3], 128)):
        ctx.set_offload_key_position(key, position)
    policy.on_request_finished([[K[0], K[1]], [K[2], K[3]]], {K[0]}, {K[1], K[2]}, ctx)
    assert victims(policy, 6) == [4, 5, 3, 1, 2, 0]


class TestRunningRequest:
    def test_its_tail_leaves_first_and_all_of_it_after_what_was_there(self) -> None:
        policy = filled(6)
        policy.on_request_access(K[:3], with_positions(K[:3]))
        assert victims(policy, 6) == [3, 4, 5, 2, 1, 0]

    def test_keys_seen_later_join_at_the_same_rank(self) -> None:
        policy = filled(2)
        ctx = with_positions(K[:5])
        policy.on_request_access(K[:2], ctx)
        policy.insert(K[9], ready(9))
        for number in (2, 3, 4):
            policy.insert(K[number], ready(number), ctx)
        policy.on_request_access(K[2:5], ctx)
        assert victims(policy, 6) == [4, 3, 2, 1, 0, 9]

    def test_a_newer_access_is_not_demoted(self) -> None:
        policy = filled(4)
        ctx = with_positions(K[:4])
        policy.on_request_access(K[:1], ctx)
        policy.touch([K[1]])
        policy.on_request_access(K[1:3], ctx)
        assert victims(policy, 4) == [3, 2, 0, 1]

    def test_without_positions_what_was_seen_first_leaves_last_and_insertion_gives_the_next_rank(self) -> None:
        policy = filled(3)
        ctx = RequestContext()
        policy.on_request_access(K[:2], ctx)
        policy.on_request_access(K[2:3], ctx)
        policy.insert(K[3], ready(3), ctx)
        assert victims(policy, 4) == [2, 1, 0, 3]

    def test_pinned_and_pending_keys_take_part(self) -> None:
        policy = LRUCachePolicy(8)
        ctx = with_positions(K[:3])
        policy.on_request_access(K[:3], ctx)
        chunks = [ChunkStatus(number) for number in range(3)]
        for key, chunk in zip(K, chunks, strict=False):
            policy.insert(key, chunk, ctx)
        policy.insert(K[3], ready(3))
        for key, chunk in zip(K, chunks, strict=False):
            chunk.ref_cnt = 0
            policy.mark_evictable(key)
        assert victims(policy, 2) == [2, 1]
        chunks[0].ref_cnt = 1
        policy.mark_non_evictable(K[0])
        assert victims(policy, 1) == [3]
        chunks[0].ref_cnt = 0
        policy.mark_evictable(K[0])
        assert victims(policy, 1) == [0]

    def test_its_end_gives_proper_ranks_and_the_next_request_its_own(self) -> None:
        policy = filled(4)
        ctx = with_positions(K[:2])
        policy.on_request_access(K[:2], ctx)
        policy.touch([K[3]])
        policy.on_request_finished([K[:2]], set(), set(K[:2]), ctx)
        assert policy not in ctx.scratch
        assert victims(policy, 4) == [2, 3, 1, 0]

    def test_two_policies_do_not_mix_up_the_ranks_of_one_request(self) -> None:
        one, two = filled(3), filled(6)
        ctx = with_positions(K[:3])
        one.on_request_access(K[:2], ctx)
        two.on_request_access(K[:2], ctx)
        assert victims(one, 3) == [2, 1, 0]
        assert victims(two, 6) == [2, 3, 4, 5, 1, 0]

    def test_clear_ends_its_rank(self) -> None:
        policy = filled(2)
        ctx = with_positions(K[:3])
        policy.on_request_access(K[:2], ctx)
        policy.clear()
        policy.insert(K[5], ready(5), ctx)
        policy.insert(K[0], ready(0), ctx)
        policy.insert(K[1], ready(1), ctx)
        assert victims(policy, 1) == [5]
        policy.on_request_access([K[0], K[2]], ctx)
        policy.insert(K[2], ready(2), ctx)
        assert victims(policy, 3) == [1, 2, 0]


def test_a_key_that_is_inserted_again_has_the_new_chunk_at_the_next_rank() -> None:
    policy = filled(3)
    pinned = policy.get(K[0])
    assert pinned is not None
    pinned.ref_cnt = 1
    assert policy.evict(3, frozenset()) is None  # a search has met it
    policy.insert(K[0], ready(7))
    policy.mark_evictable(K[0])
    policy.insert(K[3], ready(3))
    found = policy.evict(4, frozenset())
    assert [chunk.chunk_id for _, chunk in found or []] == [1, 2, 7, 3]


def test_clear_drops_everything_whatever_its_ref_cnt() -> None:
    policy = filled(3)
    pinned = policy.get(K[0])
    assert pinned is not None
    pinned.ref_cnt = 2
    policy.on_request_access(K[:1], RequestContext())
    assert policy.evict(3, {K[1]}) is None
    policy.on_request_access(K[2:3], RequestContext())
    assert all((policy._out, policy._heap, policy._heaped, policy._shared, policy._groups, policy._num_places))
    policy.clear()
    assert not any((policy._out, policy._heap, policy._heaped, policy._shared, policy._groups, policy._num_places))
    assert not any((policy._log_keys, policy._log_ranks, policy._rank, policy._head))
    assert [policy.get(key) for key in K[:3]] == [None] * 3
    policy.insert(K[1], ready(1))
    assert victims(policy, 1) == [1]


def test_the_order_survives_a_restart_without_the_gone_and_with_the_new_as_most_recent() -> None:
    policy = filled(5)
    policy.touch([K[0]])
    state = msgpack.unpackb(msgpack.packb(policy.state()))
    residents = {K[number]: ready(number) for number in (8, 0, 4, 2, 1)}
    restored = get_policy("lru")(16)
    restored.restore_state(state, residents)
    assert [K.index(key) for key, _ in restored.chunks()] == [1, 2, 4, 0, 8]
    assert all(restored.get(key) is chunk for key, chunk in residents.items())


def test_a_state_of_arc_gives_its_order() -> None:
    arc = get_policy("arc")(16)
    for number in range(4):
        arc.insert(K[number], ready(number))
    arc.touch([K[1]])
    policy = LRUCachePolicy(16)
    policy.restore_state(arc.state(), dict(arc.chunks()))
    assert [K.index(key) for key, _ in policy.chunks()] == [0, 2, 3, 1]
