"""`omlxd ls` and `omlxd show`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from omlxd.cli import context, views
from omlxd.cli.context import Common, Exit, fail, hint, json_option, pass_common, show_json
from omlxd.cli.stopped import stopped_listing, the_store
from omlxd.counting import counted
from omlxd.errors import Unavailable
from omlxd.protocol import KEY_BYTES, Message
from omlxd.storage.sizes import format_size

if TYPE_CHECKING:
    from omlxd.client import Cache

SORTS = {
    "position": lambda row: (row["namespace"], row["position"], row["key"]),
    "size": lambda row: (-row["bytes"], row["key"]),
    "key": lambda row: row["key"],
}
MOST = 10_000


def list_blocks(common: Common, **fields: Any) -> Message:
    """What the daemon answers to ``list``, or the same from the store on the disk while no daemon runs."""
    try:
        with common.daemon() as cache:
            return cache.call("list", timeout=None, **fields)
    except Unavailable as error:
        with the_store(common.config(), str(error)) as look:
            return stopped_listing(look, **fields)


class KeyPrefix(click.ParamType[str]):
    """The first digits of a key."""

    name = "key"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check it; a usage error for what can be no key."""
        text = str(value)
        if not text or set(text) - set("0123456789abcdefABCDEF"):
            self.fail(f"{text!r} is no key: hexadecimal digits are needed, as omlxd ls shows them", param, ctx)
        if len(text) > 2 * KEY_BYTES:
            self.fail(f"{text!r} is longer than a key: that has {2 * KEY_BYTES} digits", param, ctx)
        return text.lower()


def find_block(cache: Cache, prefix: str) -> tuple[dict[str, Any], str]:
    """The one block whose key begins with ``prefix``, and its model. Ends the command when there is no such one."""
    return only_block(cache.call("list", prefix=prefix, limit=MOST), prefix)


def only_block(answer: Message, prefix: str) -> tuple[dict[str, Any], str]:
    """The one block of an answer to ``list``, and its model. Ends the command when it is not one."""
    rows: list[dict[str, Any]] = answer["blocks"]
    if not rows:
        fail(f"no block's key begins with {prefix!r}", Exit.NOT_FOUND)
    if len(rows) > 1:
        few = "\n".join(row["key"].hex() for row in rows[:5])
        fail(f"{len(rows)} blocks' keys begin with {prefix!r}; give more digits:\n{few}")
    return rows[0], answer["models"].get(rows[0]["namespace"], "")


@click.command()
@click.option("--namespace", metavar="NAME", help="Only of this model, or of this namespace id.")
@click.option("--tier", type=click.Choice(["any", "ram", "ssd"]), default="any", help="Only what is in this tier.")
@click.option("--dirty", is_flag=True, help="Only what is not on the SSD yet.")
@click.option("--leased", is_flag=True, help="Only what an engine holds.")
@click.option("--sort", type=click.Choice(list(SORTS)), default="position", show_default=True)
@click.option("--reverse", is_flag=True)
@click.option("--limit", type=click.IntRange(1, MOST), default=50, show_default=True, help="How many to show.")
@json_option
@pass_common
def ls(
    common: Common,
    namespace: str | None,
    tier: str,
    dirty: bool,
    leased: bool,
    sort: str,
    reverse: bool,
    limit: int,
    as_json: bool,
) -> None:
    """List blocks.

    Without a daemon: those on the disk.

    \b
    omlxd ls --namespace org/model --sort size
    omlxd ls --tier ram --dirty --json
    """
    fields: dict[str, Any] = {"tier": tier, "limit": MOST}
    if namespace:
        fields["namespace"] = namespace
    answer = list_blocks(common, **fields)
    rows = [
        row
        for row in answer["blocks"]
        if (not dirty or row.get("dirty")) and (not leased or views.engines_reading(row))
    ]
    rows.sort(key=SORTS[sort], reverse=reverse)
    whole = len(answer["blocks"]) == answer["total"]
    if as_json:
        shown = [{**row, "model": answer["models"].get(row["namespace"])} for row in rows[:limit]]
        show_json({"blocks": shown, "matching": len(rows), "complete": whole})
        return
    if not rows:
        click.echo("no blocks")
        return
    context.show(views.blocks(rows[:limit], answer["models"]))
    size = sum(int(row["bytes"]) for row in rows)
    more = f"; {min(limit, len(rows))} are shown (--limit)" if len(rows) > limit else ""
    click.echo(f"\n{counted(len(rows), 'block')}, {format_size(size)}{more}")
    if not whole:
        hint(f"only {len(answer['blocks']):,} of {answer['total']:,} blocks were looked at: narrow it down")


@click.command()
@click.argument("key_prefix", type=KeyPrefix())
@json_option
@pass_common
def show(common: Common, key_prefix: str, as_json: bool) -> None:
    """Show everything about one block.

    KEY_PREFIX: the first digits of its key, as `omlxd ls` shows them.
    """
    row, model = only_block(list_blocks(common, prefix=key_prefix, limit=MOST), key_prefix)
    if as_json:
        show_json({**row, "model": model})
    else:
        click.echo(views.block(row, model))
