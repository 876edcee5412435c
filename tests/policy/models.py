"""The contract of LRU and ARC once more, as lists, with no thought of speed. And how long the machines run.

`OMLXD_LONG=1` makes each machine take at least 200,000 steps; without it the budget suits every run of the
tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from omlxd.policy import ChunkStatus, RequestContext

LONG = os.environ.get("OMLXD_LONG") == "1"
LONG_STEPS = 200_000
_BUDGET = settings(
    max_examples=250 if LONG else 60,
    stateful_step_count=200 if LONG else 50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class CountingMachine(RuleBasedStateMachine):
    """A state machine whose invariant counts the steps."""

    steps = 0


def run_machine(machine: type[CountingMachine]) -> None:
    """Run it as long as the budget says, counted in steps of its own."""
    machine.steps = 0
    run_state_machine_as_test(machine, settings=_BUDGET)
    while LONG and machine.steps < LONG_STEPS:
        run_state_machine_as_test(machine, settings=_BUDGET)
    assert machine.steps > _BUDGET.max_examples, "the machine does not count its steps"


def key_of(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


def unused(entries: Iterable[tuple[bytes, ChunkStatus]], protected: set[bytes]) -> list[tuple[bytes, ChunkStatus]]:
    return [(key, chunk) for key, chunk in entries if chunk.ref_cnt == 0 and key not in protected]


def flat_order(groups: Sequence[Sequence[bytes]], ctx: RequestContext) -> list[bytes]:
    keys = [key for group in groups for key in group]
    if all(ctx.get_offload_key_position(key) is not None for key in keys):
        return sorted(keys, key=lambda key: ctx.get_offload_key_position(key) or 0)
    return keys


class LRUModel:
    """Key, chunk and rank in a list. A rank is (number, -position, -count): the last two for provisional
    ranks only.
    """

    def __init__(self) -> None:
        self.entries: dict[bytes, tuple[ChunkStatus, tuple[int, int, int]]] = {}
        self.clock = 0
        self.provisional: dict[RequestContext, tuple[int, int]] = {}

    def next_rank(self) -> tuple[int, int, int]:
        self.clock += 1
        return (self.clock, 0, 0)

    def order(self) -> list[tuple[bytes, ChunkStatus]]:
        return [(key, self.entries[key][0]) for key in sorted(self.entries, key=lambda key: self.entries[key][1])]

    def set_rank(self, key: bytes, rank: tuple[int, int, int]) -> None:
        self.entries[key] = (self.entries[key][0], rank)

    def insert(self, key: bytes, chunk: ChunkStatus, ctx: RequestContext | None) -> None:
        position = None if ctx is None else ctx.get_offload_key_position(key)
        if ctx is not None and ctx in self.provisional and position is not None:
            self.entries[key] = (chunk, self.share(ctx, position))
        else:
            self.entries[key] = (chunk, self.next_rank())

    def share(self, ctx: RequestContext, position: int) -> tuple[int, int, int]:
        rank, seen = self.provisional[ctx]
        self.provisional[ctx] = (rank, seen + 1)
        return (rank, -position, -seen)

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self.entries:
                self.set_rank(key, self.next_rank())

    def access(self, keys: Sequence[bytes], ctx: RequestContext) -> None:
        if ctx not in self.provisional:
            self.provisional[ctx] = (self.next_rank()[0], 0)
        for key in keys:
            rank, seen = self.provisional[ctx]
            if key in self.entries and self.entries[key][1][0] < rank:
                position = ctx.get_offload_key_position(key)
                self.set_rank(key, self.share(ctx, seen if position is None else position))

    def finish(self, groups: Sequence[Sequence[bytes]], ctx: RequestContext) -> None:
        self.provisional.pop(ctx, None)
        self.touch(flat_order(groups, ctx))

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, ChunkStatus]] | None:
        victims = unused(self.order(), protected)[:n]
        if len(victims) < n:
            return None
        for key, _ in victims:
            del self.entries[key]
        return victims

    def clear(self) -> None:
        self.entries.clear()
        self.provisional.clear()


class ARCModel:
    """The four lists, LRU end first, and the target."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.t1: list[bytes] = []
        self.t2: list[bytes] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []
        self.target = 0.0
        self.chunks: dict[bytes, ChunkStatus] = {}

    def insert(self, key: bytes, chunk: ChunkStatus) -> None:
        for ghosts in (self.b1, self.b2):
            if key in ghosts:
                ghosts.remove(key)
        self.t1.append(key)
        self.chunks[key] = chunk

    def remove(self, key: bytes) -> None:
        for entries in (self.t1, self.t2):
            if key in entries:
                entries.remove(key)
        self.chunks.pop(key, None)

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self.t1:
                self.t1.remove(key)
                (self.t2 if self.chunks[key].ref_cnt >= 0 else self.t1).append(key)
            elif key in self.t2:
                self.t2.remove(key)
                self.t2.append(key)
            elif key in self.b1:
                self.target = min(self.target + max(1.0, len(self.b2) / len(self.b1)), float(self.capacity))
                self.b1.remove(key)
                self.b1.append(key)
            elif key in self.b2:
                self.target = max(self.target - max(1.0, len(self.b1) / len(self.b2)), 0.0)
                self.b2.remove(key)
                self.b2.append(key)

    def finish(
        self, groups: Sequence[Sequence[bytes]], inserted: set[bytes], reused: set[bytes], ctx: RequestContext
    ) -> None:
        for key in reversed(flat_order(groups, ctx)):
            place = self.t1 if key in self.t1 else self.t2 if key in self.t2 else None
            if place is None or key not in inserted | reused:
                continue
            place.remove(key)
            (place if key in inserted else self.t2).append(key)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, ChunkStatus]] | None:
        t1 = [key for key in self.t1 if self.chunks[key].ref_cnt == 0 and key not in protected]
        t2 = [key for key in self.t2 if self.chunks[key].ref_cnt == 0 and key not in protected]
        if len(t1) + len(t2) < n:
            return None
        virtual, victims = len(self.t1), []
        for _ in range(n):
            if t1 and (virtual >= int(self.target) or not t2):
                victims.append(t1.pop(0))
                virtual -= 1
            else:
                victims.append(t2.pop(0))
        for key in victims:
            if key in self.t1:
                self.t1.remove(key)
                self.b1.append(key)
            else:
                self.t2.remove(key)
                self.b2.append(key)
        self.b1 = self.b1[max(0, len(self.b1) - self.capacity) :]
        self.b2 = self.b2[max(0, len(self.b2) - self.capacity) :]
        return [(key, self.chunks.pop(key)) for key in victims]

    def clear(self) -> None:
        self.__init__(self.capacity)  # type: ignore[misc]
