"""`omlxd advise`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

from omlxd.cli.context import hint, json_option, show, show_json
from omlxd.cli.quantities import Several
from omlxd.cli.replaying import axis_label, headline
from omlxd.cli.traces import (
    block_bytes_option,
    check_policies,
    check_policy,
    draw,
    plot_option,
    read,
    replay_with_bar,
    setup_of,
    trace_argument,
)
from omlxd.cli.views import duration, plain_table
from omlxd.lab.advice import Advice, ladder
from omlxd.lab.advice import advise as advise_on
from omlxd.lab.outcomes import Outcome
from omlxd.lab.plot import Axis
from omlxd.storage.sizes import format_size
from omlxd.storage.spill import WriteMode

if TYPE_CHECKING:
    from rich.table import Table

    from omlxd.lab.traces import Trace

CURVE = 50
"""Columns of the curve."""
WORTH_A_WORD = 0.5
"""Points of the hit ratio below which two sizes are the same."""


@click.command()
@trace_argument
@click.option("--ram", "rams", type=Several(), default=(), metavar="SIZE,...", help="RAM sizes to try: 4GiB,8GiB; 5%.")
@click.option("--ssd", "ssds", type=Several(), default=(), metavar="SIZE,...", help="SSD sizes to try; 0: none.")
@click.option("--policy", metavar="NAME", callback=check_policies, help="RAM's policy.  [default: the recording's]")
@click.option(
    "--ssd-policy", metavar="NAME", callback=check_policies, help="The SSD tier's.  [default: the recording's]"
)
@click.option(
    "--mode",
    type=click.Choice([str(mode) for mode in WriteMode]),
    help="When a block is written to the SSD.  [default: the recording's]",
)
@block_bytes_option
@click.option(
    "--prefill-tokens-per-s",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="How fast the engine computes, where it did not say.",
)
@plot_option
@json_option
def advise(
    trace: Path,
    rams: tuple[str, ...],
    ssds: tuple[str, ...],
    policy: str | None,
    ssd_policy: str | None,
    mode: str | None,
    block_bytes: int | None,
    prefill_tokens_per_s: float | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Say what more or less RAM and SSD would have saved.

    TRACE: a recording of `record`, or any trace. Without --ram and --ssd it
    tries sizes up to all that was asked for, above the SSD tier that the
    daemon had.

    \b
    omlxd advise work.jsonl
    omlxd advise work.jsonl --ram 4GiB,8GiB,16GiB --ssd 0,100GiB
    """
    read_in = read(trace)
    distinct = read_in.distinct_blocks
    block_bytes = block_bytes or read_in.block_bytes
    told = _Told(read_in)
    policy = policy or told.text("ram_policy") or _default_policy()
    ssd_policy = ssd_policy or told.text("ssd_policy") or policy
    for name in (policy, ssd_policy):  # those of a recording's header, too
        check_policy(name)
    ssds = ssds or told.size("ssd_bytes", block_bytes) or ("0",)
    rams = rams or tuple(ladder(distinct, block_bytes))
    chosen_mode = WriteMode(mode or told.text("ssd_mode") or WriteMode.WRITE_BACK)
    setups = [
        setup_of(
            policy,
            ("--ram", ram),
            None if ssd == "0" else ssd,
            ssd_policy,
            chosen_mode,
            distinct=distinct,
            block_bytes=block_bytes,
        )
        for ssd in ssds
        for ram in rams
    ]
    setups.sort(key=lambda setup: (setup.ssd_blocks, setup.blocks))
    outcomes = replay_with_bar(read_in, trace, setups, quiet=as_json)
    advice = advise_on(read_in, outcomes, block_bytes=block_bytes, prefill_tokens_per_s=prefill_tokens_per_s)
    if as_json:
        show_json(_document(read_in, advice, policy))
    else:
        click.echo(headline(read_in, distinct, block_bytes))
        click.echo(f"policy {policy}; without any limit {advice.reusable_pct:.1f} % of the tokens would be reused\n")
        show(_table(advice))
        click.echo()
        for line in _curve(outcomes):
            show(line)
        click.echo()
        for sentence in [*_recommendation(advice, told, block_bytes), *advice.doubts()]:
            show(sentence)
        if block_bytes is None:
            hint("how many bytes a block has is not known: --block-bytes SIZE makes bytes of all this")
    if plot is not None:
        _draw(plot, read_in, outcomes)


class _Told:
    """What the header of a recording says of the daemon."""

    def __init__(self, trace: Trace) -> None:
        self._header = trace.header if trace.recorded else {}

    def text(self, name: str) -> str | None:
        """A text, where there is one."""
        found = self._header.get(name)
        return found if isinstance(found, str) else None

    def nbytes(self, name: str) -> int | None:
        """A size in bytes, where there is one."""
        found = self._header.get(name)
        return found if isinstance(found, int) and found > 0 else None

    def size(self, name: str, block_bytes: int | None) -> tuple[str, ...]:
        """A size in bytes that is a block at least, as it would be given."""
        found = self.nbytes(name)
        return (format_size(found),) if found is not None and block_bytes is not None and found >= block_bytes else ()


def _default_policy() -> str:
    """The daemon's."""
    from omlxd.config import Ram

    return Ram().policy


def _table(advice: Advice) -> Table:
    tiered = any(outcome.setup.ssd is not None for outcome in advice.outcomes)
    timed = advice.prefill_tokens_per_s is not None
    names = ["RAM", *(["SSD"] if tiered else []), "reused", "tokens, RAM"]
    names += ["tokens, SSD", "blocks written" if advice.block_bytes is None else "written/day"] if tiered else []
    names += ["saved"] if timed else []
    made = plain_table(*names, right=names)
    for outcome in advice.outcomes:
        row = [outcome.setup.size, *([outcome.setup.ssd or "-"] if tiered else []), f"{outcome.prefix_hit_pct:.1f} %"]
        row.append(f"{outcome.reused_tokens - outcome.reused_tokens_ssd:,}")
        if tiered:
            row += [f"{outcome.reused_tokens_ssd:,}", _written(advice, outcome)]
        if timed:
            row.append(duration(advice.seconds_saved(outcome) or 0.0))
        made.add_row(*row, style="bold" if outcome is advice.recommended else None)
    return made


def _written(advice: Advice, outcome: Outcome) -> str:
    if advice.block_bytes is None:
        return f"{outcome.written_blocks:,}"
    per_day = advice.written_per_day(outcome)
    return "-" if per_day is None else format_size(per_day)


def _curve(outcomes: Sequence[Outcome]) -> list[Text]:
    """A bar a size: what RAM gave, and what the SSD did."""
    names = [_name(outcome) for outcome in outcomes]
    width = max(map(len, names))
    lines = []
    for name, outcome in zip(names, outcomes, strict=True):
        whole = round(CURVE * outcome.prefix_hit_pct / 100)
        ram = min(whole, round(CURVE * outcome.ram_prefix_hit_pct / 100))
        bar = "█" * ram + "▒" * (whole - ram)
        lines.append(Text(f"{name:>{width}} {bar.ljust(CURVE, '·')} {outcome.prefix_hit_pct:.0f} %", no_wrap=True))
    return lines


def _name(outcome: Outcome) -> str:
    setup = outcome.setup
    return setup.size if setup.ssd is None else f"{setup.size} + {setup.ssd}"


def _words(outcome: Outcome) -> str:
    setup = outcome.setup
    return f"{_amount(setup.size)} in RAM" + ("" if setup.ssd is None else f" and {_amount(setup.ssd)} on the SSD")


def _amount(size: str) -> str:
    if size.endswith("%"):
        return f"{size} of the different blocks"
    return f"{size} blocks" if size.isdecimal() else size


def _recommendation(advice: Advice, told: _Told, block_bytes: int | None) -> list[str]:
    """Plain sentences."""
    chosen, best = advice.recommended, advice.best
    text = f"Keep {_words(chosen)}: {chosen.prefix_hit_pct:.1f} % of the tokens asked for are reused"
    if (saved := advice.seconds_saved(chosen)) is not None:
        text += f", which saves {duration(saved)} of computing in {duration(advice.seconds)}"
    said = [text + "."]
    if best.prefix_hit_pct - chosen.prefix_hit_pct >= WORTH_A_WORD:
        said.append(f"The most, with {_words(best)}, would be {best.prefix_hit_pct:.1f} %.")
    now = told.nbytes("ram_bytes")
    if now is not None and block_bytes is not None:
        said.append(f"The daemon had {format_size(now)} of RAM when this was recorded.")
    return said


def _document(trace: Trace, advice: Advice, policy: str) -> dict[str, object]:
    def row(outcome: Outcome) -> dict[str, object]:
        size = advice.block_bytes
        return {
            **outcome.as_dict(size),
            "ram": outcome.setup.size,
            "ram_tokens": outcome.reused_tokens - outcome.reused_tokens_ssd,
            "ssd_tokens": outcome.reused_tokens_ssd,
            "written_bytes_per_day": advice.written_per_day(outcome),
            "seconds_saved": advice.seconds_saved(outcome),
        }

    return {
        "trace": trace.name,
        "policy": policy,
        "requests": advice.requests,
        "seconds": advice.seconds,
        "tokens": advice.asked_tokens,
        "reusable_tokens": advice.reusable_tokens,
        "distinct_blocks": advice.distinct_blocks,
        "block_bytes": advice.block_bytes,
        "prefill_tokens_per_s": advice.prefill_tokens_per_s,
        "results": [row(outcome) for outcome in advice.outcomes],
        "recommended": {"ram": advice.recommended.setup.size, "ssd": advice.recommended.setup.ssd},
        "doubts": advice.doubts(),
    }


def _draw(file: Path, trace: Trace, outcomes: Sequence[Outcome]) -> None:
    curves: dict[str, Sequence[float]] = {}
    places: dict[str, int] = {}
    for outcome in outcomes:
        places[outcome.setup.size] = outcome.setup.blocks
        name = outcome.setup.policy if outcome.setup.ssd is None else f"with {outcome.setup.ssd} of SSD"
        curves[name] = [*curves.get(name, ()), outcome.prefix_hit_pct]
    if len(places) < 2:
        hint("one size makes no curve: give several, as in --ram 4GiB,8GiB,16GiB")
    draw(
        file,
        trace.name,
        Axis(axis_label(list(places)), list(places.values()), list(places)),
        curves,
        "tokens reused, %",
    )
