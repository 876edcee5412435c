"""`omlxd clear`, `omlxd rm`, `omlxd flush`."""

from __future__ import annotations

import click

from omlxd.cli.ages import Age
from omlxd.cli.blocks import KeyPrefix, find_block
from omlxd.cli.context import Common, json_option, pass_common, show_json
from omlxd.cli.running import draining
from omlxd.cli.views import duration
from omlxd.counting import counted
from omlxd.storage.sizes import format_size

yes_option = click.option("--yes", is_flag=True, help="Do not ask.")
REMOVE_SECONDS = 600.0


@click.command()
@click.option("--tier", type=click.Choice(["all", "ram", "ssd"]), default="all", show_default=True)
@click.option("--namespace", metavar="NAME", help="Only of this model, or of this namespace id.")
@click.option("--retired", is_flag=True, help="Only of models whose weights have changed or gone.")
@click.option("--older-than", type=Age(), metavar="AGE", help='Only what was not used for so long: "12h", "7d".')
@yes_option
@json_option
@pass_common
def clear(
    common: Common,
    tier: str,
    namespace: str | None,
    retired: bool,
    older_than: float | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove blocks: all, or some of them.

    Blocks that an engine holds become misses at once; their memory follows
    when it lets go. Clearing only RAM writes what is dirty to the SSD first.

    \b
    omlxd clear --namespace org/model
    omlxd clear --retired --yes
    omlxd clear --older-than 7d
    """
    fields: dict[str, object] = {"tier": tier, "retired": retired}
    if namespace:
        fields["namespace"] = namespace
    if older_than is not None:
        fields["older_than"] = older_than
    with common.daemon(timeout=REMOVE_SECONDS) as cache:
        if not yes:
            whose = f"of {namespace}" if namespace else "of retired models" if retired else "of all models"
            when = f", unused for {duration(older_than)}," if older_than is not None else ""
            place = "both tiers" if tier == "all" else tier
            click.confirm(f"Remove the blocks {whose}{when} from {place}?", abort=True)
        done = cache.call("clear", timeout=None, **fields)
    if as_json:
        show_json(done)
        return
    click.echo(
        f"removed {counted(done['ram_blocks'], 'block')} ({format_size(done['ram_bytes'])}) from RAM, "
        f"{done['ssd_blocks']:,} ({format_size(done['ssd_bytes'])}) from the SSD"
    )


@click.command()
@click.argument("key_prefixes", type=KeyPrefix(), nargs=-1, required=True)
@yes_option
@json_option
@pass_common
def rm(common: Common, key_prefixes: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Remove single blocks.

    KEY_PREFIXES: the first digits of their keys, as `omlxd ls` shows them.
    What comes after a removed block in its chain cannot be reached any more
    and leaves when room is needed.
    """
    with common.daemon(timeout=REMOVE_SECONDS) as cache:
        rows = [find_block(cache, prefix)[0] for prefix in key_prefixes]
        if not yes:
            click.confirm(f"Remove {counted(len(rows), 'block')}?", abort=True)
        done = cache.call("remove", keys=b"".join(row["key"] for row in rows))
    if as_json:
        show_json(done)
    else:
        click.echo(f"removed {counted(done['removed'], 'block')}")


@click.command()
@json_option
@pass_common
def flush(common: Common, as_json: bool) -> None:
    """Write everything dirty to the SSD now."""
    with common.daemon() as cache:
        dirty = cache.call("stats")["ssd"]
        done: dict[str, int] = {}
        with draining(int(dirty["dirty_bytes"]) if dirty else 0, quiet=as_json) as tell:
            for done in cache.stream("flush", timeout=REMOVE_SECONDS):
                tell(int(done["dirty_bytes"]))
    if as_json:
        show_json(done)
        return
    parked = f"; {done['parked']} could not be written (omlxd status says why)" if done.get("parked") else ""
    click.echo(f"wrote {counted(done.get('spilled', 0), 'block')}{parked}")
