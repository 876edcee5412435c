"""What `omlxd replay` and `omlxd advise` share: reading a trace, replaying with a bar, plots."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from omlxd.cli.context import Exit, console, fail, hint
from omlxd.cli.quantities import Bytes
from omlxd.lab.grid import Tell, replay_all
from omlxd.lab.outcomes import Outcome, Setup
from omlxd.lab.plot import FORMATS, missing
from omlxd.lab.replay import OFFLINE, policy_class
from omlxd.lab.traces import Trace, TraceError, read_trace
from omlxd.storage.sizes import parse_blocks
from omlxd.storage.spill import WriteMode

if TYPE_CHECKING:
    from omlxd.lab.plot import Axis

F = TypeVar("F", bound=Callable[..., object])


def trace_argument(command: F) -> F:
    """The file."""
    path = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)
    return click.argument("trace", metavar="TRACE", type=path)(command)


def plot_option(command: F) -> F:
    """`--plot FILE`."""
    return click.option(
        "--plot",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        callback=_can_be_plotted,
        help=f"Draw the curves into this file ({', '.join(FORMATS)}).",
    )(command)


def block_bytes_option(command: F) -> F:
    """`--block-bytes SIZE`."""
    help_text = "Bytes of a block, where the trace does not say."
    return click.option("--block-bytes", type=Bytes(), metavar="SIZE", help=help_text)(command)


def check_policy(name: str) -> None:
    """A usage error for a policy that does not exist."""
    try:
        policy_class(name)
    except ValueError as error:
        raise click.BadParameter(f"{error}; in replays also {', '.join(OFFLINE)}") from None


def check_policies(ctx: click.Context, param: click.Parameter, names: Sequence[str] | str | None) -> object:
    """`check_policy` for an option's value, or its values."""
    for name in (names,) if isinstance(names, str) else names or ():
        check_policy(name)
    return names


def _can_be_plotted(ctx: click.Context, param: click.Parameter, file: Path | None) -> Path | None:
    """Refuse at once what would be refused after all the work."""
    if file is None:
        return None
    if file.suffix.lower() not in FORMATS:
        raise click.BadParameter(f"{str(file)!r} must end in {', '.join(FORMATS)}")
    if why := missing():
        fail(why)
    target = file if file.exists() else file.absolute().parent
    if not os.access(target, os.W_OK):
        fail(f"{file} cannot be written: {'there is no such folder' if not target.exists() else 'permission denied'}")
    return file


def read(path: Path) -> Trace:
    """The trace; ends the command with what is wrong with it."""
    try:
        trace = read_trace(path)
    except TraceError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{path} cannot be read: {error.strerror or error}")
    if trace.cut:
        hint(f"{path}: its last line is cut off, and left out")
    if isinstance(lost := (trace.end or {}).get("lost"), int) and lost:
        hint(f"{path}: {lost:,} events were lost while it was recorded")
    return trace


def blocks_of(text: str, option: str, distinct: int, block_bytes: int | None) -> int:
    """A size as a number of blocks; a usage error where it is none."""
    try:
        return parse_blocks(text, distinct=distinct, block_bytes=block_bytes)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from None


def setup_of(
    policy: str,
    ram: tuple[str, str],
    ssd: str | None,
    ssd_policy: str,
    mode: WriteMode,
    *,
    distinct: int,
    block_bytes: int | None,
) -> Setup:
    """One replay. `ram`: the option that gave RAM's size, and the size; `ssd`: None for no SSD tier."""
    option, size = ram
    blocks = blocks_of(size, option, distinct, block_bytes)
    if ssd is None:
        return Setup(policy, size, blocks, mode=mode)
    return Setup(policy, size, blocks, ssd, blocks_of(ssd, "--ssd", distinct, block_bytes), ssd_policy, mode)


def replay_with_bar(trace: Trace, path: Path, setups: Sequence[Setup], *, quiet: bool) -> list[Outcome]:
    """All replays; with a bar where somebody watches."""
    try:
        with _bar(len(trace.requests), len(setups), quiet=quiet) as tell:
            return replay_all(trace, path, setups, tell)
    except BrokenProcessPool:
        fail("a process that replayed was ended from outside; is there enough memory?")


@contextmanager
def _bar(requests: int, replays: int, *, quiet: bool) -> Iterator[Tell]:
    terminal = console(stderr=True)
    if quiet or not terminal.is_terminal:
        yield lambda number, done: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    done_of: dict[int, int] = {}
    with Progress(*columns, console=terminal, transient=True) as progress:
        task = progress.add_task("replaying", total=requests * replays)

        def tell(number: int, done: int) -> None:
            done_of[number] = done
            whole = sum(count >= requests for count in done_of.values())
            progress.update(task, completed=sum(done_of.values()), description=f"replaying ({whole} of {replays})")

        yield tell


def draw(file: Path, title: str, axis: Axis, curves: dict[str, Sequence[float]], label: str) -> None:
    """Write the picture; ends the command where that cannot be."""
    from omlxd.lab import plot

    try:
        plot.draw(file, title, axis, curves, label=label)
    except OSError as error:
        fail(f"{file} cannot be written: {error.strerror or error}", Exit.FAILED)
    hint(f"drawn into {file}")
