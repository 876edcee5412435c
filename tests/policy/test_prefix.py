"""The prefix policy: what counts as one use, what is declined, what survives a restart, and workloads it has never seen."""

from __future__ import annotations

import msgpack
import pytest

from omlxd.lab.replay import replay_ram
from omlxd.policy.base import ChunkStatus, RequestContext
from omlxd.policy.prefix import PrefixCachePolicy
from omlxd.policy.prefix_groups import Group
from omlxd.policy.prefix_guard import NUM_SAVED
from omlxd.policy.prefix_history import GHOSTS_PER_BLOCK
from omlxd.policy.prefix_model import GAP, MOST_GAP
from omlxd.storage.chunks import ChunkManager, Lookup
from tests.policy.prefix_checks import check_history
from tests.policy.workloads import WORKLOADS, workload


def keys(name: str, count: int) -> list[bytes]:
    return [f"{name}-{index}".encode() for index in range(count)]


def request(chain: list[bytes]) -> RequestContext:
    ctx = RequestContext()
    for position, key in enumerate(chain):
        ctx.set_offload_key_position(key, position)
    return ctx


def store(manager: ChunkManager, chain: list[bytes], ctx: RequestContext) -> bool:
    prepared = manager.prepare_store(chain, ctx)
    if prepared is not None:
        manager.complete_store(prepared.keys_to_store, True, ctx)
    manager.on_request_finished(ctx)
    return prepared is not None


def load(manager: ChunkManager, chain: list[bytes], ctx: RequestContext) -> None:
    manager.prepare_load(chain, ctx)
    manager.complete_load(chain, ctx)
    manager.on_request_finished(ctx)


def classes(policy: PrefixCachePolicy) -> list[tuple[tuple[int, ...], int, int]]:
    groups = sorted(policy._history.groups, key=lambda group: group.rank)
    return [(group.group_class.features, group.uses, group.count) for group in groups]


def learnt(policy: PrefixCachePolicy) -> dict[object, object]:
    """Counts by class, of those that have any."""
    counts: dict[object, object] = {}
    for features, events, entries in policy._history.model.state():
        if any(events) or any(entries):
            counts[str(features)] = (events, entries)
    return counts


def turns_of(policy: PrefixCachePolicy) -> dict[bytes, int]:
    groups = {key: policy._history.nodes[key].group for key, _ in policy.chunks()}
    return {key: group.turns for key, group in groups.items() if isinstance(group, Group)}


def manager_of(size: int) -> tuple[ChunkManager, PrefixCachePolicy]:
    manager = ChunkManager(size, "prefix")
    assert isinstance(manager.policy, PrefixCachePolicy)
    return manager, manager.policy


def test_a_request_that_loads_and_then_stores_in_parts_is_one_use() -> None:
    at_once, one = manager_of(64)
    in_parts, other = manager_of(64)
    chains = [keys("a", 6), keys("b", 3), keys("a", 10), keys("a", 14), keys("b", 9)]
    for chain in chains:
        ctx = request(chain)
        held = [key for key in chain if at_once.lookup(key) is Lookup.HIT]
        at_once.prepare_load(held, ctx)
        at_once.complete_load(held, ctx)
        store(at_once, chain, ctx)

        ctx = request(chain)
        load(in_parts, held, ctx)
        for stop in range(len(held) + 1, len(chain) + 1):
            store(in_parts, chain[:stop], ctx)
        check_history(other._history)
    assert classes(other) == classes(one)
    assert learnt(other) == learnt(one)
    assert other._history.now == one._history.now == len(chains)


def test_uses_told_by_touch_in_parts_are_one_use_as_well() -> None:
    policy = PrefixCachePolicy(64)
    chain = keys("a", 8)
    ctx = request(chain)
    policy.touch(chain[:5], ctx)
    policy.touch(chain, ctx)
    assert policy._history.now == 1
    assert {uses for _, uses, _ in classes(policy)} == {1}
    policy.touch(chain, request(chain))
    assert policy._history.now == 2
    assert {uses for _, uses, _ in classes(policy)} == {2}
    check_history(policy._history)


def test_a_request_goes_on_although_others_took_its_blocks_over_meanwhile() -> None:
    manager, policy = manager_of(64)
    chain = keys("a", 8)
    first = request(chain)
    store(manager, chain[:6], first)
    store(manager, chain[:4], request(chain[:4]))
    store(manager, chain, first)
    check_history(policy._history)
    assert manager.lookup_many(chain) == [Lookup.HIT] * 8


def test_the_capacity_may_be_known_later_and_change() -> None:
    """Tiers with a byte budget make the policy before they know how many blocks that is."""
    policy = PrefixCachePolicy(0)
    policy.cache_capacity = 10
    assert policy.cache_capacity == 10
    assert policy._history.max_ghosts == 10 * GHOSTS_PER_BLOCK
    for number in range(40):
        policy.touch(keys(str(number), 2))
    assert policy._history.guard._kept == 10
    policy.cache_capacity = 3
    policy.touch(keys("x", 1))
    assert policy._history.guard._kept == 3
    check_history(policy._history)


def test_ghosts_are_bounded_however_much_passes() -> None:
    manager, policy = manager_of(4)
    for number in range(200):
        store(manager, keys(str(number), 3), RequestContext())
    assert 60 < len(policy._history.nodes) <= 4 + 4 * GHOSTS_PER_BLOCK


def test_what_a_lone_user_stores_is_there_when_he_asks_again() -> None:
    """Also when the policy has learnt from many prompts that none comes back."""
    manager, _ = manager_of(12)
    for number in range(300):
        ctx = request(keys(str(number), 4))
        ctx.may_be_declined = True
        assert store(manager, keys(str(number), 4), ctx)
        assert manager.lookup_many(keys(str(number), 4)) == [Lookup.HIT] * 4


def taught() -> tuple[ChunkManager, PrefixCachePolicy]:
    """A policy that has seen one prompt come back again and again, and all others never."""
    manager, policy = manager_of(12)
    for number in range(400):
        chain = keys(str(number), 4) if number % 2 else keys("system", 8)
        ctx = request(chain)
        ctx.may_be_declined = True
        held = [key for key in chain if manager.lookup(key) is Lookup.HIT]
        manager.prepare_load(held, ctx)
        manager.complete_load(held, ctx)
        store(manager, chain, ctx)
    assert not policy._history.guard.lru_leads
    return manager, policy


def test_what_is_worth_less_than_all_that_would_leave_is_declined_and_only_where_that_may_be() -> None:
    manager, policy = taught()
    assert manager.lookup_many(keys("system", 8)) == [Lookup.HIT] * 8
    manager.prepare_load([key for key, _ in policy.chunks() if not key.startswith(b"system")])  # these cannot leave
    chain = keys("new", 4)
    ctx = request(chain)
    ctx.may_be_declined = True
    assert not store(manager, chain, ctx)
    assert policy.declined
    assert manager.lookup_many(keys("system", 8)) == [Lookup.HIT] * 8
    assert store(manager, chain, request(chain))
    assert not policy.declined
    assert manager.lookup_many(chain) == [Lookup.HIT] * 4
    check_history(policy._history)


def test_nothing_is_written_to_a_full_ssd_that_is_worth_less_than_what_it_has() -> None:
    _, policy = taught()
    for number in range(12 - policy._history.num_residents):
        policy.insert(f"fill-{number}".encode(), ChunkStatus(100 + number))
    tail = keys("399", 4)[-1]
    assert policy.worth_writing(b"never seen")
    assert policy.worth_writing(keys("system", 8)[0])
    assert not policy.worth_writing(tail)
    policy.cache_capacity = 100
    assert policy.worth_writing(tail), "there is room that nobody needs"


def test_a_group_is_judged_once_and_anew_when_it_was_used_again() -> None:
    """What leaves RAM first is a group's tail, and its head later, at an age that speaks against it: a tail alone is lost."""
    _, policy = taught()
    for number in range(12 - policy._history.num_residents):
        policy.insert(f"fill-{number}".encode(), ChunkStatus(100 + number))
    chain = keys("system", 8)
    *heads, tail = chain[:-1]  # the last block of a path is a group by itself
    assert policy.worth_writing(tail)
    for number in range(4_000):  # it gets so old that it would not be worth it now
        policy.touch(keys(f"later {number}", 1))
    assert all(policy.worth_writing(head) for head in heads)
    other = keys("399", 4)
    assert not policy.worth_writing(other[-2])
    assert not policy.worth_writing(other[0])
    for _ in range(3):
        policy.touch(other)
    assert policy.worth_writing(other[0])


def test_the_pace_of_a_chain_of_many_turns_is_not_changed_by_one_pause() -> None:
    paces = []
    for turns in (3, 12):
        _, policy = manager_of(400)
        chain: list[bytes] = []
        for turn in range(turns):
            chain = keys("talk", 2 * turn + 2)
            policy.touch(chain)
        for number in range(31):  # a pause of 32 requests
            policy.touch(keys(f"other {number}", 1))
        policy.touch([*chain, b"more"])
        group = policy._history.nodes[b"more"].group
        assert isinstance(group, Group)
        assert group.turns == turns + 1
        paces.append(group.group_class.features[GAP])
    short, long = paces
    assert short == MOST_GAP
    assert 1 < long < MOST_GAP


def test_what_was_learnt_survives_a_restart_and_costs_little() -> None:
    manager, policy = taught()
    packed = msgpack.packb(policy.state())
    residents = dict(policy.chunks())
    again = PrefixCachePolicy(12)
    again.restore_state(msgpack.unpackb(packed), residents)
    assert learnt(again) == learnt(policy)
    assert turns_of(again) == turns_of(policy) != {}
    assert not again._history.guard.lru_leads
    assert [key for key, _ in again.chunks()] == [key for key, _ in policy.chunks()]
    assert len(packed) < 200_000, "what is kept does not grow with the requests"
    check_history(again._history)
    assert len(manager) == 12


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guard", [0.0] * 6),
        ("guard", [float("inf")] * NUM_SAVED),
        ("guard", "six"),
        ("model", [[[0, 1], [0.0], [0.0]]]),
        ("model", 7),
        ("groups", [[[0], 1, 5]]),
        ("now", "late"),
    ],
)
def test_a_state_of_another_version_is_refused_by_name_and_changes_nothing(field: str, value: object) -> None:
    _, policy = taught()
    before = list(policy.chunks())
    state = policy.state() | {field: value}
    with pytest.raises(ValueError, match="policy state"):
        policy.restore_state(state, dict(before))
    assert list(policy.chunks()) == before


QUICK = ("shuffled_batches", "system_prompts", "one_user", "near_the_top", "twice")
"""Of the workloads that no constant was tuned on; docs/policies.md has all of them at more sizes."""


@pytest.mark.parametrize("name", QUICK)
def test_no_workload_is_served_much_worse_than_by_lru(name: str) -> None:
    trace = workload(name, seed=1)
    for size in (3, trace.distinct_blocks // 10):
        lru, prefix = (replay_ram(trace, policy, size) for policy in ("lru", "prefix"))
        assert 100 * (prefix.reused_tokens - lru.reused_tokens) / lru.asked_tokens > -0.3, (name, size)


def test_the_workloads_are_the_same_each_time_and_ids_name_prefixes() -> None:
    for name in WORKLOADS:
        parents: dict[int, int] = {}
        trace = workload(name)
        for one in trace.requests:
            for before, block in zip([-1, *one.blocks], one.blocks, strict=False):
                assert parents.setdefault(block, before) == before, name
        assert len(trace.requests) >= 1_000
    assert workload("drift", seed=2).requests == workload("drift", seed=2).requests
