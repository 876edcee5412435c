"""`omlxd replay`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from omlxd.cli.context import hint, json_option, show, show_json
from omlxd.cli.quantities import Several
from omlxd.cli.traces import (
    block_bytes_option,
    check_policies,
    draw,
    plot_option,
    read,
    replay_with_bar,
    setup_of,
    trace_argument,
)
from omlxd.cli.views import duration, plain_table
from omlxd.counting import counted
from omlxd.lab.outcomes import Outcome, VictimAges
from omlxd.lab.plot import Axis
from omlxd.lab.replay import OFFLINE
from omlxd.policy.registry import policy_names
from omlxd.storage.sizes import format_size
from omlxd.storage.spill import WriteMode

if TYPE_CHECKING:
    from rich.table import Table

    from omlxd.lab.traces import Trace

POLICIES = ("lru", "arc", "prefix")
SIZES = ("1%", "2%", "5%", "10%", "25%")


@click.command()
@trace_argument
@click.option(
    "--policy",
    "policies",
    type=Several(),
    default=",".join(POLICIES),
    show_default=True,
    metavar="NAME,...",
    callback=check_policies,
    help=f"Policies: {', '.join([*policy_names(), *OFFLINE])} (which knows the future), or package.module:Class.",
)
@click.option(
    "--size",
    "sizes",
    type=Several(),
    default=",".join(SIZES),
    show_default=True,
    metavar="SIZE,...",
    help="RAM: % of the different blocks, a number of blocks, or bytes (8GiB).",
)
@click.option(
    "--ssd", "ssds", type=Several(), default=(), metavar="SIZE,...", help="An SSD tier below; sizes likewise."
)
@click.option("--ssd-policy", metavar="NAME", callback=check_policies, help="The SSD tier's policy.  [default: RAM's]")
@click.option(
    "--mode",
    type=click.Choice([str(mode) for mode in WriteMode]),
    default=str(WriteMode.WRITE_BACK),
    show_default=True,
    help="When a block is written to the SSD.",
)
@block_bytes_option
@plot_option
@json_option
def replay(
    trace: Path,
    policies: tuple[str, ...],
    sizes: tuple[str, ...],
    ssds: tuple[str, ...],
    ssd_policy: str | None,
    mode: str,
    block_bytes: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Replay a trace with other policies and sizes.

    TRACE: a recording of `record`, a kvtrace, or Mooncake's format, gzip'd or
    not. It runs the daemon's own policy code, without payloads and without a
    daemon: every policy with every size. docs/lab.md explains the figures.

    \b
    omlxd replay work.jsonl --policy lru,prefix,belady --size 2GiB,8GiB
    omlxd replay chat.jsonl.gz --size 1%,2% --ssd 5% --plot chat.png
    """
    read_in = read(trace)
    distinct = read_in.distinct_blocks
    block_bytes = block_bytes or read_in.block_bytes
    setups = [
        setup_of(
            policy,
            ("--size", size),
            ssd,
            ssd_policy or policy,
            WriteMode(mode),
            distinct=distinct,
            block_bytes=block_bytes,
        )
        for ssd in ssds or (None,)
        for size in sizes
        for policy in policies
    ]
    outcomes = replay_with_bar(read_in, trace, setups, quiet=as_json)
    if as_json:
        show_json(
            {
                "trace": read_in.name,
                "requests": outcomes[0].requests,
                "tokens": outcomes[0].asked_tokens,
                "block_tokens": read_in.block_tokens,
                "block_bytes": block_bytes,
                "distinct_blocks": distinct,
                "results": [outcome.as_dict(block_bytes) for outcome in outcomes],
            }
        )
    else:
        click.echo(headline(read_in, distinct, block_bytes))
        click.echo()
        show(table(outcomes, block_bytes))
    if plot is not None:
        _draw(plot, read_in, outcomes, sizes, ssds)


def headline(trace: Trace, distinct: int, block_bytes: int | None) -> str:
    """What the trace is, in two lines."""
    asking = sum(request.input_tokens > 0 for request in trace.requests)
    size = f" of {format_size(block_bytes)}" if block_bytes is not None else ""
    whole = f" ({format_size(distinct * block_bytes)})" if block_bytes is not None else ""
    spaces = f" in {counted(len(trace.spaces), 'namespace')}" if len(trace.spaces) > 1 else ""
    return (
        f"{trace.name}: {counted(asking, 'request')} for {counted(trace.tokens, 'token')} in {duration(trace.seconds)}\n"
        f"{counted(distinct, 'different block')}{whole}, {trace.block_tokens:,} tokens{size} each{spaces}"
    )


def table(outcomes: Sequence[Outcome], block_bytes: int | None) -> Table:
    """One line a replay."""
    tiered = any(outcome.setup.ssd is not None for outcome in outcomes)
    names = ["policy", "RAM", *(["SSD"] if tiered else []), "reused"]
    names += ["of RAM", "of SSD", "written", "read"] if tiered else ["found", "stored", "evicted", "age p50/p90"]
    names.append("took")
    made = plain_table(*names, right=names[1:])
    last: object = None
    for outcome in outcomes:
        setup = outcome.setup
        if last not in (None, (setup.size, setup.ssd)):
            made.add_row()
        last = (setup.size, setup.ssd)
        row = [setup.policy, setup.size, *([setup.ssd or ""] if tiered else []), f"{outcome.prefix_hit_pct:.2f} %"]
        if tiered:
            row += [f"{outcome.ram_prefix_hit_pct:.2f}", f"{outcome.ssd_prefix_hit_pct:.2f}"]
            row += [_amount(outcome.written_blocks, block_bytes), _amount(outcome.read_blocks, block_bytes)]
        else:
            row += [f"{outcome.block_hit_pct:.2f} %", f"{outcome.stored_blocks:,}", f"{outcome.evicted_blocks:,}"]
            row.append(_ages(outcome.victim_age))
        made.add_row(*row, f"{outcome.seconds:.1f} s")
    return made


def _amount(blocks: int, block_bytes: int | None) -> str:
    return f"{blocks:,}" if block_bytes is None else format_size(blocks * block_bytes)


def _ages(ages: VictimAges | None) -> str:
    return "-" if ages is None else f"{ages.median:,.0f}/{ages.p90:,.0f}"


def axis_label(sizes: Sequence[str]) -> str:
    """What the sizes below the curves are."""
    if all(size.endswith("%") for size in sizes):
        return "RAM, of the different blocks"
    return "RAM, blocks" if all(size.isdecimal() for size in sizes) else "RAM"


def _draw(file: Path, trace: Trace, outcomes: Iterable[Outcome], sizes: Sequence[str], ssds: Sequence[str]) -> None:
    by_size = {outcome.setup.size: outcome.setup.blocks for outcome in outcomes}
    ordered = sorted(sizes, key=by_size.__getitem__)
    if len(ordered) < 2:
        hint("one size makes no curve: give several, as in --size 1%,5%,25%")
    curves: dict[str, Sequence[float]] = {}
    for ssd in ssds or (None,):
        for policy in dict.fromkeys(outcome.setup.policy for outcome in outcomes):
            found = {o.setup.size: o.prefix_hit_pct for o in outcomes if (o.setup.policy, o.setup.ssd) == (policy, ssd)}
            curves[policy if ssd is None else f"{policy} + SSD {ssd}"] = [found[size] for size in ordered]
    axis = Axis(axis_label(ordered), [by_size[size] for size in ordered], ordered)
    draw(file, trace.name, axis, curves, "tokens reused, %")
