from __future__ import annotations

import msgpack
import pytest

from omlxd.policy import ARCCachePolicy, ChunkStatus, RequestContext
from tests.policy.models import key_of
from tests.policy.test_base import ready

K = [key_of(number) for number in range(20)]


def numbers(entries: object) -> list[int]:
    return [K.index(key) for key in entries]  # type: ignore[attr-defined]


def lists(policy: ARCCachePolicy) -> tuple[list[int], list[int], list[int], list[int]]:
    return numbers(policy.t1), numbers(policy.t2), numbers(policy.b1), numbers(policy.b2)


def with_ghosts(b1: int, b2: int, capacity: int = 10) -> ARCCachePolicy:
    """Ghosts 0.. in B1 and 10.. in B2, no residents."""
    policy = ARCCachePolicy(capacity)
    for number in range(b1):
        policy.insert(K[number], ready(number))
    policy.evict(b1, frozenset())
    for number in range(10, 10 + b2):
        policy.insert(K[number], ready(number))
        policy.touch([K[number]])
    policy.evict(b2, frozenset())
    assert lists(policy) == ([], [], list(range(b1)), list(range(10, 10 + b2)))
    return policy


def test_it_starts_empty_with_the_target_at_zero() -> None:
    policy = ARCCachePolicy(4)
    assert lists(policy) == ([], [], [], [])
    assert policy.target_t1_size == 0.0
    assert isinstance(policy.target_t1_size, float)


def test_insertion_enters_t1_on_a_ghost_hit_too_and_drops_the_ghost() -> None:
    policy = with_ghosts(1, 1)
    policy.insert(K[0], ready(0))
    policy.insert(K[10], ready(10))
    assert lists(policy) == ([0, 10], [], [], [])
    policy = ARCCachePolicy(4)
    policy.b1[K[0]] = policy.b2[K[0]] = None
    policy.insert(K[0], ready(0))
    assert lists(policy) == ([0], [], [], [])


def test_removal_makes_no_ghost_and_ignores_strangers() -> None:
    policy = ARCCachePolicy(4)
    policy.insert(K[0], ready(0))
    policy.insert(K[1], ready(1))
    policy.touch([K[1]])
    for key in (K[0], K[1], K[2]):
        policy.remove(key)
    assert lists(policy) == ([], [], [], [])


def test_touch_promotes_ready_keys_and_moves_pending_ones_within_t1() -> None:
    policy = ARCCachePolicy(8)
    for number in range(4):
        policy.insert(K[number], ready(number, ref_cnt=-1 if number == 0 else number - 1))
    policy.touch([K[0], K[1], K[2]])
    assert lists(policy)[:2] == ([3, 0], [2, 1])
    policy.touch([K[2]])
    assert lists(policy)[:2] == ([3, 0], [1, 2])


@pytest.mark.parametrize(("b1", "b2", "step"), [(1, 1, 1.0), (4, 1, 1.0), (2, 5, 2.5), (3, 5, 5 / 3)])
def test_a_hit_in_b1_raises_the_target_by_the_ratio_in_floats(b1: int, b2: int, step: float) -> None:
    policy = with_ghosts(b1, b2)
    policy.on_store_miss([K[0]], RequestContext())
    assert policy.target_t1_size == step
    assert lists(policy)[2] == [*range(1, b1), 0]


@pytest.mark.parametrize(("b1", "b2", "step"), [(1, 1, 1.0), (1, 4, 1.0), (5, 2, 2.5), (5, 3, 5 / 3)])
def test_a_hit_in_b2_lowers_it(b1: int, b2: int, step: float) -> None:
    policy = with_ghosts(b1, b2)
    policy.target_t1_size = 7.5
    policy.touch([K[10]], RequestContext())
    assert policy.target_t1_size == 7.5 - step
    assert lists(policy)[3] == [*range(11, 10 + b2), 10]


def test_the_target_stays_between_zero_and_the_capacity() -> None:
    policy = with_ghosts(2, 2, capacity=3)
    policy.touch([K[0]] * 5)
    assert policy.target_t1_size == 3.0
    policy.touch([K[10]] * 5)
    assert policy.target_t1_size == 0.0


def test_ghost_hits_are_handled_in_reverse_and_ghosts_stay_until_the_insertion() -> None:
    policy = with_ghosts(3, 0)
    policy.on_store_miss([K[0], K[1]], RequestContext())
    assert (lists(policy)[2], policy.target_t1_size) == ([2, 1, 0], 2.0)
    policy.insert(K[1], ready(1))
    policy.remove(K[1])  # the store failed: the adaptation stays
    assert (lists(policy)[2], policy.target_t1_size) == ([2, 0], 2.0)


def test_a_finished_request_promotes_what_it_reused_only() -> None:
    policy = ARCCachePolicy(12)
    for number in range(7):
        policy.insert(K[number], ready(number))
    policy.touch([K[5], K[6]])
    assert lists(policy)[:2] == ([0, 1, 2, 3, 4], [6, 5])
    policy.on_request_finished([[K[0], K[1], K[2], K[6], K[4], K[9]]], {K[0], K[6]}, {K[1], K[9]}, RequestContext())
    assert lists(policy) == ([2, 3, 4, 0], [5, 6, 1], [], [])


def test_a_finished_request_is_handled_from_the_last_position_to_the_first() -> None:
    policy = ARCCachePolicy(8)
    ctx = RequestContext()
    for number, position in ((0, 64), (1, 128), (2, 64), (3, 128)):
        policy.insert(K[number], ready(number))
        ctx.set_offload_key_position(K[number], position)
    policy.on_request_finished([[K[0], K[1]], [K[2], K[3]]], set(), set(K[:4]), ctx)
    assert lists(policy)[1] == [3, 1, 2, 0]


class TestEviction:
    def mixed(self, target: float) -> ARCCachePolicy:
        policy = ARCCachePolicy(10)
        for number in range(8):
            policy.insert(K[number], ready(number))
        policy.touch([K[7], K[6], K[5], K[4]])
        assert lists(policy)[:2] == ([0, 1, 2, 3], [4, 5, 6, 7])
        policy.target_t1_size = target
        return policy

    def victims(self, policy: ARCCachePolicy, n: int, protected: frozenset[bytes] = frozenset()) -> list[int] | None:
        found = policy.evict(n, protected)
        return None if found is None else [K.index(key) for key, _ in found]

    def test_t1_shrinks_virtually_while_it_is_at_the_target_or_above(self) -> None:
        assert self.victims(self.mixed(3.9), 4) == [0, 1, 4, 5]
        assert self.victims(self.mixed(0.0), 6) == [0, 1, 2, 3, 4, 5]
        assert self.victims(self.mixed(9.0), 6) == [4, 5, 6, 7, 0, 1]

    def test_the_victims_become_ghosts_of_their_list(self) -> None:
        policy = self.mixed(3.0)
        assert self.victims(policy, 3) == [0, 1, 4]
        assert lists(policy) == ([2, 3], [5, 6, 7], [0, 1], [4])

    def test_pinned_pending_and_protected_ones_are_skipped(self) -> None:
        policy = self.mixed(0.0)
        for number, ref_cnt in ((0, 1), (1, -1), (4, 2)):
            chunk = policy.get(K[number])
            assert chunk is not None
            chunk.ref_cnt = ref_cnt
        assert self.victims(policy, 4, frozenset({K[2], K[5]})) is None
        assert self.victims(policy, 3, frozenset({K[2], K[5]})) == [3, 6, 7]

    def test_when_t1_has_none_to_give_t2_does_and_the_other_way_round(self) -> None:
        policy = self.mixed(0.0)
        assert self.victims(policy, 2, frozenset(K[:4])) == [4, 5]
        policy = self.mixed(9.0)
        assert self.victims(policy, 2, frozenset(K[4:8])) == [0, 1]

    def test_a_refusal_changes_nothing(self) -> None:
        policy = self.mixed(2.0)
        before = lists(policy), policy.target_t1_size
        assert policy.evict(8, {K[7]}) is None
        assert policy.evict_until(lambda key, chunk: False, frozenset()) is None
        assert policy.evict(0, frozenset()) == []
        assert (lists(policy), policy.target_t1_size) == before

    def test_each_ghost_list_is_cut_to_the_capacity_by_itself(self) -> None:
        policy = ARCCachePolicy(3)
        for number in range(10):
            policy.insert(K[number], ready(number))
            if number >= 5:
                policy.touch([K[number]])
        policy.evict(10, frozenset())
        assert lists(policy) == ([], [], [2, 3, 4], [7, 8, 9])

    def test_victims_until_enough(self) -> None:
        policy = self.mixed(3.0)
        freed: list[int] = []

        def enough(key: bytes, chunk: ChunkStatus) -> bool:
            freed.append(chunk.chunk_id)
            return len(freed) == 3

        assert [K.index(key) for key, _ in policy.evict_until(enough, frozenset()) or []] == [0, 1, 4] == freed
        assert lists(policy)[2:] == ([0, 1], [4])

    def test_nothing_is_enough_for_an_empty_policy(self) -> None:
        assert ARCCachePolicy(3).evict_until(lambda key, chunk: True, frozenset()) is None


def test_clear_drops_ghosts_and_the_target_too() -> None:
    policy = with_ghosts(2, 2)
    policy.insert(K[5], ready(5, ref_cnt=3))
    policy.target_t1_size = 4.0
    policy.clear()
    assert lists(policy) == ([], [], [], [])
    assert policy.target_t1_size == 0.0


class TestRestart:
    def saved(self) -> tuple[dict[str, object], ARCCachePolicy]:
        policy = with_ghosts(3, 2)
        for number in (4, 5, 14, 15):
            policy.insert(K[number], ready(number))
        policy.touch([K[14], K[15]])
        policy.target_t1_size = 2.5
        assert lists(policy) == ([4, 5], [15, 14], [0, 1, 2], [10, 11])
        return msgpack.unpackb(msgpack.packb(policy.state())), policy

    def test_all_four_lists_and_the_target_come_back(self) -> None:
        state, policy = self.saved()
        restored = ARCCachePolicy(10)
        restored.restore_state(state, dict(policy.chunks()))
        assert (lists(restored), restored.target_t1_size) == (lists(policy), 2.5)

    def test_gone_keys_are_skipped_new_ones_enter_t1_and_residents_are_no_ghosts(self) -> None:
        state, _ = self.saved()
        restored = ARCCachePolicy(10)
        restored.restore_state(state, {K[number]: ready(number) for number in (9, 14, 5, 1, 10)})
        assert lists(restored) == ([5, 9, 1, 10], [14], [0, 2], [11])

    def test_a_smaller_capacity_cuts_ghosts_and_target(self) -> None:
        state, policy = self.saved()
        restored = ARCCachePolicy(1)
        restored.restore_state(state, dict(policy.chunks()))
        assert (lists(restored)[2:], restored.target_t1_size) == (([2], [11]), 1.0)
        restored = ARCCachePolicy(0)
        restored.restore_state(state, {})
        assert (lists(restored), restored.target_t1_size) == (([], [], [], []), 0.0)

    def test_a_state_of_lru_fills_t1_in_its_order(self) -> None:
        restored = ARCCachePolicy(10)
        restored.restore_state({"order": [K[3], K[1]]}, {K[1]: ready(1), K[3]: ready(3)})
        assert lists(restored) == ([3, 1], [], [], [])

    @pytest.mark.parametrize(
        "wrong",
        [{"order": 1}, {"b1": [1]}, {"b2": "x"}, {"t1": 99}, {"t1": "x"}, {"target": "x"}, {"target": float("nan")}],
    )
    def test_a_malformed_state_is_refused_and_changes_nothing(self, wrong: dict[str, object]) -> None:
        state, policy = self.saved()
        before = lists(policy), policy.target_t1_size
        with pytest.raises(ValueError, match="policy state"):
            policy.restore_state({**state, **wrong}, {})
        assert (lists(policy), policy.target_t1_size) == before
