"""`omlxd pin`, `omlxd unpin`, `omlxd prefetch`."""

from __future__ import annotations

import click

from omlxd.cli.ages import Age
from omlxd.cli.blocks import KeyPrefix, find_block
from omlxd.cli.context import Common, Exit, fail, json_option, pass_common, show_json
from omlxd.cli.views import duration
from omlxd.counting import counted
from omlxd.storage.sizes import format_size

PIN_SECONDS = 120.0


@click.command()
@click.argument("key_prefix", type=KeyPrefix())
@click.option("--ttl", type=Age(), default="1h", show_default=True, metavar="AGE", help="For how long, as in 12h.")
@json_option
@pass_common
def pin(common: Common, key_prefix: str, ttl: float, as_json: bool) -> None:
    """Keep a prefix in RAM for a while.

    KEY_PREFIX: the first digits of the key of its last block; the whole chain
    up to it stays. All pins together may hold half of the RAM tier.

    \b
    omlxd pin 3fa9c1d2 --ttl 12h
    """
    with common.daemon(timeout=PIN_SECONDS) as cache:
        row, _ = find_block(cache, key_prefix)
        done = cache.call("pin", timeout=None, keys=row["key"], ttl=ttl)
    if as_json:
        show_json(done)
    else:
        blocks, size = counted(done["blocks"], "block"), format_size(done["bytes"])
        click.echo(f"pinned {blocks} ({size}) for {duration(done['ttl'])}")


@click.command()
@click.argument("key_prefixes", type=KeyPrefix(), nargs=-1)
@click.option("--all", "everything", is_flag=True, help="End all pins.")
@json_option
@pass_common
def unpin(common: Common, key_prefixes: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """End pins, by any of their blocks.

    KEY_PREFIXES: the first digits of keys, as `omlxd status --json` and
    `omlxd ls` show them.
    """
    if bool(key_prefixes) == everything:
        raise click.UsageError("name the pins by the first digits of a key, or give --all")
    with common.daemon() as cache:
        if everything:
            done = cache.call("unpin")
        else:
            keys = b"".join(find_block(cache, prefix)[0]["key"] for prefix in key_prefixes)
            done = cache.call("unpin", timeout=None, keys=keys)
    if as_json:
        show_json(done)
    elif not done["unpinned"]:
        fail("nothing was pinned there", Exit.NOT_FOUND)
    else:
        click.echo(f"ended {counted(done['unpinned'], 'pin')}")


@click.command()
@click.argument("key_prefixes", type=KeyPrefix(), nargs=-1, required=True)
@json_option
@pass_common
def prefetch(common: Common, key_prefixes: tuple[str, ...], as_json: bool) -> None:
    """Bring prefixes from the SSD into RAM.

    KEY_PREFIXES: the first digits of the keys of their last blocks; the whole
    chains up to them are brought, as far as there is room.
    """
    with common.daemon() as cache:
        keys = b"".join(find_block(cache, prefix)[0]["key"] for prefix in key_prefixes)
        done = cache.call("warm", timeout=None, keys=keys)
    if as_json:
        show_json(done)
        return
    started, blocks, there = done["started"], done["blocks"], done["in_ram"]
    if started:
        click.echo(f"{counted(started, 'block')} on the way")
    elif there == blocks:
        click.echo(f"all of it is in RAM already ({counted(blocks, 'block')})")
    else:
        fail(
            f"{there} of {counted(blocks, 'block')} are in RAM; there is no room for the others now, or they come already"
        )


@click.command()
@click.argument("lease", type=click.IntRange(0))
@json_option
@pass_common
def revoke(common: Common, lease: int, as_json: bool) -> None:
    """End an engine's lease.

    LEASE: its number in `omlxd status --leases`. The engine is told; what it
    still uses of it raises an error there instead of showing other data.
    """
    with common.daemon() as cache:
        done = cache.call("revoke", timeout=None, lease=lease)
    if as_json:
        show_json(done)
    else:
        click.echo(f"lease {lease} has ended; its memory is used again in {duration(done['seconds'])} at the latest")
