"""`omlxd status`, `omlxd top`, `omlxd events`."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, cast

import click

from omlxd.cli import views
from omlxd.cli.context import Common, Exit, console, hint, json_line, json_option, pass_common, show, show_json
from omlxd.counting import counted
from omlxd.errors import Unavailable

if TYPE_CHECKING:
    from omlxd.client import Cache
    from omlxd.schema import Stats


def stats_of(cache: Cache) -> Stats:
    """The daemon's answer to ``stats``."""
    return cast("Stats", cache.call("stats"))


def service_line() -> str:
    """Is it installed as a service, does it run."""
    from omlxd.service import ServiceError, manager

    try:
        return str(manager().state())
    except ServiceError as error:
        return str(error)


@click.command()
@click.option("--all", "everything", is_flag=True, help="Show every namespace and client.")
@click.option("--leases", is_flag=True, help="Also show who holds which leases.")
@click.option("--watch", type=click.FloatRange(0.2), metavar="SECONDS", help="Show it again and again.")
@json_option
@pass_common
def status(common: Common, everything: bool, leases: bool, watch: float | None, as_json: bool) -> None:
    """Show what the daemon holds and whether all is well.

    Without a daemon, what the store on the SSD holds is shown, and the exit
    code is 3.

    \b
    omlxd status --watch 2
    omlxd status --json | jq .rates
    """
    try:
        with common.daemon() as cache:
            _status(cache, everything, leases, as_json)
            while watch:
                time.sleep(watch)
                if not as_json:
                    click.echo()
                _status(cache, everything, leases, as_json)
    except Unavailable as error:
        from omlxd.cli.stopped import stopped_status, stopped_view

        stopped = stopped_status(common.config(), common.socket(), str(error))
        if as_json:
            show_json(stopped)
        else:
            show(stopped_view(stopped, service_line()))
        raise SystemExit(int(Exit.NO_DAEMON)) from None


def _status(cache: Cache, everything: bool, leases: bool, as_json: bool) -> None:
    stats = stats_of(cache)
    rows = cache.call("leases")["leases"] if leases else []
    if as_json:
        show_json({**stats, **({"leases": rows} if leases else {})})
        return
    show(views.status(stats, service=service_line(), everything=everything, asking=os.getpid()))
    if leases:
        show("")
        show(views.leases(rows))


@click.command()
@click.option("--every", type=click.FloatRange(0.2), default=1.0, show_default=True, help="Seconds between two looks.")
@pass_common
def top(common: Common, every: float) -> None:
    """Watch the tiers live, until Ctrl-C. In a pipe: one look after another."""
    terminal = console()
    with common.daemon(name="omlxd top") as cache:
        if not terminal.is_terminal:
            while True:
                json_line(stats_of(cache))
                time.sleep(every)
        from rich.live import Live

        with Live(console=terminal, screen=True, auto_refresh=False) as live:
            while True:
                live.update(views.status(stats_of(cache), asking=os.getpid()), refresh=True)
                time.sleep(every)


@click.command()
@click.option("--namespace", metavar="NAME", help="Only of this model, or of this namespace id.")
@json_option
@pass_common
def events(common: Common, namespace: str | None, as_json: bool) -> None:
    """Follow what is stored, removed and retired, until Ctrl-C.

    One line an event. With --json each line is an object that has what is
    needed to rebuild an index elsewhere: `event`, `key`, `namespace`,
    `parent`, `position`, `bytes`, `tier`, `cause`.
    """
    fields = {"namespace": namespace} if namespace else {}
    with common.daemon(name="omlxd events") as cache:
        for part in cache.stream("subscribe", timeout=86_400.0, **fields):
            for event in part.get("events", ()):
                if as_json:
                    json_line(event)
                else:
                    click.echo(views.event_line(event))
            if part.get("lost"):
                hint(f"{counted(part['lost'], 'event')} lost: this reader is too slow")
