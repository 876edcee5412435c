"""LRU against a list."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from omlxd.policy import ChunkStatus, LRUCachePolicy, RequestContext, lru
from tests.policy.models import CountingMachine, LRUModel, key_of, run_machine

KEYS = st.integers(0, 11).map(key_of)
SOME_KEYS = st.lists(KEYS, max_size=6)
SLACK = 0


class LRUMachine(CountingMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy = LRUCachePolicy(8)
        self.model = LRUModel()
        self.slots = 0
        self.requests = [RequestContext(f"r{i}") for i in range(3)]

    def chunk(self, key: bytes) -> ChunkStatus | None:
        return self.policy.get(key)

    @initialize(keys=st.lists(KEYS, unique=True))
    def fill(self, keys: list[bytes]) -> None:
        self.insert(keys, True, None)

    @rule(
        keys=st.lists(KEYS, min_size=1, max_size=6, unique=True),
        ready=st.booleans(),
        request=st.none() | st.integers(0, 2),
    )
    def insert(self, keys: list[bytes], ready: bool, request: int | None) -> None:
        for key in keys:
            if self.chunk(key) is not None:
                continue
            chunk = ChunkStatus(self.slots)
            self.slots += 1
            chunk.ref_cnt = 0 if ready else -1
            ctx = None if request is None else self.requests[request]
            self.policy.insert(key, chunk, ctx)
            self.model.insert(key, chunk, ctx)

    @rule(key=KEYS)
    def complete(self, key: bytes) -> None:
        chunk = self.chunk(key)
        if chunk is not None and chunk.ref_cnt < 0:
            chunk.ref_cnt = 0
            self.policy.mark_evictable(key)

    @rule(key=KEYS, cycles=st.integers(1, 20))
    def pin_cycles(self, key: bytes, cycles: int) -> None:
        for _ in range(cycles):
            self.pin(key)
            self.unpin(key)

    @rule(key=KEYS)
    def pin(self, key: bytes) -> None:
        chunk = self.chunk(key)
        if chunk is not None and chunk.ref_cnt >= 0:
            chunk.ref_cnt += 1
            if chunk.ref_cnt == 1:
                self.policy.mark_non_evictable(key)

    @rule(key=KEYS)
    def unpin(self, key: bytes) -> None:
        chunk = self.chunk(key)
        if chunk is not None and chunk.ref_cnt > 0:
            chunk.ref_cnt -= 1
            if chunk.ref_cnt == 0:
                self.policy.mark_evictable(key)

    @rule(key=KEYS)
    def remove(self, key: bytes) -> None:
        if self.chunk(key) is None:
            with pytest.raises(KeyError):
                self.policy.remove(key)
        else:
            self.policy.remove(key)
            del self.model.entries[key]

    @rule(keys=SOME_KEYS, times=st.sampled_from([1, 1, 7]))
    def touch(self, keys: list[bytes], times: int) -> None:
        for _ in range(times):
            self.policy.touch(keys, RequestContext())
            self.model.touch(keys)

    @rule(request=st.integers(0, 2), keys=st.lists(KEYS, max_size=6, unique=True))
    def access(self, request: int, keys: list[bytes]) -> None:
        self.policy.on_request_access(keys, self.requests[request])
        self.model.access(keys, self.requests[request])

    @rule(request=st.integers(0, 2), key=KEYS, position=st.integers(0, 5))
    def position(self, request: int, key: bytes, position: int) -> None:
        self.requests[request].set_offload_key_position(key, position)

    @rule(request=st.integers(0, 2), groups=st.lists(SOME_KEYS, max_size=2))
    def finish(self, request: int, groups: list[list[bytes]]) -> None:
        ctx = self.requests[request]
        self.policy.on_request_finished(groups, set(), {key for group in groups for key in group}, ctx)
        self.model.finish(groups, ctx)
        self.requests[request] = RequestContext(ctx.req_id)

    @rule(n=st.integers(0, 3) | st.integers(0, 8), protected=st.frozensets(KEYS, max_size=4))
    def evict(self, n: int, protected: frozenset[bytes]) -> None:
        assert self.policy.evict(n, protected) == self.model.evict(n, set(protected))

    @rule(need=st.integers(1, 3), protected=st.frozensets(KEYS, max_size=4))
    def evict_until(self, need: int, protected: frozenset[bytes]) -> None:
        asked: list[tuple[bytes, ChunkStatus]] = []

        def enough(key: bytes, chunk: ChunkStatus) -> bool:
            asked.append((key, chunk))
            return len(asked) == need

        victims = self.policy.evict_until(enough, protected)
        assert victims == self.model.evict(need, set(protected))
        assert victims is None or victims == asked

    @precondition(lambda self: self.slots > 30)
    @rule()
    def clear(self) -> None:
        self.policy.clear()
        self.model.clear()
        self.slots = 0

    @precondition(lambda self: self.slots > 30)
    @rule()
    def survive_restart(self) -> None:
        state, residents = self.policy.state(), dict(self.policy.chunks())
        self.policy = LRUCachePolicy(8)
        self.policy.restore_state(state, residents)
        order = self.model.order()
        self.model = LRUModel()
        for key, chunk in order:
            self.model.insert(key, chunk, None)

    @invariant()
    def same_order_in_bounded_memory(self) -> None:
        LRUMachine.steps += 1
        assert list(self.policy.chunks()) == self.model.order()
        residents = len(self.model.entries)
        bound = 2 * residents + SLACK
        assert len(self.policy._log_keys) == len(self.policy._log_ranks) <= bound
        assert len(self.policy._heap) <= bound + residents
        places = sum(len(group.places) for group in self.policy._groups.values())
        assert places == self.policy._num_places <= bound
        assert len(self.policy._groups) <= bound
        for extra in (self.policy._shared, self.policy._out, self.policy._heaped):
            assert set(extra) <= set(self.model.entries)


@pytest.fixture
def little_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lru, "_SLACK", SLACK)


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("little_slack")
def test_lru_evicts_as_a_list_sorted_by_rank_does() -> None:
    run_machine(LRUMachine)
