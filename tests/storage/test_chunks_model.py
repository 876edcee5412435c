"""The chunk manager against the contract's steps, written down one by one over the list models of the
policies.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from omlxd.policy import ChunkStatus, RequestContext
from omlxd.storage.chunks import ChunkError, ChunkManager, Lookup
from tests.policy.models import ARCModel, CountingMachine, LRUModel, key_of, run_machine

KEYS = st.integers(0, 9).map(key_of)
SOME_KEYS = st.lists(KEYS, max_size=5)
REQUEST = st.integers(0, 2)
THRESHOLDS = st.sampled_from([0, 2])
TRACKER = 6


class Request:
    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.inserted: set[bytes] = set()
        self.reused: set[bytes] = set()
        self.missed: set[bytes] = set()


class Model:
    """Chunks of its own, so that the manager's are compared and not shared."""

    def __init__(self, capacity: int, policy: str, threshold: int) -> None:
        self.capacity, self.policy_name, self.threshold = capacity, policy, threshold
        self.reset()

    def reset(self) -> None:
        self.policy = LRUModel() if self.policy_name == "lru" else ARCModel(self.capacity)
        self.slots: dict[bytes, ChunkStatus] = {}
        self.fresh = 0
        self.free: list[int] = []
        self.offers: list[bytes] = []
        self.counts: Counter[bytes] = Counter()
        self.requests: dict[RequestContext, Request] = {}

    def count_offer(self, keys: list[bytes]) -> None:
        for key in keys:
            self.counts[key] += 1
            if key in self.offers:
                self.offers.remove(key)
            self.offers.append(key)
        while len(self.offers) > max(TRACKER, len(keys)):
            del self.counts[self.offers.pop(0)]

    def see(self, request: Request, keys: list[bytes], ctx: RequestContext) -> None:
        fresh = [key for key in keys if key not in request.seen]
        request.seen += fresh
        if fresh and isinstance(self.policy, LRUModel):
            self.policy.access(fresh, ctx)

    def prepare_store(
        self, keys: list[bytes], ctx: RequestContext
    ) -> tuple[list[bytes], list[int], list[bytes]] | None:
        request = self.requests.setdefault(ctx, Request())
        offered = list(dict.fromkeys(keys))
        misses = [key for key in offered if key not in self.slots]
        if self.threshold:
            self.count_offer(offered)
            dropped = [key for key in misses if self.counts[key] < self.threshold]
            misses = [key for key in misses if key not in dropped]
        else:
            dropped = []
        ready = [key for key in offered if key in self.slots and self.slots[key].ref_cnt >= 0]
        self.policy.touch([key for key in misses if key not in request.missed])
        request.missed |= set(misses)
        request.reused |= {key for key in ready if key not in request.inserted}
        self.see(request, [key for key in offered if key not in dropped], ctx)
        if not misses:
            return [], [], []
        need = len(misses) - (self.capacity - len(self.slots))
        evictable = sum(chunk.ref_cnt == 0 for chunk in self.slots.values())
        victims: list[tuple[bytes, ChunkStatus]] | None = []
        if need > evictable:
            return None
        if need > 0:
            victims = self.policy.evict(need, set(offered))
            if victims is None:
                return None
        for key, chunk in victims:
            del self.slots[key]
            self.free.append(chunk.chunk_id)
        for key in misses:
            if self.fresh < self.capacity:
                slot, self.fresh = self.fresh, self.fresh + 1
            else:
                slot = self.free.pop()
            self.slots[key] = chunk = ChunkStatus(slot)
            if isinstance(self.policy, LRUModel):
                self.policy.insert(key, chunk, ctx)
            else:
                self.policy.insert(key, chunk)
        request.inserted |= set(misses)
        return misses, [self.slots[key].chunk_id for key in misses], [key for key, _ in victims]

    def fail(self, key: bytes) -> None:
        self.free.append(self.slots.pop(key).chunk_id)
        if isinstance(self.policy, LRUModel):
            del self.policy.entries[key]
        else:
            self.policy.remove(key)

    def finish(self, ctx: RequestContext) -> None:
        request = self.requests.pop(ctx, None)
        if request is None:
            return
        if isinstance(self.policy, LRUModel):
            self.policy.finish([request.seen], ctx)
        else:
            self.policy.finish([request.seen], request.inserted - request.reused, request.reused, ctx)


class ManagerMachine(CountingMachine):
    policy = "lru"

    @initialize(capacity=st.integers(0, 7), threshold=THRESHOLDS, keys=st.lists(KEYS, unique=True))
    def start(self, capacity: int, threshold: int, keys: list[bytes]) -> None:
        self.manager = ChunkManager(
            capacity, self.policy, enable_events=True, store_threshold=threshold, max_tracker_size=TRACKER
        )
        self.model = Model(capacity, self.policy, threshold)
        self.contexts = [RequestContext(str(number)) for number in range(3)]
        self.readable: set[bytes] = set()  # as the events say
        self.stores = 0
        self.store_all(keys, 0)

    @rule(keys=SOME_KEYS, request=REQUEST)
    def store_all(self, keys: list[bytes], request: int) -> None:
        """Until they are admitted, and to the end."""
        for _ in range(max(1, self.model.threshold)):
            self.prepare_store(keys, request)
        self.complete_store(keys, request, True)

    @rule(keys=SOME_KEYS, request=REQUEST)
    def prepare_store(self, keys: list[bytes], request: int) -> None:
        ctx = self.contexts[request]
        expected = self.model.prepare_store(keys, ctx)
        prepared = self.manager.prepare_store(keys, ctx)
        self.stores += 1
        if prepared is None:
            assert expected is None
        else:
            assert (prepared.keys_to_store, prepared.chunk_ids, prepared.evicted_keys) == expected

    @rule(keys=SOME_KEYS, request=REQUEST, success=st.booleans())
    def complete_store(self, keys: list[bytes], request: int, success: bool) -> None:
        ctx = self.contexts[request]
        expected = [key for key in dict.fromkeys(keys) if key in self.model.slots and self.model.slots[key].ref_cnt < 0]
        for key in expected:
            if success:
                self.model.slots[key].ref_cnt = 0
            else:
                self.model.fail(key)
        if not success and ctx in self.model.requests:
            self.model.requests[ctx].inserted -= set(expected)
        assert self.manager.complete_store(keys, success, ctx) == expected

    @rule(keys=SOME_KEYS, request=REQUEST)
    def prepare_load(self, keys: list[bytes], request: int) -> None:
        ctx = self.contexts[request]
        if not all(key in self.model.slots and self.model.slots[key].ref_cnt >= 0 for key in keys):
            with pytest.raises(ChunkError):
                self.manager.prepare_load(keys, ctx)
            return
        state = self.model.requests.setdefault(ctx, Request())
        state.reused |= {key for key in keys if key not in state.inserted}
        self.model.see(state, list(dict.fromkeys(keys)), ctx)
        for key in keys:
            self.model.slots[key].ref_cnt += 1
        assert self.manager.prepare_load(keys, ctx) == [self.model.slots[key].chunk_id for key in keys]

    @rule(keys=SOME_KEYS, request=REQUEST)
    def complete_load(self, keys: list[bytes], request: int) -> None:
        wanted = Counter(keys)
        if any(key not in self.model.slots or self.model.slots[key].ref_cnt < n for key, n in wanted.items()):
            with pytest.raises(ChunkError):
                self.manager.complete_load(keys, self.contexts[request])
            return
        self.manager.complete_load(keys, self.contexts[request])
        for key in keys:
            self.model.slots[key].ref_cnt -= 1

    @rule(key=KEYS)
    def pin(self, key: bytes) -> None:
        if key in self.model.slots and self.model.slots[key].ref_cnt >= 0:
            self.manager.pin(key)
            self.model.slots[key].ref_cnt += 1

    @rule(key=KEYS)
    def unpin(self, key: bytes) -> None:
        if key in self.model.slots and self.model.slots[key].ref_cnt > 0:
            self.manager.unpin(key)
            self.model.slots[key].ref_cnt -= 1

    @rule(keys=SOME_KEYS)
    def touch(self, keys: list[bytes]) -> None:
        self.manager.touch(keys)
        self.model.policy.touch(keys)

    @rule(keys=SOME_KEYS)
    def discard(self, keys: list[bytes]) -> None:
        expected = [
            key for key in dict.fromkeys(keys) if key in self.model.slots and self.model.slots[key].ref_cnt == 0
        ]
        for key in expected:
            self.model.fail(key)
        assert self.manager.discard(keys) == expected

    @rule(request=REQUEST, key=KEYS, position=st.integers(0, 5))
    def position(self, request: int, key: bytes, position: int) -> None:
        self.contexts[request].set_offload_key_position(key, position)

    @rule(request=REQUEST)
    def finish(self, request: int) -> None:
        self.model.finish(self.contexts[request])
        self.manager.on_request_finished(self.contexts[request])
        self.manager.on_request_finished(self.contexts[request])
        self.contexts[request] = RequestContext(str(request))

    @precondition(lambda self: self.stores > 12)
    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.model.reset()
        self.readable.clear()
        self.manager.take_events()
        self.contexts = [RequestContext(str(number)) for number in range(3)]
        self.stores = 0

    @invariant()
    def same_as_the_model(self) -> None:
        if not hasattr(self, "manager"):
            return
        type(self).steps += 1
        manager, slots = self.manager, self.model.slots
        for key in map(key_of, range(10)):
            chunk, expected = manager.get(key), slots.get(key)
            assert (chunk is None) == (expected is None)
            if chunk is not None and expected is not None:
                assert (chunk.ref_cnt, chunk.chunk_id) == (expected.ref_cnt, expected.chunk_id)
                assert manager.lookup(key) is (Lookup.HIT if expected.ref_cnt >= 0 else Lookup.PENDING)
        assert len(manager) == len(slots) == manager.num_chunks - manager.num_free
        assert manager.num_evictable == sum(chunk.ref_cnt == 0 for chunk in slots.values())
        for event in manager.take_events():
            assert len(set(event.keys)) == len(event.keys) > 0
            if event.removed:
                assert set(event.keys) <= self.readable
                self.readable -= set(event.keys)
            else:
                assert not set(event.keys) & self.readable
                self.readable |= set(event.keys)
        assert self.readable == {key for key, chunk in slots.items() if chunk.ref_cnt >= 0}
        order = [key for key, _ in manager.policy.chunks()]
        if isinstance(self.model.policy, LRUModel):
            assert order == [key for key, _ in self.model.policy.order()]
        else:
            state = manager.policy.state()
            assert order == self.model.policy.t1 + self.model.policy.t2
            assert (state["b1"], state["b2"]) == (self.model.policy.b1, self.model.policy.b2)
            assert state["target"] == self.model.policy.target


class OverARC(ManagerMachine):
    policy = "arc"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [ManagerMachine, OverARC])
def test_the_manager_follows_its_contract_step_by_step(machine: type[ManagerMachine]) -> None:
    run_machine(machine)
