from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from omlxd.policy import ChunkStatus, LRUCachePolicy, RequestContext
from omlxd.policy.base import Victims
from omlxd.storage.chunks import ChunkCounters, ChunkError, ChunkEvent, ChunkManager, Lookup, PreparedStore
from omlxd.storage.ram import ChunkManager as FromRam
from tests.policy.models import key_of
from tests.policy.test_base import Plain

K = [key_of(number) for number in range(20)]


class Recording(LRUCachePolicy):
    """LRU that writes down what it is told."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.calls: list[tuple[object, ...]] = []

    def on_store_miss(self, keys: Sequence[bytes], ctx: RequestContext | None = None) -> None:
        self.calls.append(("miss", numbers(keys)))
        super().on_store_miss(keys, ctx)

    def on_request_access(self, keys: Sequence[bytes], ctx: RequestContext) -> None:
        self.calls.append(("access", numbers(keys)))
        super().on_request_access(keys, ctx)

    def insert(self, key: bytes, chunk: ChunkStatus, req_context: RequestContext | None = None) -> None:
        self.calls.append(("insert", K.index(key), req_context.req_id if req_context else None))
        super().insert(key, chunk, req_context)

    def mark_evictable(self, key: bytes) -> None:
        self.calls.append(("evictable", K.index(key)))
        super().mark_evictable(key)

    def mark_non_evictable(self, key: bytes) -> None:
        self.calls.append(("busy", K.index(key)))

    def evict(self, n: int, protected: Collection[bytes]) -> Victims | None:
        self.calls.append(("evict", n, sorted(numbers(protected))))
        return super().evict(n, protected)

    def on_request_finished(self, key_groups, insertion_only_keys, reused_keys, ctx=None) -> None:  # type: ignore[no-untyped-def]
        groups = [numbers(group) for group in key_groups]
        self.calls.append(("finished", groups, set(numbers(insertion_only_keys)), set(numbers(reused_keys))))
        super().on_request_finished(key_groups, insertion_only_keys, reused_keys, ctx)

    def take(self, *kinds: str) -> list[tuple[object, ...]]:
        calls, self.calls = self.calls, []
        return [call for call in calls if not kinds or call[0] in kinds]


def numbers(keys: Collection[bytes]) -> list[int]:
    return [K.index(key) for key in keys]


def recording(num_chunks: int, **options: object) -> tuple[ChunkManager, Recording]:
    manager = ChunkManager(num_chunks, Recording, **options)  # type: ignore[arg-type]
    assert isinstance(manager.policy, Recording)
    return manager, manager.policy


def stored(manager: ChunkManager, *keys: int, ctx: RequestContext | None = None) -> PreparedStore:
    prepared = manager.prepare_store([K[key] for key in keys], ctx)
    assert prepared is not None
    manager.complete_store(prepared.keys_to_store, True, ctx)
    return prepared


def test_the_ram_tier_offers_the_manager_by_name() -> None:
    assert FromRam is ChunkManager
    manager = FromRam(4, cache_policy="arc", enable_events=True, store_threshold=2, max_tracker_size=8)
    assert (manager.num_chunks, manager.num_free, manager.num_evictable, len(manager)) == (4, 4, 0, 0)


@pytest.mark.parametrize("policy", ["lru", "arc", "omlxd.policy.lru:LRUCachePolicy", LRUCachePolicy])
def test_a_chunk_lives_from_pending_to_ready_to_gone(policy: str) -> None:
    manager = ChunkManager(2, policy, enable_events=True)
    assert manager.lookup(K[0]) is Lookup.MISS
    prepared = manager.prepare_store(K[:2])
    assert prepared == PreparedStore(K[:2], [0, 1], [])
    assert manager.lookup_many([*K[:3], K[0]]) == [Lookup.PENDING, Lookup.PENDING, Lookup.MISS, Lookup.PENDING]
    assert manager.complete_store(K[:2]) == K[:2]
    assert manager.lookup(K[0]) is Lookup.HIT
    assert K[0] in manager
    assert stored(manager, 2).evicted_keys == [K[0]]
    assert manager.lookup(K[0]) is Lookup.MISS
    assert manager.take_events() == [ChunkEvent(K[:2], False), ChunkEvent([K[0]], True), ChunkEvent([K[2]], False)]
    assert manager.take_events() == []


def test_without_events_there_are_none() -> None:
    manager = ChunkManager(2)
    stored(manager, 0)
    assert manager.take_events() == []


def test_slots_are_fresh_ones_first_and_then_the_one_freed_last() -> None:
    manager = ChunkManager(5)
    assert stored(manager, 0, 1, 2).chunk_ids == [0, 1, 2]
    manager.prepare_store([K[3]])
    manager.complete_store([K[3]], success=False)  # slot 3 is free now, but 4 was never used
    assert stored(manager, 4).chunk_ids == [4]
    prepared = stored(manager, 5, 6, 7)
    assert prepared.evicted_keys == K[:2]
    assert prepared.chunk_ids == [1, 0, 3]


class TestLoad:
    def test_each_occurrence_pins_and_the_answer_has_the_order_of_the_keys(self) -> None:
        manager, policy = recording(4)
        stored(manager, 0, 1, 2)
        policy.take()
        assert manager.prepare_load([K[2], K[0], K[2]]) == [2, 0, 2]
        assert policy.take() == [("busy", 2), ("busy", 0)]
        chunk = manager.get(K[2])
        assert chunk is not None
        assert (chunk.ref_cnt, manager.num_evictable) == (2, 1)
        manager.complete_load([K[2]])
        assert policy.take() == []
        manager.complete_load([K[0], K[2]])
        assert policy.take() == [("evictable", 0), ("evictable", 2)]
        assert (chunk.ref_cnt, manager.num_evictable) == (0, 3)

    @pytest.mark.parametrize(("key", "said"), [(3, "absent"), (2, "pending")])
    def test_what_is_absent_or_pending_cannot_be_loaded_and_nothing_is_pinned(self, key: int, said: str) -> None:
        manager = ChunkManager(4)
        stored(manager, 0)
        manager.prepare_store([K[2]])
        with pytest.raises(ChunkError, match=said):
            manager.prepare_load([K[0], K[key]])
        with pytest.raises(ChunkError, match=said):
            manager.pin(K[key])
        assert manager.num_evictable == 1

    def test_completing_what_nobody_loads_is_an_error_and_changes_nothing(self) -> None:
        manager, policy = recording(4)
        stored(manager, 0, 1)
        manager.prepare_load([K[0], K[1]])
        manager.prepare_store([K[3]])
        policy.take()
        for keys in ([K[0], K[0]], [K[0], K[1], K[2]], [K[1], K[3]]):
            with pytest.raises(ChunkError, match="no load"):
                manager.complete_load(keys)
        assert policy.take() == []
        chunk = manager.get(K[0])
        assert chunk is not None
        assert (chunk.ref_cnt, manager.num_evictable) == (1, 0)

    def test_a_pin_is_no_access(self) -> None:
        manager, policy = recording(4)
        stored(manager, 0)
        policy.take()
        assert (manager.pin(K[0]).ref_cnt, manager.num_evictable) == (1, 0)
        assert (manager.pin(K[0]).ref_cnt, manager.num_evictable) == (2, 0)
        manager.unpin(K[0])
        manager.unpin(K[0])
        assert manager.num_evictable == 1
        assert policy.take() == [("busy", 0), ("evictable", 0)]
        with pytest.raises(ChunkError):
            manager.unpin(K[0])

    def test_what_is_read_is_not_evicted(self) -> None:
        manager = ChunkManager(2)
        stored(manager, 0, 1)
        manager.prepare_load([K[0]])
        assert stored(manager, 2).evicted_keys == [K[1]]
        assert manager.prepare_store([K[3], K[4]]) is None


class TestStore:
    def test_lookups_have_no_effect_on_recency(self) -> None:
        manager = ChunkManager(2)
        stored(manager, 0, 1)
        manager.lookup(K[0], RequestContext())
        manager.lookup_many([K[0]])
        assert stored(manager, 2).evicted_keys == [K[0]]

    def test_present_and_pending_keys_and_repetitions_are_not_stored_again(self) -> None:
        manager = ChunkManager(6)
        stored(manager, 0)
        manager.prepare_store([K[1]])
        assert manager.prepare_store([K[0], K[1], K[2], K[2]]) == PreparedStore([K[2]], [2], [])

    def test_nothing_to_store_is_an_empty_answer_also_when_full(self) -> None:
        manager = ChunkManager(1)
        stored(manager, 0)
        manager.prepare_load([K[0]])
        assert manager.prepare_store([K[0]]) == PreparedStore([], [], [])
        assert manager.prepare_store([]) == PreparedStore([], [], [])

    def test_too_little_that_is_evictable_is_refused_without_asking_the_policy(self) -> None:
        manager, policy = recording(3)
        stored(manager, 0, 1, 2)
        manager.prepare_load([K[0], K[1]])
        policy.take()
        assert manager.prepare_store([K[3], K[4]]) is None
        assert policy.take("evict") == []
        assert stored(manager, 5).evicted_keys == [K[2]]
        assert manager.counters == ChunkCounters(
            allocation_requested=3 + 2 + 1, stored=4, evicted=1, refused_stores=1, failed=0, below_threshold=0
        )

    def test_all_offered_keys_are_protected(self) -> None:
        manager, policy = recording(3)
        stored(manager, 0, 1, 2)
        policy.take()
        assert manager.prepare_store([K[0], K[3], K[1], K[4]]) is None
        assert policy.take("evict") == [("evict", 2, [0, 1, 3, 4])]
        assert stored(manager, 0, 1, 3).evicted_keys == [K[2]]

    def test_a_refused_store_changes_nothing_in_the_tier(self) -> None:
        manager = ChunkManager(2, enable_events=True)
        stored(manager, 0, 1)
        manager.take_events()
        assert manager.prepare_store([K[2], K[3], K[4]]) is None
        assert (manager.lookup_many(K[:3]), manager.num_free) == ([Lookup.HIT, Lookup.HIT, Lookup.MISS], 0)
        assert manager.take_events() == []

    def test_completion_is_idempotent_and_ignores_strangers(self) -> None:
        manager = ChunkManager(3, enable_events=True)
        manager.prepare_store(K[:2])
        assert manager.complete_store([K[0], K[0], K[9]]) == [K[0]]
        assert manager.complete_store([K[0]]) == []
        assert manager.complete_store([K[0]], success=False) == []
        assert manager.lookup(K[0]) is Lookup.HIT
        assert manager.take_events() == [ChunkEvent([K[0]], False)]

    @pytest.mark.parametrize("policy", ["lru", "arc"])
    def test_a_failed_store_is_absent_with_its_slot_free_and_no_ghost(self, policy: str) -> None:
        manager = ChunkManager(2, policy, enable_events=True)
        manager.prepare_store(K[:2])
        assert manager.complete_store(K[:1], success=False) == K[:1]
        assert (manager.lookup(K[0]), manager.num_free, manager.counters.failed) == (Lookup.MISS, 1, 1)
        assert manager.policy.state().get("b1", []) == []
        assert manager.take_events() == []
        prepared = manager.prepare_store([K[2]])
        assert prepared is not None
        assert prepared.chunk_ids == [0]

    def test_discarded_chunks_leave_without_ghosts_unless_somebody_reads_or_writes_them(self) -> None:
        manager = ChunkManager(4, "arc", enable_events=True)
        stored(manager, 0, 1)
        manager.prepare_store([K[2]])
        manager.prepare_load([K[1]])
        manager.take_events()
        assert manager.discard([K[0], K[0], K[1], K[2], K[3]]) == [K[0]]
        assert manager.lookup_many(K[:3]) == [Lookup.MISS, Lookup.HIT, Lookup.PENDING]
        assert manager.take_events() == [ChunkEvent([K[0]], True)]
        assert (manager.num_evictable, manager.num_free, manager.counters.evicted) == (0, 2, 0)
        assert manager.policy.state()["b1"] == []


class TestRequests:
    def test_a_miss_is_reported_once_per_request_and_key_and_before_the_insertion(self) -> None:
        manager, policy = recording(2)
        ctx = RequestContext("r")
        manager.prepare_store(K[:2], ctx)
        assert policy.take() == [
            ("miss", [0, 1]),
            ("access", [0, 1]),
            ("insert", 0, "r"),
            ("insert", 1, "r"),
        ]
        assert manager.prepare_store([K[2], K[3]], ctx) is None
        assert policy.take() == [("miss", [2, 3]), ("access", [2, 3])]
        assert manager.prepare_store([K[2], K[4]], ctx) is None
        assert policy.take() == [("miss", [4]), ("access", [4])]
        assert manager.prepare_store([K[2]], RequestContext("s")) is None
        assert policy.take("miss") == [("miss", [2])]

    def test_what_it_inserted_and_what_it_reused_is_told_once_when_it_ends(self) -> None:
        manager, policy = recording(8)
        stored(manager, 0, 1)
        manager.prepare_store([K[2]])  # somebody else's, pending
        ctx = RequestContext("r")
        manager.prepare_load(K[:1], ctx)
        stored(manager, 0, 1, 2, 3, ctx=ctx)
        manager.prepare_load([K[3]], ctx)  # its own: no reuse
        policy.take()
        manager.on_request_finished(ctx)
        assert policy.take("finished") == [("finished", [[0, 1, 2, 3]], {3}, {0, 1})]
        manager.on_request_finished(ctx)
        manager.on_request_finished(RequestContext("nothing"))
        assert policy.take() == []

    def test_a_key_that_was_reused_evicted_and_inserted_again_counts_as_reused(self) -> None:
        manager, policy = recording(1)
        stored(manager, 0)
        ctx = RequestContext("r")
        manager.prepare_load([K[0]], ctx)
        manager.complete_load([K[0]], ctx)
        stored(manager, 1)
        stored(manager, 0, ctx=ctx)
        policy.take()
        manager.on_request_finished(ctx)
        assert policy.take("finished") == [("finished", [[0]], set(), {0})]

    def test_a_refused_store_still_counts_the_ready_ones_as_reused(self) -> None:
        manager, policy = recording(1)
        stored(manager, 0)
        ctx = RequestContext("r")
        assert manager.prepare_store([K[0], K[1]], ctx) is None
        manager.on_request_finished(ctx)
        assert policy.take("finished") == [("finished", [[0, 1]], set(), {0})]

    def test_a_failed_store_inserted_nothing(self) -> None:
        manager, policy = recording(4)
        ctx = RequestContext("r")
        manager.prepare_store(K[:2], ctx)
        manager.complete_store(K[:1], False, ctx)
        stored(manager, 0)
        manager.prepare_load(K[:1], ctx)
        manager.on_request_finished(ctx)
        assert policy.take("finished") == [("finished", [[0, 1]], {1}, {0})]

    def test_keys_are_grouped_by_kv_group_in_the_order_in_which_they_were_seen(self) -> None:
        manager = ChunkManager(8, Plain)
        ctx = RequestContext("r")
        keys = [key_of(number, group) for number in (0, 1) for group in (0, 7)]
        manager.prepare_store(keys, ctx)
        manager.on_request_finished(ctx)
        assert isinstance(manager.policy, Plain)
        assert manager.policy.touched[1:] == [[keys[0], keys[2]], [keys[1], keys[3]]]

    def test_recency_changes_when_the_request_ends_tail_to_head(self) -> None:
        manager = ChunkManager(4)
        ctx = RequestContext("r")
        stored(manager, 0, 1, ctx=ctx)
        stored(manager, 2, 3)
        manager.on_request_finished(ctx)
        assert stored(manager, 4, 5, 6).evicted_keys == [K[2], K[3], K[1]]

    def test_an_unfinished_request_loses_its_tail_first(self) -> None:
        manager = ChunkManager(4)
        ctx = RequestContext("r")
        for number in range(4):
            ctx.set_offload_key_position(K[number], 64 * (number + 1))
        stored(manager, 0, 1, ctx=ctx)
        stored(manager, 2, 3, ctx=ctx)
        assert stored(manager, 8, 9).evicted_keys == [K[3], K[2]]

    def test_without_a_request_misses_are_reported_each_time_and_nothing_else_is_kept(self) -> None:
        manager, policy = recording(1)
        stored(manager, 0)
        manager.prepare_load([K[0]])
        assert manager.prepare_store([K[1]]) is None
        assert manager.prepare_store([K[1]]) is None
        assert policy.take("miss", "access", "finished") == [("miss", [0]), ("miss", [1]), ("miss", [1])]

    def test_a_touch_is_passed_on(self) -> None:
        manager = ChunkManager(3)
        stored(manager, 0, 1, 2)
        manager.touch(K[:2])
        assert stored(manager, 3).evicted_keys == [K[2]]
        assert stored(manager, 4).evicted_keys == [K[1]]


class TestAdmission:
    def test_a_key_is_stored_at_its_nth_offer_and_the_drops_are_counted(self) -> None:
        manager = ChunkManager(8, store_threshold=3)
        for _ in range(2):
            assert manager.prepare_store(K[:2]) == PreparedStore([], [], [])
        assert manager.prepare_store([K[0], K[2]]) == PreparedStore([K[0]], [0], [])
        assert manager.counters.below_threshold == 2 + 2 + 1

    def test_lookups_and_repetitions_are_no_offers(self) -> None:
        manager = ChunkManager(8, store_threshold=2)
        manager.lookup(K[0])
        assert manager.prepare_store([K[0], K[0]]) == PreparedStore([], [], [])
        assert manager.prepare_store([K[0]]) == PreparedStore([K[0]], [0], [])

    def test_ready_residents_are_never_hidden_by_it(self) -> None:
        manager, policy = recording(8, store_threshold=2, max_tracker_size=1)
        manager.prepare_store([K[0]])
        stored(manager, 0)
        manager.prepare_store([K[5]])  # pushes K[0] out of the tracker
        ctx = RequestContext("r")
        manager.prepare_store([K[0], K[6]], ctx)
        policy.take()
        manager.on_request_finished(ctx)
        assert policy.take("finished") == [("finished", [[0]], set(), {0})]

    def test_dropped_keys_are_no_misses_for_the_policy(self) -> None:
        manager, policy = recording(8, store_threshold=2)
        ctx = RequestContext("r")
        manager.prepare_store([K[0]], ctx)
        assert policy.take() == []
        manager.prepare_store([K[0]], ctx)
        assert policy.take("miss") == [("miss", [0])]

    def test_the_tracker_forgets_the_oldest_offer(self) -> None:
        manager = ChunkManager(8, store_threshold=2, max_tracker_size=2)
        for key in (0, 1, 0, 2):
            manager.prepare_store([K[key]])
        assert manager.lookup(K[0]) is Lookup.PENDING
        assert manager.prepare_store([K[1]]) == PreparedStore([], [], [])
        assert manager.prepare_store([K[2]]) == PreparedStore([K[2]], [1], [])

    def test_an_offer_never_pushes_out_its_own_keys(self) -> None:
        manager = ChunkManager(8, store_threshold=2, max_tracker_size=2)
        manager.prepare_store(K[:4])
        assert manager.prepare_store(K[:4]) == PreparedStore(K[:4], [0, 1, 2, 3], [])
        manager.prepare_store([K[9]])
        assert manager._admission is not None
        assert len(manager._admission) == 2


class TestReset:
    @pytest.mark.parametrize("policy", ["lru", "arc"])
    def test_everything_goes_whatever_its_ref_cnt_and_slots_and_counters_start_anew(self, policy: str) -> None:
        manager = ChunkManager(3, policy)
        stored(manager, 0, 1)
        manager.prepare_load([K[0]])
        manager.prepare_store([K[2]])
        manager.complete_store([K[2]], success=False)
        manager.discard([K[1]])
        manager.prepare_store([K[2]])
        assert manager.prepare_store(K[4:9]) is None
        manager.reset()
        assert manager.lookup_many(K[:3]) == [Lookup.MISS] * 3
        assert (manager.num_free, manager.num_evictable, manager.counters) == (3, 0, ChunkCounters())
        assert stored(manager, 5, 6, 7).chunk_ids == [0, 1, 2]
        assert stored(manager, 8, 9).evicted_keys == [K[5], K[6]]

    def test_the_admission_counts_go_too(self) -> None:
        manager = ChunkManager(3, store_threshold=2)
        manager.prepare_store([K[0]])
        manager.reset()
        assert manager.prepare_store([K[0]]) == PreparedStore([], [], [])

    def test_what_running_requests_did_before_is_ignored(self) -> None:
        manager, policy = recording(4)
        ctx, late = RequestContext("r"), RequestContext("late")
        stored(manager, 0, ctx=ctx)
        manager.prepare_load([K[0]], ctx)
        manager.prepare_store([K[1]], late)
        manager.on_request_finished(late)
        manager.reset()
        manager.prepare_store([K[1]])
        stored(manager, 0)
        policy.take()
        manager.complete_load([K[0]], ctx)
        assert manager.complete_store([K[1]], True, late) == []
        assert manager.lookup(K[1]) is Lookup.PENDING
        manager.on_request_finished(ctx)
        assert policy.take() == []
        manager.prepare_load([K[0]], ctx)
        manager.on_request_finished(ctx)
        assert policy.take("finished") == [("finished", [[0]], set(), {0})]


class TestPolicies:
    def test_an_older_policy_without_the_context_works(self) -> None:
        manager = ChunkManager(2, Plain)
        ctx = RequestContext("r")
        stored(manager, 0, 1, ctx=ctx)
        assert stored(manager, 2, ctx=ctx).evicted_keys == [K[0]]

    def test_a_policy_patched_while_it_runs_is_used_as_it_is_now(self) -> None:
        manager = ChunkManager(4)
        ctx = RequestContext("r")
        stored(manager, 0, ctx=ctx)
        inserted = []
        original = manager.policy.insert

        def two_arguments(key: bytes, chunk: ChunkStatus) -> None:
            inserted.append(key)
            original(key, chunk)

        manager.policy.insert = two_arguments  # type: ignore[method-assign]
        stored(manager, 1, ctx=ctx)
        assert inserted == [K[1]]
        given = []

        def any_number(*arguments: object) -> None:
            given.append(arguments[2:])
            original(*arguments)  # type: ignore[arg-type]

        manager.policy.insert = any_number  # type: ignore[method-assign]
        stored(manager, 2, ctx=ctx)
        assert given == [(ctx,)]

    def test_switching_keeps_contents_order_and_transfers(self) -> None:
        manager = ChunkManager(4, "lru")
        stored(manager, 0, 1, 2)
        manager.touch([K[0]])
        manager.prepare_load([K[1]])
        manager.prepare_store([K[3]])
        manager.switch_policy("arc")
        assert type(manager.policy).__name__ == "ARCCachePolicy"
        assert manager.policy.cache_capacity == 4
        assert manager.lookup_many(K[:4]) == [Lookup.HIT, Lookup.HIT, Lookup.HIT, Lookup.PENDING]
        assert stored(manager, 4, 5).evicted_keys == [K[2], K[0]]
        manager.complete_load([K[1]])
        manager.complete_store([K[3]])
        manager.switch_policy("lru")
        assert stored(manager, 6, 7).evicted_keys == [K[1], K[3]]

    @pytest.mark.parametrize(
        "name", ["nope", "tests.storage.test_chunks:Broken", "tests.storage.test_chunks:Forgetful"]
    )
    def test_a_switch_that_cannot_be_leaves_the_old_policy_as_it_was(self, name: str) -> None:
        manager = ChunkManager(3)
        stored(manager, 0, 1, 2)
        before = manager.policy
        with pytest.raises(ValueError, match=r"nope|the old one goes on"):
            manager.switch_policy(name)
        assert manager.policy is before
        assert stored(manager, 3).evicted_keys == [K[0]]

    def test_a_policy_that_cannot_list_its_chunks_is_not_left(self) -> None:
        manager = ChunkManager(3, Plain)
        stored(manager, 0)
        with pytest.raises(ValueError, match=r"Plain cannot list.*the old one goes on"):
            manager.switch_policy("lru")
        assert manager.lookup(K[0]) is Lookup.HIT


class Broken(Plain):
    def insert(self, key: bytes, chunk: ChunkStatus) -> None:  # type: ignore[override]
        raise RuntimeError("not today")


class Forgetful(Plain):
    def insert(self, key: bytes, chunk: ChunkStatus) -> None:  # type: ignore[override]
        if key != K[1]:
            super().insert(key, chunk)


class Bytes(ChunkManager):
    """A tier with a budget of bytes: a chunk of key n takes n of them."""

    def __init__(self, budget: int) -> None:
        super().__init__(0)
        self.left = budget
        self.log: list[tuple[str, int]] = []

    def _make_room(self, keys: Sequence[bytes], protected: Collection[bytes]) -> Victims | None:
        missing = sum(numbers(keys)) - self.left
        if missing <= 0:
            return []

        def enough(key: bytes, chunk: ChunkStatus) -> bool:
            nonlocal missing
            missing -= K.index(key)
            return missing <= 0

        return self.policy.evict_until(enough, protected)

    def _allocate_slot(self, key: bytes) -> int:
        self.left -= K.index(key)
        return K.index(key)

    def _free_slot(self, key: bytes, chunk: ChunkStatus) -> None:
        self.left += K.index(key)
        self.log.append(("free", K.index(key)))

    def _became_evictable(self, key: bytes, chunk: ChunkStatus) -> None:
        self.log.append(("evictable", K.index(key)))

    def _became_busy(self, key: bytes, chunk: ChunkStatus) -> None:
        self.log.append(("busy", K.index(key)))


def test_a_tier_with_a_byte_budget_needs_only_the_hooks() -> None:
    tier = Bytes(10)
    stored(tier, 3, 4)
    assert tier.prepare_store([K[11]]) is None
    assert (tier.lookup_many([K[3], K[4]]), tier.left) == ([Lookup.HIT, Lookup.HIT], 3)
    assert stored(tier, 6).evicted_keys == [K[3]]
    tier.prepare_load([K[4], K[4]])
    tier.complete_load([K[4], K[4]])
    prepared = tier.prepare_store([K[1]])
    assert prepared == PreparedStore([K[1]], [1], [K[4]])
    tier.complete_store([K[1]], success=False)
    assert stored(tier, 4).evicted_keys == []
    assert tier.log == [
        ("evictable", 3), ("evictable", 4), ("free", 3), ("evictable", 6), ("busy", 4), ("evictable", 4),
        ("free", 4), ("free", 1), ("evictable", 4),
    ]  # fmt: skip
    tier.reset()
    assert tier.lookup(K[6]) is Lookup.MISS


@pytest.mark.parametrize(
    ("options", "said"), [({"num_chunks": -1}, "num_chunks"), ({"max_tracker_size": 0}, "max_tracker")]
)
def test_sizes_that_cannot_be_are_refused(options: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ChunkManager(**{"num_chunks": 1, **options})
