"""`omlxd advise`."""

from __future__ import annotations

import click


@click.command()
def advise() -> None:
    """Say what more RAM or SSD would have saved."""
