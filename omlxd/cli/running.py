"""`omlxd serve` and `omlxd stop`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from omlxd.activation import inherited_sockets, refuse_waiting
from omlxd.cli.context import Common, Exit, console, fail, json_option, pass_common, show_json
from omlxd.config_problems import ConfigError
from omlxd.errors import Unavailable
from omlxd.logs import start_logging
from omlxd.storage.sizes import format_size

if TYPE_CHECKING:
    from rich.progress import Progress

END_SECONDS = 60.0


@click.command()
@click.option("--ram-size", metavar="SIZE", help='Shared memory, as in "8GiB", "20%", "auto".')
@click.option("--ssd-size", metavar="SIZE", help='Space on the SSD, as in "200GiB", "20%", "auto"; 0: none.')
@click.option("--ssd-path", metavar="FOLDER", help="Where the SSD tier is.")
@click.option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any setting, as in ssd.codec=raw.")
@pass_common
def serve(
    common: Common,
    ram_size: str | None,
    ssd_size: str | None,
    ssd_path: str | None,
    log_level: str | None,
    settings: tuple[str, ...],
) -> None:
    """Run the daemon in the foreground.

    Ctrl-C writes what is dirty to the SSD, then ends it; a second Ctrl-C
    gives that up.

    \b
    omlxd serve --ram-size 8GiB --ssd-size 100GiB
    omlxd serve --set ssd.mode=write_through --set ram.policy=arc
    """
    flags: dict[str, object] = {
        "ram.size": ram_size,
        "ssd.size": ssd_size,
        "ssd.path": os.path.abspath(os.path.expanduser(ssd_path)) if ssd_path else None,
        "daemon.log_level": log_level,
        "daemon.socket": common.socket_option,
    }
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise click.BadParameter(f"{setting!r}: KEY=VALUE is needed", param_hint="--set")
        flags[key] = value
    try:
        config = common.config(flags)
    except ConfigError:
        refuse_waiting(inherited_sockets())
        raise
    from omlxd.daemon import run
    from omlxd.listening import SocketTaken
    from omlxd.storage.ssd_errors import SsdLocked

    start_logging(config.daemon.log_level, config.daemon.log_format)
    try:
        run(config, config_file=common.config_file, flags=flags)
    except (SocketTaken, SsdLocked) as error:
        fail(str(error))


@click.command()
@click.option("--no-wait", is_flag=True, help="Return at once; the daemon goes on writing.")
@json_option
@pass_common
def stop(common: Common, no_wait: bool, as_json: bool) -> None:
    """Stop the daemon once everything dirty is on the SSD.

    A daemon that runs as a service starts again with the next engine that
    connects; `omlxd uninstall` ends that.
    """
    with common.daemon() as cache:
        parts = cache.stream("shutdown", timeout=END_SECONDS)
        first = next(parts)
        pid, total = int(first["pid"]), int(first["dirty_bytes"])
        if not no_wait:
            with draining(total, quiet=as_json) as tell, _until_gone():
                for part in parts:
                    tell(int(part["dirty_bytes"]))
            _wait_for(pid)
    if as_json:
        show_json({"pid": pid, "drained_bytes": total, "stopped": not no_wait})
    else:
        written = f"; {format_size(total)} written first" if total else ""
        click.echo(f"pid {pid} is stopping" if no_wait else f"pid {pid} has ended{written}")


@contextmanager
def _until_gone() -> Iterator[None]:
    """The end of the connection is how a daemon says that it has ended."""
    try:
        yield
    except Unavailable:
        return


def _wait_for(pid: int) -> None:
    import psutil

    try:
        psutil.Process(pid).wait(END_SECONDS)
    except psutil.NoSuchProcess:
        return
    except psutil.TimeoutExpired:
        fail(f"pid {pid} has closed its socket but has not ended within a minute; see its log", Exit.FAILED)


class Tell:
    """Told the bytes that are left."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("writing", total=max(1, total), left=format_size(total)) if progress else None

    def __call__(self, left: int) -> None:
        """Show it."""
        if self._progress is not None and self._task is not None:
            total = self._progress.tasks[0].total or 0
            total = max(total, left)
            self._progress.update(self._task, total=total, completed=total - left, left=format_size(left))


@contextmanager
def draining(total: int, *, quiet: bool) -> Iterator[Tell]:
    """A bar on standard error for bytes on their way to the SSD; nothing where nobody watches."""
    terminal = console(stderr=True)
    if quiet or not terminal.is_terminal:
        yield Tell(None, total)
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("writing to the SSD"), BarColumn(), TextColumn("{task.fields[left]} to go"))
    with Progress(*columns, console=terminal, transient=True) as progress:
        yield Tell(progress, total)
