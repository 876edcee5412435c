"""What every policy promises to the tiers, tried on all of them: whatever is called in whatever order, the
contents are right, victims are allowed ones, and a refusal changes nothing.
"""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from omlxd.policy import CachePolicy, ChunkStatus, RequestContext
from omlxd.policy.belady import BeladyCachePolicy
from omlxd.policy.fifo import FIFOCachePolicy
from omlxd.policy.prefix import PrefixCachePolicy
from omlxd.policy.registry import get_policy, policy_names
from omlxd.policy.s3fifo import S3FIFOCachePolicy
from tests.policy.models import CountingMachine, key_of, run_machine
from tests.policy.prefix_checks import check_history

CAPACITY = 8
KEYS = st.integers(0, 15).map(key_of)
SOME_KEYS = st.lists(KEYS, max_size=7, unique=True)


def _request(number: int) -> RequestContext:
    """One of three requests at a time; what the second one stores may be declined."""
    ctx = RequestContext(f"r{number}")
    ctx.may_be_declined = number == 1
    return ctx


class ContractMachine(CountingMachine):
    """Drives a policy as a tier may, and keeps the contents in a dict."""

    policy_class: type[CachePolicy]

    def __init__(self) -> None:
        super().__init__()
        self.policy = self.policy_class(CAPACITY)
        self.contents: dict[bytes, ChunkStatus] = {}
        self.requests = [_request(number) for number in range(3)]
        self.seen: list[dict[bytes, None]] = [{}, {}, {}]
        self.slots = 0

    @rule(keys=SOME_KEYS, ready=st.booleans(), request=st.none() | st.integers(0, 2), announced=st.booleans())
    def store(self, keys: list[bytes], ready: bool, request: int | None, announced: bool) -> None:
        misses = [key for key in keys if key not in self.contents]
        ctx = None if request is None else self.requests[request]
        if misses and announced:
            self.policy.on_store_miss(misses, ctx or RequestContext())
        if request is not None:
            self.access(keys, request)
        for key in misses:
            chunk = self.contents[key] = ChunkStatus(self.slots)
            self.slots += 1
            chunk.ref_cnt = 0 if ready else -1
            self.policy.insert(key, chunk, ctx)

    @rule(keys=SOME_KEYS, request=st.integers(0, 2))
    def access(self, keys: list[bytes], request: int) -> None:
        fresh = [key for key in keys if key not in self.seen[request]]
        self.seen[request].update(dict.fromkeys(fresh))
        if fresh:
            self.policy.on_request_access(fresh, self.requests[request])

    @rule(request=st.integers(0, 2), positions=st.booleans(), reused=st.sets(KEYS), goes_on=st.booleans())
    def finish(self, request: int, positions: bool, reused: set[bytes], goes_on: bool) -> None:
        ctx, seen = self.requests[request], list(self.seen[request])
        if positions:
            for place, key in enumerate(sorted(seen)):
                ctx.set_offload_key_position(key, place)
        inserted = {key for key in seen if key not in reused}
        self.policy.on_request_finished([seen], inserted, reused & set(seen), ctx)
        if not goes_on:
            self.requests[request] = _request(request)
        self.seen[request] = {}

    @rule(key=KEYS, success=st.booleans())
    def complete(self, key: bytes, success: bool) -> None:
        chunk = self.contents.get(key)
        if chunk is None or chunk.ref_cnt >= 0:
            return
        if success:
            chunk.ref_cnt = 0
            self.policy.mark_evictable(key)
        else:
            del self.contents[key]
            self.policy.remove(key)

    @rule(key=KEYS)
    def discard(self, key: bytes) -> None:
        chunk = self.contents.get(key)
        if chunk is not None and chunk.ref_cnt == 0:
            del self.contents[key]
            self.policy.remove(key)

    @rule(keys=SOME_KEYS)
    def pin(self, keys: list[bytes]) -> None:
        for key in keys:
            chunk = self.contents.get(key)
            if chunk is not None and chunk.ref_cnt >= 0:
                chunk.ref_cnt += 1
                if chunk.ref_cnt == 1:
                    self.policy.mark_non_evictable(key)

    @rule(keys=SOME_KEYS)
    def unpin(self, keys: list[bytes]) -> None:
        for key in keys:
            chunk = self.contents.get(key)
            if chunk is not None and chunk.ref_cnt > 0:
                chunk.ref_cnt -= 1
                if chunk.ref_cnt == 0:
                    self.policy.mark_evictable(key)

    @rule(keys=SOME_KEYS, request=st.none() | st.integers(0, 2))
    def touch(self, keys: list[bytes], request: int | None) -> None:
        self.policy.touch(keys, RequestContext("touch") if request is None else self.requests[request])

    @rule(capacity=st.integers(1, 2 * CAPACITY))
    def resize(self, capacity: int) -> None:
        self.policy.cache_capacity = capacity

    def _order(self) -> list[bytes]:
        return [key for key, _ in self.policy.chunks()]

    def _eligible(self, protected: set[bytes]) -> set[bytes]:
        return {key for key, chunk in self.contents.items() if chunk.ref_cnt == 0 and key not in protected}

    def _took(self, victims: list[tuple[bytes, ChunkStatus]], eligible: set[bytes]) -> None:
        keys = [key for key, _ in victims]
        assert len(set(keys)) == len(keys)
        assert set(keys) <= eligible
        for key, chunk in victims:
            assert self.contents.pop(key) is chunk

    @rule(n=st.integers(0, 9), protected=st.sets(KEYS, max_size=8))
    def evict(self, n: int, protected: set[bytes]) -> None:
        eligible, before = self._eligible(protected), self._order()
        victims = self.policy.evict(n, protected)
        if victims is None:
            assert n > len(eligible) or self._declines(protected)
            assert self._order() == before
        else:
            assert len(victims) == n
            self._took(victims, eligible)

    @rule(enough=st.integers(1, 9), protected=st.sets(KEYS, max_size=8))
    def evict_until(self, enough: int, protected: set[bytes]) -> None:
        eligible, before = self._eligible(protected), self._order()
        asked: list[bytes] = []

        def is_enough(key: bytes, chunk: ChunkStatus) -> bool:
            assert self.contents[key] is chunk
            asked.append(key)
            return len(asked) == enough

        victims = self.policy.evict_until(is_enough, protected)
        if victims is None:
            assert enough > len(eligible) or self._declines(protected)
            assert self._order() == before
        else:
            assert [key for key, _ in victims] == asked
            self._took(victims, eligible)

    def _declines(self, protected: set[bytes]) -> bool:
        """May the policy think that what it has is worth more than what comes?"""
        newcomers = protected - self.contents.keys()
        return bool(newcomers) and isinstance(self.policy, PrefixCachePolicy | BeladyCachePolicy)

    @rule(really=st.integers(0, 9))
    def clear(self, really: int) -> None:
        if really == 9:
            self.policy.clear()
            self.contents.clear()

    @rule(lost=st.sets(KEYS, max_size=3), new=SOME_KEYS)
    def restart(self, lost: set[bytes], new: list[bytes]) -> None:
        state = msgpack.unpackb(msgpack.packb(self.policy.state()))
        self.contents = {key: chunk for key, chunk in self.contents.items() if chunk.ref_cnt >= 0 and key not in lost}
        for key in new:
            self.contents.setdefault(key, ChunkStatus(self.slots))
        for chunk in self.contents.values():
            chunk.ref_cnt = 0
        if type(self.policy) is not BeladyCachePolicy:
            self.policy = self.policy_class(CAPACITY)
        self.policy.restore_state(state, self.contents)
        self.requests = [_request(number) for number in range(3)]
        self.seen = [{}, {}, {}]

    @invariant()
    def holds_what_it_was_given(self) -> None:
        type(self).steps += 1
        assert dict(self.policy.chunks()) == self.contents
        for number in range(16):
            assert self.policy.get(key_of(number)) is self.contents.get(key_of(number))
        if isinstance(self.policy, PrefixCachePolicy):
            check_history(self.policy._history)


POLICIES = [*(get_policy(name) for name in policy_names()), BeladyCachePolicy]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.__name__)
def test_every_policy_keeps_the_contract(policy: type[CachePolicy]) -> None:
    run_machine(type("Machine", (ContractMachine,), {"policy_class": policy}))


@pytest.mark.parametrize("name", ["fifo", "s3fifo", "prefix"])
def test_the_registry_has_the_policies_that_learn_nothing_of_the_future(name: str) -> None:
    assert get_policy(name) in (FIFOCachePolicy, S3FIFOCachePolicy, PrefixCachePolicy)
