"""What is replayed, and what came of it: one policy, one size of each tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from omlxd.lab.replay import Progress, Tally, replay_ram
from omlxd.lab.tiered import TieredReplay
from omlxd.lab.traces import Trace
from omlxd.storage.spill import WriteMode


@dataclass(frozen=True, slots=True)
class Setup:
    """One policy and one size of each tier, in blocks; `size` and `ssd` are how these were given."""

    policy: str
    size: str
    blocks: int
    ssd: str | None = None
    """None: there is no SSD tier."""
    ssd_blocks: int = 0
    ssd_policy: str = ""
    mode: WriteMode = WriteMode.WRITE_BACK


@dataclass(frozen=True, slots=True)
class VictimAges:
    """Of the blocks that left RAM: requests since their last use."""

    p10: float
    median: float
    p90: float
    p99: float

    @classmethod
    def of(cls, ages: Sequence[int]) -> VictimAges | None:
        """None where nothing left."""
        if not ages:
            return None
        cuts = quantiles(ages, n=100, method="inclusive") if len(ages) > 1 else [ages[0]] * 99
        return cls(cuts[9], cuts[49], cuts[89], cuts[98])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay came to. Percentages are 0 to 100."""

    setup: Setup
    requests: int
    references: int
    """Blocks that the whole trace names, each as often as it does."""
    asked_tokens: int
    reused_tokens: int
    reused_tokens_ssd: int
    asked_blocks: int
    present_blocks: int
    stored_blocks: int
    """Into RAM, because they were computed."""
    refused_blocks: int
    evicted_blocks: int
    written_blocks: int
    """To the SSD."""
    read_blocks: int
    ssd_evicted_blocks: int
    victim_age: VictimAges | None
    seconds: float

    @property
    def prefix_hit_pct(self) -> float:
        """Tokens that were reused, of those asked for."""
        return _percent(self.reused_tokens, self.asked_tokens)

    @property
    def ram_prefix_hit_pct(self) -> float:
        """Of these, what RAM had."""
        return _percent(self.reused_tokens - self.reused_tokens_ssd, self.asked_tokens)

    @property
    def ssd_prefix_hit_pct(self) -> float:
        """Of these, what came from the SSD."""
        return _percent(self.reused_tokens_ssd, self.asked_tokens)

    @property
    def block_hit_pct(self) -> float:
        """Blocks that were there, of those asked for; those behind a missing one, which are of no use, too."""
        return _percent(self.present_blocks, self.asked_blocks)

    def as_dict(self, block_bytes: int | None) -> dict[str, object]:
        """For `--json`; with bytes where it is known how many a block has."""
        setup = self.setup
        figures: dict[str, object] = {
            "policy": setup.policy,
            "size": setup.size,
            "size_blocks": setup.blocks,
            "prefix_hit_pct": round(self.prefix_hit_pct, 3),
            "block_hit_pct": round(self.block_hit_pct, 3),
            "ram_prefix_hit_pct": round(self.ram_prefix_hit_pct, 3),
            "ssd_prefix_hit_pct": round(self.ssd_prefix_hit_pct, 3),
            "reused_tokens": self.reused_tokens,
            "stored_blocks": self.stored_blocks,
            "refused_blocks": self.refused_blocks,
            "evicted_blocks": self.evicted_blocks,
            "written_blocks": self.written_blocks,
            "read_blocks": self.read_blocks,
            "ssd_evicted_blocks": self.ssd_evicted_blocks,
            "victim_age": None,
            "seconds": round(self.seconds, 3),
            "blocks_per_s": round(self.references / self.seconds) if self.seconds else None,
        }
        if self.victim_age is not None:
            ages = self.victim_age
            figures["victim_age"] = {"p10": ages.p10, "median": ages.median, "p90": ages.p90, "p99": ages.p99}
        if setup.ssd is not None:
            figures |= {
                "ssd": setup.ssd,
                "ssd_blocks": setup.ssd_blocks,
                "ssd_policy": setup.ssd_policy,
                "mode": str(setup.mode),
            }
        if block_bytes is not None:
            figures |= {
                "written_bytes": self.written_blocks * block_bytes,
                "read_bytes": self.read_blocks * block_bytes,
            }
        return figures


def replay(trace: Trace, setup: Setup, progress: Progress | None = None) -> Outcome:
    """Replay `trace` once; `progress` is told how many requests are done, now and then."""
    if setup.ssd is None:
        tally = replay_ram(trace, setup.policy, setup.blocks, progress)
    else:
        tiers = TieredReplay(trace, setup.policy, setup.blocks, setup.ssd_blocks, setup.mode, setup.ssd_policy)
        tally = tiers.run(progress)
    return _outcome(setup, trace, tally)


def _outcome(setup: Setup, trace: Trace, tally: Tally) -> Outcome:
    return Outcome(
        setup,
        tally.requests,
        trace.references,
        tally.asked_tokens,
        tally.reused_tokens,
        tally.reused_tokens_ssd,
        tally.asked,
        tally.present,
        tally.stored,
        tally.refused,
        tally.evicted,
        tally.ssd_written,
        tally.ssd_read,
        tally.ssd_evicted,
        VictimAges.of(tally.victim_ages),
        tally.seconds,
    )


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0
