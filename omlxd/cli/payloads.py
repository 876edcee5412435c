"""`omlxd get` and `omlxd put`: one block's payload, for looking into and for scripts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, BinaryIO

import click

from omlxd.cli.blocks import MOST, KeyPrefix, find_block, only_block
from omlxd.cli.context import Common, Exit, fail, json_option, pass_common, show_json
from omlxd.cli.stopped import stopped_listing, the_store
from omlxd.errors import Unavailable
from omlxd.protocol import Message
from omlxd.storage.blocks import block_key
from omlxd.storage.sizes import format_size

if TYPE_CHECKING:
    from omlxd.client import Cache

PAYLOAD_SECONDS = 120.0
DEFAULT_BLOCK_TOKENS = 64
LEAST_DIGITS = 4
"""Of a namespace's id."""


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
@click.argument("key_prefix", type=KeyPrefix())
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
@click.option("--namespace", metavar="NAME", help="One that is there: its id's first digits, or its model.")
@click.option("--model", help="Or a new one: id of the model, as in org/name,")
@click.option("--fingerprint", help="what stands for its weights,")
@click.option("--block-tokens", type=click.IntRange(1), help=f"tokens in a block [default: {DEFAULT_BLOCK_TOKENS}].")
@click.option("--hash", "chain_hash", type=ChainHash(), required=True, help="The block's chain hash, 64 digits.")
@click.option("--parent", type=ChainHash(), help="The chain hash of the block before it; none: it is a head.")
@click.option("--position", type=click.IntRange(0), default=0, show_default=True, help="Its place in the chain.")
@click.argument("source", type=click.File("rb"))
@json_option
@pass_common
def put(
    common: Common,
    namespace: str | None,
    model: str | None,
    fingerprint: str | None,
    block_tokens: int | None,
    chain_hash: bytes,
    parent: bytes | None,
    position: int,
    source: BinaryIO,
    as_json: bool,
) -> None:
    """Store one block's payload from a file, or - for standard input.

    \b
    omlxd put --namespace 01ab23cd --hash $HASH block.bin
    omlxd put --model org/name --fingerprint v1 --hash $HASH - < block.bin
    """
    if (parent is None) != (position == 0):
        raise click.UsageError("a head (position 0) has no parent, every other block has one")
    if namespace is None and (model is None or fingerprint is None):
        raise click.UsageError("name a namespace with --namespace, or a new one with --model and --fingerprint")
    if namespace is not None and (model, fingerprint, block_tokens) != (None, None, None):
        raise click.UsageError("--namespace says model, fingerprint and block size already")
    payload = source.read()
    with common.daemon(timeout=PAYLOAD_SECONDS) as cache:
        if namespace is not None:
            descriptor = descriptor_of(cache, namespace)
        else:
            from omlxd.storage.chain import Namespace

            tokens = block_tokens or DEFAULT_BLOCK_TOKENS
            named = Namespace(model=model or "", fingerprint=fingerprint or "", block_tokens=tokens, layout=b"")
            descriptor = named.descriptor()
        number = cache.call("namespace", descriptor=descriptor)["ns"]
        fields: Message = {} if parent is None else {"parent": block_key(parent)}
        done = cache.call("put", ns=number, keys=block_key(chain_hash), payload=payload, position=position, **fields)
        stored = bool(done["stored"] or done["present"])
    if as_json:
        show_json({"stored": stored, "bytes": len(payload)})
    elif stored:
        click.echo(f"stored {format_size(len(payload))}")
    else:
        fail("it was not taken: it is there already, or there is no room (omlxd status)")


def descriptor_of(cache: Cache, name: str) -> Message:
    """The namespace that is called ``name``, as it was registered. Ends the command when that is not one."""
    rows = cache.call("namespaces")["namespaces"]
    found = [row for row in rows if row["descriptor"]["model"] == name] or [
        row for row in rows if len(name) >= LEAST_DIGITS and row["id"].hex().startswith(name.lower())
    ]
    if not found:
        known = ", ".join(sorted({row["descriptor"]["model"] for row in rows})) or "none"
        fail(f"no namespace is named {name!r}; known models: {known}", Exit.NOT_FOUND)
    if len(found) > 1:
        ids = "\n".join(row["id"].hex()[:16] for row in found)
        fail(f"{name!r} has {len(found)} namespaces; name one by the first digits of its id:\n{ids}")
    descriptor: Message = found[0]["descriptor"]
    return descriptor
