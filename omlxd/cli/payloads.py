"""`omlxd get` and `omlxd put`: one block's payload, for looking into and for scripts."""

from __future__ import annotations

import sys
from typing import BinaryIO

import click

from omlxd.cli.blocks import MOST, find_block, only_block
from omlxd.cli.context import Common, Exit, fail, json_option, pass_common, show_json
from omlxd.cli.stopped import stopped_listing, the_store
from omlxd.errors import Unavailable
from omlxd.storage.sizes import format_size

PAYLOAD_SECONDS = 120.0


class ChainHash(click.ParamType[bytes]):
    """32 bytes in hexadecimal."""

    name = "hash"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        """Read it; a usage error otherwise."""
        if isinstance(value, bytes):
            return value
        try:
            found = bytes.fromhex(str(value))
        except ValueError:
            found = b""
        if len(found) != 32:
            self.fail(f"{value!r}: 64 hexadecimal digits are needed", param, ctx)
        return found


@click.command()
@click.argument("key_prefix")
@click.option("-o", "--output", type=click.File("wb"), default="-", help="Where to write it; default: standard output.")
@pass_common
def get(common: Common, key_prefix: str, output: BinaryIO) -> None:
    """Write one block's payload.

    KEY_PREFIX: the first digits of its key. The bytes are the tensors of the
    block back to back, as the model's layout says.

    \b
    omlxd get 3fa9c1d2 -o block.bin
    """
    if output is sys.stdout.buffer and sys.stdout.isatty():
        raise click.UsageError("a payload is no text: give -o FILE, or send the output somewhere")
    try:
        with common.daemon(timeout=PAYLOAD_SECONDS) as cache:
            row, _ = find_block(cache, key_prefix)
            payload = cache.call("peek", timeout=None, keys=row["key"])["payload"]
    except Unavailable as error:
        with the_store(common.config(), str(error)) as look:
            row, _ = only_block(stopped_listing(look, prefix=key_prefix, limit=MOST), key_prefix)
            payload = look.payload(next(entry for entry in look.entries if entry.key == row["key"]))
    if payload is None:
        fail(f"block {row['key'].hex()[:16]} could not be read in time", Exit.NOT_FOUND)
    output.write(payload)


@click.command()
@click.option("--model", required=True, help="Id of the model, as in org/name.")
@click.option("--fingerprint", required=True, help="What stands for its weights.")
@click.option("--block-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--hash", "chain_hash", type=ChainHash(), required=True, help="The block's chain hash, 64 digits.")
@click.option("--parent", type=ChainHash(), help="The chain hash of the block before it; none: it is a head.")
@click.option("--position", type=click.IntRange(0), default=0, show_default=True, help="Its place in the chain.")
@click.argument("source", type=click.File("rb"))
@json_option
@pass_common
def put(
    common: Common,
    model: str,
    fingerprint: str,
    block_tokens: int,
    chain_hash: bytes,
    parent: bytes | None,
    position: int,
    source: BinaryIO,
    as_json: bool,
) -> None:
    """Store one block's payload from a file, or - for standard input."""
    if (parent is None) != (position == 0):
        raise click.UsageError("a head (position 0) has no parent, every other block has one")
    payload = source.read()
    with common.daemon(timeout=PAYLOAD_SECONDS) as cache:
        space = cache.namespace(model=model, fingerprint=fingerprint, block_tokens=block_tokens)
        stored = space.put(chain_hash, payload, parent=parent, position=position)
    if as_json:
        show_json({"stored": stored, "bytes": len(payload)})
    elif stored:
        click.echo(f"stored {format_size(len(payload))}")
    else:
        fail("it was not taken: it is there already, or there is no room (omlxd status)")
