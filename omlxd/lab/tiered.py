"""A replay through two tiers, as the daemon's store drives them: RAM over an SSD that keeps what it has restored.

What leaves RAM and is not on the SSD is written there, by mode: always when it leaves (`write_back`), at once when it
is stored (`write_through`), or when it leaves and was asked for, or stored, again (`second_touch`). In each mode the
SSD's policy is asked first whether the block is worth the write, and may refuse it when its room is worth more. Both
tiers' policies see each request's whole path.
"""

from __future__ import annotations

from time import perf_counter

from omlxd.lab.replay import REPORT_EVERY, Contexts, Progress, Tally, Tier, count, leading_run, present_of
from omlxd.lab.traces import Request, Trace
from omlxd.policy.base import RequestContext
from omlxd.storage.admission import AdmissionFilter
from omlxd.storage.chunks import Lookup
from omlxd.storage.spill import TRACKED_KEYS, WriteMode


class TieredReplay:
    """RAM and SSD, and what is counted of them."""

    def __init__(self, trace: Trace, policy: str, ram: int, ssd: int, mode: WriteMode, ssd_policy: str) -> None:
        self._trace = trace
        self._keys = trace.keys()
        weights = trace.weights()
        self._ram = Tier(ram, policy, self._keys, weights)
        self._ssd = Tier(ssd, ssd_policy, self._keys, weights)
        self._mode = mode
        self._contexts = Contexts(trace)
        self._asked_again: set[bytes] = set()
        self._stored = AdmissionFilter(2, TRACKED_KEYS)
        self._now = 0
        self.tally = Tally()

    def run(self, progress: Progress | None = None) -> Tally:
        """The whole trace."""
        start = perf_counter()
        for now, keys in enumerate(self._keys):
            self._now = now
            self._request(keys)
            if progress is not None and now % REPORT_EVERY == 0:
                progress(now)
        self.tally.seconds = perf_counter() - start
        return self.tally

    def _request(self, keys: list[bytes]) -> None:
        ram, ssd, tally = self._ram.manager, self._ssd.manager, self.tally
        request = self._trace.requests[self._now]
        in_ram = ram.lookup_many(keys)
        found = [
            here if here is Lookup.HIT else there for here, there in zip(in_ram, ssd.lookup_many(keys), strict=True)
        ]
        ctx = self._contexts.of(request, keys)
        if not ctx.positions:
            ctx.positions = dict(zip(keys, range(len(keys)), strict=True))
        if request.input_tokens:
            reused = self._load(keys[: leading_run(found)], ctx, request)
            count(tally, request, self._trace, found, reused)
            held, first = keys[:reused], max(reused, request.first)
            missing = keys[first : request.end]
        else:  # it asks for nothing: what is on the SSD stays there
            held, first = present_of(keys, in_ram), request.first
            ram.prepare_load(held, ctx)
            offered = zip(keys[first : request.end], found[first : request.end], strict=True)
            missing = [key for key, what in offered if what is not Lookup.HIT]
        before = ram.counters.stored
        done = self._ram.store(missing, ctx, self._spill)
        self._stored.count(missing[:done])
        tally.stored += ram.counters.stored - before
        tally.refused += len(missing) - done
        if self._mode is WriteMode.WRITE_THROUGH:
            self._write(missing[:done])
        ram.complete_load(held, ctx)
        self._ram.finished(ctx)
        ssd.touch(keys, ctx)
        self._ssd.finished(ctx)
        self._ram.used(keys, self._now)
        self._ssd.used(keys, self._now)

    def _load(self, keys: list[bytes], ctx: RequestContext, request: Request) -> int:
        """Pin what is in RAM and restore the rest, heads first; how many leading blocks that gave."""
        ram, ssd, tally = self._ram.manager, self._ssd.manager, self.tally
        self._asked_again.update(keys)
        here = [key for key in keys if ram.lookup(key) is Lookup.HIT]
        ram.prepare_load(here, ctx)
        if len(here) == len(keys):
            return len(keys)
        missing = set(keys).difference(here)
        for key in missing:
            ssd.pin(key)
        came = restored = 0
        for index, key in enumerate(keys):
            if key in missing:
                if not self._ram.store([key], ctx, self._spill):
                    break
                ram.prepare_load([key], ctx)
                restored += 1
            came = index + 1
        block_tokens = self._trace.space(request.space).block_tokens
        tally.ssd_read += restored
        tally.reused_tokens_ssd += restored * block_tokens
        if came and keys[came - 1] in missing:  # the prompt may end within the last block
            tally.reused_tokens_ssd -= max(0, came * block_tokens - request.input_tokens)
        for key in missing:
            ssd.unpin(key)
        ram.complete_load([key for key in keys[came:] if key not in missing], ctx)
        return came

    def _spill(self, evicted: list[bytes]) -> None:
        """These left RAM, deepest first."""
        self.tally.evicted += len(evicted)
        self.tally.victim_ages += self._ram.ages(evicted, self._now)
        if self._mode is not WriteMode.WRITE_THROUGH:
            self._write(evicted[::-1])

    def _write(self, keys: list[bytes]) -> None:
        ssd = self._ssd.manager
        worth = ssd.policy.worth_writing
        due = [key for key in keys if key not in ssd and worth(key)]
        if self._mode is WriteMode.SECOND_TOUCH:
            stored_again = set(self._stored.admitted(due))
            due = [key for key in due if key in self._asked_again or key in stored_again]
        before = ssd.counters.stored
        self._ssd.store(due, None, self._gone_from_ssd)
        self.tally.ssd_written += ssd.counters.stored - before

    def _gone_from_ssd(self, evicted: list[bytes]) -> None:
        self.tally.ssd_evicted += len(evicted)
