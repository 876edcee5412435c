"""ARC against four lists and a number."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from omlxd.policy import ARCCachePolicy, ChunkStatus, RequestContext
from tests.policy.models import ARCModel, CountingMachine, key_of, run_machine

CAPACITY = 5
KEYS = st.integers(0, 11).map(key_of)
SOME_KEYS = st.lists(KEYS, max_size=6)


class ARCMachine(CountingMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy = ARCCachePolicy(CAPACITY)
        self.model = ARCModel(CAPACITY)
        self.slots = 0

    @initialize(keys=st.lists(KEYS, unique=True))
    def fill(self, keys: list[bytes]) -> None:
        self.insert(keys, True)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=6, unique=True), ready=st.booleans())
    def insert(self, keys: list[bytes], ready: bool) -> None:
        for key in keys:
            if self.policy.get(key) is not None:
                continue
            chunk = ChunkStatus(self.slots)
            self.slots += 1
            chunk.ref_cnt = 0 if ready else -1
            self.policy.insert(key, chunk)
            self.model.insert(key, chunk)

    @rule(key=KEYS, change=st.sampled_from([-1, 1]))
    def transfer(self, key: bytes, change: int) -> None:
        chunk = self.policy.get(key)
        if chunk is None or (chunk.ref_cnt <= 0 and change < 0):
            return
        chunk.ref_cnt += change
        if chunk.ref_cnt == 0:
            self.policy.mark_evictable(key)
        elif chunk.ref_cnt == 1 and change > 0:
            self.policy.mark_non_evictable(key)

    @rule(key=KEYS)
    def remove(self, key: bytes) -> None:
        self.policy.remove(key)
        self.model.remove(key)

    @rule(keys=SOME_KEYS)
    def touch(self, keys: list[bytes]) -> None:
        self.policy.touch(keys, RequestContext())
        self.model.touch(keys)

    @rule(keys=SOME_KEYS)
    def store_miss(self, keys: list[bytes]) -> None:
        missing = [key for key in keys if self.policy.get(key) is None]
        self.policy.on_store_miss(missing, RequestContext())
        self.model.touch(missing)

    @rule(
        groups=st.lists(SOME_KEYS, max_size=2),
        inserted=st.sets(KEYS),
        reused=st.sets(KEYS),
        positions=st.dictionaries(KEYS, st.integers(0, 4)),
    )
    def finish(
        self, groups: list[list[bytes]], inserted: set[bytes], reused: set[bytes], positions: dict[bytes, int]
    ) -> None:
        ctx = RequestContext()
        for key, position in positions.items():
            ctx.set_offload_key_position(key, position)
        self.policy.on_request_finished(groups, inserted - reused, reused, ctx)
        self.model.finish(groups, inserted - reused, reused, ctx)

    @rule(n=st.integers(0, 3) | st.integers(0, 8), protected=st.frozensets(KEYS, max_size=4))
    def evict(self, n: int, protected: frozenset[bytes]) -> None:
        assert self.policy.evict(n, protected) == self.model.evict(n, set(protected))

    @rule(need=st.integers(1, 3), protected=st.frozensets(KEYS, max_size=4))
    def evict_until(self, need: int, protected: frozenset[bytes]) -> None:
        asked: list[bytes] = []

        def enough(key: bytes, chunk: ChunkStatus) -> bool:
            asked.append(key)
            return len(asked) == need

        assert self.policy.evict_until(enough, protected) == self.model.evict(need, set(protected))

    @precondition(lambda self: self.slots > 30)
    @rule()
    def clear(self) -> None:
        self.policy.clear()
        self.model.clear()
        self.slots = 0

    @rule()
    def survive_restart(self) -> None:
        state, residents = self.policy.state(), dict(self.policy.chunks())
        self.policy = ARCCachePolicy(CAPACITY)
        self.policy.restore_state(state, residents)

    @invariant()
    def same_lists_and_target(self) -> None:
        ARCMachine.steps += 1
        for name in ("t1", "t2", "b1", "b2"):
            assert list(getattr(self.policy, name)) == getattr(self.model, name), name
        assert self.policy.target_t1_size == self.model.target
        assert dict(self.policy.chunks()) == self.model.chunks
        assert 0 <= self.policy.target_t1_size <= CAPACITY
        assert len(self.policy.b1) <= CAPACITY
        assert len(self.policy.b2) <= CAPACITY


@pytest.mark.timeout(3600)
def test_arc_keeps_the_lists_of_its_contract() -> None:
    run_machine(ARCMachine)
