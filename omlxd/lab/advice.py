"""What other sizes would have saved, and which one to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omlxd.counting import counted
from omlxd.lab.outcomes import Outcome
from omlxd.lab.traces import Trace

ENOUGH = 0.95
"""The size to take is the smallest that reuses this share of what the best one does."""
PER_DAY_SECONDS = 600.0
"""What was written in a shorter time says nothing about a day."""
SHORT_SECONDS = 8 * 3_600.0
SHORT_REQUESTS = 500
"""Below one of these, a recording is called short."""
LITTLE = 0.05
"""Where no cache could reuse more than this share of the tokens, no size is worth much."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The figures behind a recommendation."""

    outcomes: Sequence[Outcome]
    reusable_tokens: int
    """What a cache without limits would have reused."""
    asked_tokens: int
    seconds: float
    requests: int
    block_bytes: int | None
    distinct_blocks: int
    prefill_tokens_per_s: float | None

    @property
    def recommended(self) -> Outcome:
        """Of those that reuse nearly what the best does: the least RAM, then the least SSD."""
        enough = ENOUGH * max(outcome.reused_tokens for outcome in self.outcomes)
        good = [outcome for outcome in self.outcomes if outcome.reused_tokens >= enough]
        return min(good, key=lambda outcome: (outcome.setup.blocks, outcome.setup.ssd_blocks))

    @property
    def best(self) -> Outcome:
        """What reuses most, with the least room."""
        return max(self.outcomes, key=lambda one: (one.reused_tokens, -one.setup.blocks, -one.setup.ssd_blocks))

    @property
    def reusable_pct(self) -> float:
        """What a cache without limits would have reused, in % of the tokens asked for."""
        return 100 * self.reusable_tokens / self.asked_tokens if self.asked_tokens else 0.0

    def written_per_day(self, outcome: Outcome) -> int | None:
        """Bytes to the SSD in a day that goes on like this; None where that cannot be said."""
        if self.block_bytes is None or self.seconds < PER_DAY_SECONDS:
            return None
        return int(outcome.written_blocks * self.block_bytes * 86_400 / self.seconds)

    def seconds_saved(self, outcome: Outcome) -> float | None:
        """Of the engine's computing; None where its speed is not known. What restoring takes is not taken off."""
        if self.prefill_tokens_per_s is None:
            return None
        return outcome.reused_tokens / self.prefill_tokens_per_s

    def doubts(self) -> list[str]:
        """What the figures cannot say, in sentences."""
        found = []
        if self.seconds < SHORT_SECONDS or self.requests < SHORT_REQUESTS:
            found.append(
                f"This covers {counted(self.requests, 'request')} in {_time(self.seconds)}, which is short: what comes back "
                "tomorrow counts as new here. Record a working day or more before you buy anything."
            )
        if self.reusable_pct < 100 * LITTLE:
            found.append(
                f"Little of this work comes back: a cache of any size would have reused {self.reusable_pct:.1f} % at most."
            )
        setup = self.recommended.setup
        if setup.blocks + setup.ssd_blocks >= self.distinct_blocks:
            found.append("That is room for all that was asked for: what more would do for more work cannot be said.")
        return found


def advise(
    trace: Trace, outcomes: Sequence[Outcome], *, block_bytes: int | None, prefill_tokens_per_s: float | None
) -> Advice:
    """Advice on `trace` from its replays. `prefill_tokens_per_s`: the engine's speed; None: as the trace tells."""
    return Advice(
        outcomes,
        reusable_tokens(trace),
        trace.tokens,
        trace.seconds,
        sum(request.input_tokens > 0 for request in trace.requests),
        block_bytes,
        trace.distinct_blocks,
        prefill_tokens_per_s or told_speed(trace),
    )


def reusable_tokens(trace: Trace) -> int:
    """Tokens that a cache without limits would have reused."""
    seen: set[int] = set()
    reused = 0
    for request in trace.requests:
        run = 0
        for block in request.blocks:
            if block not in seen:
                break
            run += 1
        reused += min(run * trace.space(request.space).block_tokens, request.input_tokens)
        seen.update(request.blocks[request.first : request.end])
    return reused


def told_speed(trace: Trace) -> float | None:
    """Tokens a second that the engines said they compute, over the tokens that they asked for; None: none did."""
    tokens = seconds = 0.0
    for request in trace.requests:
        speed = trace.space(request.space).prefill_tokens_per_s
        if speed is not None:
            tokens += request.input_tokens
            seconds += request.input_tokens / speed
    return tokens / seconds if seconds else None


def ladder(distinct: int, block_bytes: int | None) -> list[str]:
    """Sizes to try where none are given: powers of two in bytes up to all that was asked for, or shares of it."""
    if block_bytes is None:
        return ["1%", "2%", "5%", "10%", "25%", "50%", "100%"]
    whole = distinct * block_bytes
    power = max(20, (whole - 1).bit_length())
    return [_binary(1 << step) for step in range(max(20, power - 7), power + 1) if 1 << step >= block_bytes]


def _time(seconds: float) -> str:
    """``less than a minute``, ``6 min``, ``7.5 hours``."""
    if seconds < 60:
        return "less than a minute"
    return f"{seconds // 60:.0f} min" if seconds < 3_600 else f"{seconds / 3_600:.1f} hours"


def _binary(nbytes: int) -> str:
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if nbytes >= 1 << power:
            return f"{nbytes >> power}{unit}"
    return str(nbytes)
