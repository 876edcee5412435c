"""One replay: a trace through the RAM tier's manager and a policy, as the daemon drives them, without payloads.

Each request looks its blocks up in order; the leading run of present ones is loaded, the rest is stored, heads
first. What a tier refuses as a whole is offered in halves, down to single blocks, as the daemon does; what is then
refused, and all behind it, stays unstored. A recording also says which blocks an engine did offer; and it has
requests that ask for nothing, which use what is there and store the rest.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from omlxd.lab.traces import Request, Trace
from omlxd.lab.weighing import WeighingManager
from omlxd.policy.base import CachePolicy, RequestContext
from omlxd.policy.belady import BeladyCachePolicy
from omlxd.policy.registry import get_policy
from omlxd.storage.chunk_records import RequestState
from omlxd.storage.chunks import ChunkManager, Lookup
from omlxd.storage.owners import RECENT_REQUESTS
from omlxd.storage.requests import goes_on, request

OFFLINE: dict[str, type[CachePolicy]] = {"belady": BeladyCachePolicy}
"""Policies that know the future: for replays alone, so the registry has none of them."""

Progress = Callable[[int], None]
REPORT_EVERY = 64
"""Requests between two reports of progress."""


@dataclass(slots=True)
class Tally:
    """What a replay counts. Blocks, unless it says otherwise."""

    requests: int = 0
    asked_tokens: int = 0
    reused_tokens: int = 0
    reused_tokens_ssd: int = 0
    asked: int = 0
    present: int = 0
    computed: int = 0
    """Blocks that were asked for and not reused."""
    stored: int = 0
    refused: int = 0
    evicted: int = 0
    victim_ages: list[int] = field(default_factory=list)
    """Of every victim, the requests since its last use."""
    ssd_written: int = 0
    ssd_read: int = 0
    ssd_evicted: int = 0
    seconds: float = 0.0


def policy_class(name: str) -> type[CachePolicy]:
    """As the registry's `get_policy`; knows those too that need the future."""
    return OFFLINE.get(name) or get_policy(name)


def leading_run(found: Sequence[Lookup]) -> int:
    """How many leading blocks are there."""
    for index, what in enumerate(found):
        if what is not Lookup.HIT:
            return index
    return len(found)


class Contexts:
    """The context of each request. In a recording a store goes on with the request that loaded the same chain, as in the
    daemon; elsewhere every request is one of its own.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._recent: defaultdict[int, deque[RequestContext]] = defaultdict(lambda: deque(maxlen=RECENT_REQUESTS))

    def of(self, asked: Request, keys: Sequence[bytes]) -> RequestContext:
        """The context of `asked`, which is for `keys`."""
        if not self._trace.recorded:
            return RequestContext()
        recent = self._recent[asked.session]
        stores = not asked.input_tokens and asked.end > asked.first
        running = next((ctx for ctx in reversed(recent) if goes_on(ctx, keys)), None) if stores else None
        ctx = request("recorded", keys, self._trace.space(asked.space).block_tokens, running)
        if running is None and (stores or asked.input_tokens):
            recent.append(ctx)
        return ctx


class Tier:
    """A manager, and when which of its blocks was used last."""

    def __init__(
        self,
        size: int,
        policy: str,
        keys: Sequence[Sequence[bytes]],
        weights: Mapping[bytes, int] | None = None,
    ) -> None:
        """`size` blocks; of `weights`, bytes by key, where they are not of one size."""
        chosen = policy_class(policy)
        self.manager = ChunkManager(size, chosen) if weights is None else WeighingManager(size, chosen, weights)
        if isinstance(self.manager.policy, BeladyCachePolicy):
            self.manager.policy.know(keys)
        self._last_use: dict[bytes, int] = {}

    def finished(self, ctx: RequestContext) -> None:
        """A request has ended: its accesses count. A policy that knows the future goes on to the next one in any case."""
        policy, state = self.manager.policy, ctx.scratch.get(self.manager)
        idle = not isinstance(state, RequestState) or state.finished
        if isinstance(policy, BeladyCachePolicy) and idle:
            policy.on_request_finished((), (), (), ctx)
        else:
            self.manager.on_request_finished(ctx)

    def used(self, keys: Sequence[bytes], now: int) -> None:
        """Request number `now` used `keys`."""
        self._last_use.update(dict.fromkeys(keys, now))

    def store(
        self, keys: Sequence[bytes], ctx: RequestContext | None, on_evicted: Callable[[list[bytes]], None]
    ) -> int:
        """Offer `keys`, heads first; how many leading ones are here now.

        All are pending until the last one was offered: a request never evicts its own blocks.
        """
        done, batch = 0, len(keys)
        taken: list[bytes] = []
        while batch:
            offered = keys[done : done + batch]
            prepared = self.manager.prepare_store(offered, ctx)
            if prepared is None:
                batch //= 2
                continue
            if prepared.evicted_keys:
                on_evicted(prepared.evicted_keys)
            taken += prepared.keys_to_store
            done += len(offered)
            batch = min(batch, len(keys) - done)
        self.manager.complete_store(taken, True, ctx)
        return done

    def ages(self, evicted: Sequence[bytes], now: int) -> list[int]:
        """Requests since the last use of each of `evicted`."""
        return [now - self._last_use.get(key, now) for key in evicted]


def replay_ram(trace: Trace, policy: str, size: int, progress: Progress | None = None) -> Tally:
    """RAM alone: `size` blocks under `policy`."""
    keys_of = trace.keys()
    tier = Tier(size, policy, keys_of, trace.weights())
    manager = tier.manager
    tally = Tally()
    start = perf_counter()
    contexts = Contexts(trace)
    for now, (asked, keys) in enumerate(zip(trace.requests, keys_of, strict=True)):
        found = manager.lookup_many(keys)
        asks = asked.input_tokens > 0
        run = leading_run(found)
        count(tally, asked, trace, found, run)
        ctx = contexts.of(asked, keys)
        held = keys[:run] if asks else present_of(keys, found)
        if held:
            manager.prepare_load(held, ctx)

        def on_evicted(evicted: list[bytes], now: int = now) -> None:
            tally.evicted += len(evicted)
            tally.victim_ages += tier.ages(evicted, now)

        before = manager.counters.stored
        ctx.may_be_declined = True
        first = max(run, asked.first) if asks else asked.first
        done = first + tier.store(keys[first : asked.end], ctx, on_evicted)
        tally.stored += manager.counters.stored - before
        tally.refused += max(0, asked.end - done)
        if held:
            manager.complete_load(held, ctx)
        tier.finished(ctx)
        tier.used(keys, now)
        if progress is not None and now % REPORT_EVERY == 0:
            progress(now)
    tally.seconds = perf_counter() - start
    return tally


def present_of(keys: Sequence[bytes], found: Sequence[Lookup]) -> list[bytes]:
    """Those of `keys` that are there."""
    return [key for key, what in zip(keys, found, strict=True) if what is Lookup.HIT]


def count(tally: Tally, asked_for: Request, trace: Trace, found: Sequence[Lookup], run: int) -> None:
    """A request has looked its blocks up; one that asks for nothing is none."""
    if not asked_for.input_tokens:
        return
    block_tokens = trace.space(asked_for.space).block_tokens
    asked = asked_for.asked(block_tokens)
    tally.requests += 1
    tally.asked_tokens += asked_for.input_tokens
    tally.reused_tokens += min(run * block_tokens, asked_for.input_tokens)
    tally.asked += asked
    tally.present += sum(what is Lookup.HIT for what in found[:asked])
    tally.computed += asked - min(run, asked)
