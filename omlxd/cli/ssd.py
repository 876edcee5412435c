"""`omlxd gc`, `omlxd verify`, `omlxd compact`, `omlxd export`, `omlxd import`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from omlxd.cli.context import Common, Exit, console, fail, hint, json_option, pass_common, show_json
from omlxd.cli.ssd_operator import Tell, ssd_operator
from omlxd.counting import counted
from omlxd.protocol import KEY_BYTES, Message
from omlxd.storage.sizes import format_size, parse_size

SHOWN = 20
"""Damaged blocks that are listed one by one."""


class Rate(click.ParamType[float]):
    """Bytes a second, "200MiB"; 0: as fast as it goes."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Bytes a second."""
        try:
            return float(parse_size(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Key(click.ParamType[bytes]):
    """A whole key in hexadecimal digits."""

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        """Its bytes."""
        if isinstance(value, bytes):
            return value
        try:
            key = bytes.fromhex(value)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            self.fail(f"{value!r} is no key: {2 * KEY_BYTES} hexadecimal digits are needed", param, ctx)
        return key


@contextmanager
def bar(what: str, *, quiet: bool) -> Iterator[Tell]:
    """A bar on standard error for blocks of a total; nothing where nobody watches."""
    terminal = console(stderr=True)
    if quiet or not terminal.is_terminal:
        yield lambda part: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(what),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=terminal, transient=True) as progress:
        task = progress.add_task(what, total=1)

        def tell(part: Message) -> None:
            if "total" in part:
                progress.update(task, total=max(1, part["total"]), completed=part["blocks"])

        yield tell


@click.command()
@click.option("--dry-run", is_flag=True, help="Only show what would leave.")
@json_option
@pass_common
def gc(common: Common, dry_run: bool, as_json: bool) -> None:
    """Keep the SSD tier's limit now.

    The daemon does so by itself, step by step; this waits until it is done,
    and gives all free space in the store back to the file system. Without a
    daemon it works on the store itself.

    \b
    omlxd gc --dry-run
    """
    with ssd_operator(common) as ssd:
        done = ssd.gc(dry_run=dry_run)
    if as_json:
        by_id = {name: {space.hex(): what for space, what in done[name].items()} for name in ("namespaces", "models")}
        show_json({**done, **by_id})
        return
    verb = "would be removed" if dry_run else "removed"
    click.echo(f"{format_size(done['used'])} of {format_size(done['limit'])} are in use")
    click.echo(f"{counted(done['blocks'], 'block')} ({format_size(done['stored_bytes'])}) {verb}")
    for space, size in sorted(done["namespaces"].items(), key=lambda item: -item[1]):
        click.echo(f"  {format_size(size):>10}  {done['models'][space]} (namespace {space.hex()[:8]})")
    if dry_run:
        click.echo(f"{format_size(done['returned_bytes'])} would go back to the file system")
    else:
        click.echo(f"{format_size(max(0, done['used'] - done['used_after']))} went back to the file system")


@click.command()
@click.option(
    "--rate",
    type=Rate(),
    default="200MiB",
    show_default=True,
    metavar="SIZE",
    help="Read at most so much a second; 0: all it can.",
)
@click.option(
    "--after", type=Key(), default=b"", metavar="KEY", help="Go on behind this block, where an earlier run ended."
)
@json_option
@pass_common
def verify(common: Common, rate: float, after: bytes, as_json: bool) -> None:
    """Read every block on the SSD and check it.

    Damaged blocks are removed; engines compute them again. The exit code is 0
    when all are well, 4 when some were not, or when the disk did not let all
    be read. Interrupted (Ctrl-C), it says how to go on.

    \b
    omlxd verify --rate 50MiB
    """
    last = after

    def note(part: Message) -> None:
        nonlocal last
        last = part.get("after") or last
        tell(part)

    try:
        with ssd_operator(common) as ssd, bar("checking", quiet=as_json) as tell:
            done = ssd.verify(note, after=after, bytes_per_second=rate)
    except KeyboardInterrupt:
        fail(f"interrupted; go on with: omlxd verify --after {last.hex()}" if last else "interrupted", Exit.INTERRUPTED)
    bad = done["damaged"]
    if as_json:
        show_json(done)
    else:
        checked = f"{counted(done['blocks'], 'block')} ({format_size(done['bytes'])}) checked"
        click.echo(f"{checked}, {f'{len(bad):,} damaged' if bad else 'none damaged'}")
        for one in bad[:SHOWN]:
            click.echo(f"  {one['key'].hex()[:16]}  {one['reason']}")
        if len(bad) > SHOWN:
            click.echo(f"  and {len(bad) - SHOWN:,} more (--json shows all)")
        if done["trouble"]:
            hint(f"the disk did not let the rest be read: {done['trouble']}")
            if done["after"]:
                click.echo(
                    f"go on with: omlxd verify --after {done['after'].hex()}", err=True
                )  # to be copied: unbroken
    if bad or done["trouble"]:
        raise SystemExit(int(Exit.NOT_FOUND))


@click.command()
@click.option("--rewrite", is_flag=True, help="Copy the file even where holes in it would do.")
@json_option
@pass_common
def compact(common: Common, rewrite: bool, as_json: bool) -> None:
    """Make the store's file as small as what is in it.

    Free pages become holes in the file; where the file system has none, the
    file is copied, which needs as much space again for a while. Engines go on
    meanwhile, and it may be ended at any moment.
    """
    with ssd_operator(common) as ssd:
        done = ssd.compact(rewrite=rewrite)
    if as_json:
        show_json(done)
        return
    saved = done["before"] - done["after"]
    if saved > 0:
        click.echo(f"the store takes {format_size(done['after'])} now, {format_size(saved)} less than before")
    else:
        click.echo(f"nothing to do: the store takes {format_size(done['after'])}, and no space in it is unused")


@click.command()
@click.argument("what", metavar="NAMESPACE|KEY")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace FILE when it is there.")
@json_option
@pass_common
def export(common: Common, what: str, file: Path, force: bool, as_json: bool) -> None:
    """Write blocks from the SSD into a file.

    NAMESPACE: a model, or the first digits of a namespace's id. KEY: the
    first digits of the key of a chain's last block. Takes what is in RAM only
    to the SSD first. The file says what was computed, to whoever reads it.

    \b
    omlxd export org/model warm.omlxd
    """
    if file.exists() and not force:
        fail(f"{file} is there already: --force replaces it")
    with ssd_operator(common) as ssd, bar("exporting", quiet=as_json) as tell:
        done = ssd.export(tell, what, file.absolute())
    if as_json:
        show_json(done)
        return
    click.echo(f"wrote {counted(done['blocks'], 'block')} ({format_size(done['bytes'])}) to {file}")
    if done["blocks"] < done["total"]:
        hint(f"{done['total'] - done['blocks']:,} could not be read and were left out")


@click.command(name="import")
@click.argument("file", type=click.Path(dir_okay=False, exists=True, path_type=Path))
@json_option
@pass_common
def import_(common: Common, file: Path, as_json: bool) -> None:
    """Take blocks from a file into the store.

    The file's checksum is checked first: of a file that is not whole, nothing
    is taken. Where there is no store yet, one is begun.
    """
    with ssd_operator(common, begin=True) as ssd, bar("importing", quiet=as_json) as tell:
        done = ssd.import_(tell, file.absolute())
    if as_json:
        show_json(done)
        return
    click.echo(f"took in {done['blocks']:,} of {counted(done['total'], 'block')}; {done['present']:,} there already")
    if done["declined"]:
        hint(f"{counted(done['declined'], 'block')} found no room")
