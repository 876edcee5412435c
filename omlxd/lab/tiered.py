"""A replay through two tiers, as the daemon's store drives them: RAM over an SSD that keeps what it has restored.

What leaves RAM and is not on the SSD is written there, by mode: always when it leaves (`write_back`), at once when it
is stored (`write_through`), or when it leaves and was asked for again (`second_touch`). In each mode the SSD's policy is
asked first whether the block is worth the write, and may refuse it when its room is worth more. Both tiers' policies
see each request's whole path.
"""

from __future__ import annotations

from enum import StrEnum
from time import perf_counter

from omlxd.lab.replay import REPORT_EVERY, Progress, Tally, Tier, count, leading_run
from omlxd.lab.traces import Trace
from omlxd.policy.base import RequestContext
from omlxd.storage.chunks import Lookup


class WriteMode(StrEnum):
    """When a block goes to the SSD; the names of the daemon's configuration."""

    WRITE_BACK = "write_back"
    WRITE_THROUGH = "write_through"
    SECOND_TOUCH = "second_touch"


class TieredReplay:
    """RAM and SSD, and what is counted of them."""

    def __init__(self, trace: Trace, policy: str, ram: int, ssd: int, mode: WriteMode, ssd_policy: str) -> None:
        self._trace = trace
        self._keys = trace.keys()
        self._ram = Tier(ram, policy, self._keys)
        self._ssd = Tier(ssd, ssd_policy, self._keys)
        self._mode = mode
        self._asked_again: set[bytes] = set()
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
        found = [
            here if here is Lookup.HIT else there
            for here, there in zip(ram.lookup_many(keys), ssd.lookup_many(keys), strict=True)
        ]
        run = leading_run(found)
        ctx = RequestContext()
        for position, key in enumerate(keys):
            ctx.set_offload_key_position(key, position)
        reused = self._load(keys[:run], ctx)
        count(tally, self._trace.requests[self._now], self._trace.block_tokens, found, reused)
        before = ram.counters.stored
        done = reused + self._ram.store(keys[reused:], ctx, self._spill)
        tally.stored += ram.counters.stored - before
        tally.refused += len(keys) - done
        if self._mode is WriteMode.WRITE_THROUGH:
            self._write(keys[reused:done])
        ram.complete_load(keys[:reused], ctx)
        ram.on_request_finished(ctx)
        ssd.touch(keys, ctx)
        self._ram.used(keys, self._now)
        self._ssd.used(keys, self._now)

    def _load(self, keys: list[bytes], ctx: RequestContext) -> int:
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
        came = 0
        for index, key in enumerate(keys):
            if key in missing:
                if not self._ram.store([key], ctx, self._spill):
                    break
                ram.prepare_load([key], ctx)
                tally.ssd_read += 1
                tally.reused_tokens_ssd += self._trace.block_tokens
            came = index + 1
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
            due = [key for key in due if key in self._asked_again]
        before = ssd.counters.stored
        self._ssd.store(due, None, self._gone_from_ssd)
        self.tally.ssd_written += ssd.counters.stored - before

    def _gone_from_ssd(self, evicted: list[bytes]) -> None:
        self.tally.ssd_evicted += len(evicted)
