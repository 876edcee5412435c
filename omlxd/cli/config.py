"""`omlxd config`: show, check, init."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from omlxd.cli.context import Common, Exit, console, fail, hint, json_option, pass_common, show_json
from omlxd.cli.views import columns_of
from omlxd.config_problems import ConfigError
from omlxd.paths import private_dir

if TYPE_CHECKING:
    from rich.table import Table


@click.group()
def config() -> None:
    """Show, check or begin the configuration."""


@config.command("show")
@click.option("--origin", is_flag=True, help="Also tell where each value comes from.")
@click.option("--running", is_flag=True, help="Ask the running daemon what it has in effect.")
@json_option
@pass_common
def show_config(common: Common, origin: bool, running: bool, as_json: bool) -> None:
    """Show the configuration: defaults, file, environment, flags.

    \b
    omlxd config show --origin
    OMLXD_RAM_SIZE=8GiB omlxd config show --json
    """
    notes: list[str] = []
    if running:
        with common.daemon() as cache:
            values = cache.call("settings")["values"]
    else:
        loaded = common.config()
        notes = loaded.notes
        values = {key: {"value": value, "origin": loaded.origin(key)} for key, value in loaded.values()}
    if as_json:
        show_json({"file": common.config_file, "values": values, "notes": notes})
        return
    show_settings(values, origin=origin)
    for note in notes:
        hint(note)


def show_settings(values: Mapping[str, Mapping[str, object]], *, origin: bool) -> None:
    """Keys, values and, where asked, origins: folded to a terminal's width, and in a pipe with no path broken."""
    rows = [("setting", "value", *(["origin"] if origin else []))]
    for key, one in values.items():
        rows.append((key, _shown(one["value"]), *([str(one["origin"])] if origin else [])))
    terminal = console()
    if terminal.is_terminal:
        terminal.print(folded(rows))
    else:
        click.echo(columns_of(rows))


def _shown(value: object) -> str:
    """As the file has it, but text without quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(value)


def folded(rows: Sequence[tuple[str, ...]]) -> Table:
    """A table whose columns but the first may be folded."""
    from rich.table import Table

    title, *others = rows[0]
    table = Table(box=None, pad_edge=False)
    table.add_column(title, no_wrap=True)
    for other in others:
        table.add_column(other, overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    return table


@config.command()
@json_option
@pass_common
def check(common: Common, as_json: bool) -> None:
    """Check the configuration; exit code 78 when it cannot be used.

    Every problem is told in a line of its own: the key, its value, where it
    was set, and what is allowed.
    """
    try:
        loaded = common.config()
    except ConfigError as error:
        if not as_json:
            raise
        show_json(
            {
                "valid": False,
                "problems": [
                    {"key": p.key, "value": str(p.value), "origin": p.origin, "allowed": p.allowed}
                    for p in error.problems
                ],
            }
        )
        raise SystemExit(int(Exit.CONFIG)) from None
    if as_json:
        show_json({"valid": True, "problems": [], "notes": loaded.notes})
        return
    there = "" if common.config_file.exists() else " (there is no such file: defaults)"
    click.echo(f"{common.config_file}{there}: fine")
    for note in loaded.notes:
        click.echo(note)


@config.command()
@json_option
@pass_common
def reload(common: Common, as_json: bool) -> None:
    """Make the running daemon read its configuration again.

    It does so by itself when the file changes. Exit code 1 when something was
    refused, 78 when the file cannot be used.
    """
    with common.daemon() as cache:
        outcome = cache.call("reload")
    if as_json:
        show_json(outcome)
    else:
        for key in outcome["applied"]:
            click.echo(f"{key}: applied")
        for key, why in outcome["refused"].items():
            click.echo(f"{key}: refused: {why}")
        for key in outcome["needs_restart"]:
            click.echo(f"{key}: needs a restart")
        if not any((outcome["applied"], outcome["refused"], outcome["needs_restart"], outcome["problem"])):
            click.echo("nothing has changed")
    if outcome["problem"]:
        fail(outcome["problem"], Exit.CONFIG)
    if outcome["refused"]:
        raise SystemExit(int(Exit.FAILED))


@config.command()
@click.option("--force", is_flag=True, help="Overwrite the file that is there.")
@click.option("--stdout", "to_stdout", is_flag=True, help="Print it instead of writing the file.")
@pass_common
def init(common: Common, force: bool, to_stdout: bool) -> None:
    """Write a configuration file with every setting, commented out."""
    from omlxd.config_example import example

    if to_stdout:
        click.echo(example(), nl=False)
        return
    file = common.config_file
    if file.exists() and not force:
        fail(f"{file} exists: use --force to overwrite it, or --stdout to see what would be written")
    private_dir(file.parent, shared=True)
    with open(file, "w", opener=lambda path, flags: os.open(path, flags, 0o600), encoding="utf-8") as out:
        out.write(example())
    click.echo(f"Wrote {file}. Every setting is at its default, commented out.")
