"""Storing in place: slots are reserved, written by the client, and completed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omlxd.chains import Chain
from omlxd.fields import MAX_KEYS, Fields
from omlxd.operations import DEFAULT_STORE_SECONDS
from omlxd.protocol import Code, Message, RequestError
from omlxd.storage.blocks import BlockMeta
from omlxd.verbs import verb

if TYPE_CHECKING:
    from omlxd.session import Session


@verb("prepare_store")
async def prepare_store(session: Session, fields: Fields, request_id: int) -> Message | None:
    """Reserve slots. ``keys`` is the chain from its head on; those from ``first`` on are offered.

    ``chain``, ``known``, ``goes_on``: see ``chains.py``. With ``known`` keys sent before, ``keys`` is what comes behind them.
    """
    server = session.server
    info = session.namespace(fields)
    server.refuse_when_closing()
    keys = _chain(session, fields).keys
    first = fields.integer("first", 0, len(keys), 0)
    timeout = fields.seconds("timeout", DEFAULT_STORE_SECONDS)
    sizes = fields.sizes("sizes", len(keys) - first)
    layouts = _layouts(fields.raw("layouts"))
    metas = [
        BlockMeta(
            keys[index],
            info.id,
            sizes[index - first],
            keys[index - 1] if index else None,
            index,
            layouts.get(str(index - first)),
        )
        for index in range(first, len(keys))
    ]
    ancestors = keys[:first]
    offer = await server.store.prepare_store(session, ancestors, metas, block_tokens=info.block_tokens, timeout=timeout)
    if server.recorder.on:
        chain = b"".join([*ancestors, *(meta.key for meta in metas)])
        server.recorder.stored(session, info, chain, first, sizes)
    for reason in offer.declined:
        where = server.store.lookup([meta.key for meta in metas], prefix=False)
        server.history.refused((meta.key for meta, code in zip(metas, where, strict=True) if not code), reason)
    if session.closed:  # it went while we waited: nobody will complete what was just reserved
        server.store.owner_gone(session, may_still_write=False)
        return None
    slots = [
        (one.index, one.reservation, one.block.extent.segment, one.block.extent.offset)
        for one in offer.reserved
        if one.block.extent is not None
    ]
    answer: Message = {"slots": slots, "present": offer.present, "declined": dict(offer.declined)}
    session.ok(request_id, answer, [one.block for one in offer.reserved])
    return None


def _chain(session: Session, fields: Fields) -> Chain:
    """The chain that a request is about, with what it says of it."""
    number = fields.integer("chain", 0, 1 << 63) if "chain" in fields else None
    known = fields.integer("known", 0, MAX_KEYS, 0)
    if known and number is None:
        raise RequestError(Code.BAD_REQUEST, f"known is {known}, and no chain is named")
    chain = session.chains.take(number, known) if number is not None and known else Chain()
    chain.extend(fields.keys())
    if number is not None and fields.flag("goes_on"):
        session.chains.keep(number, chain)
    return chain


def _layouts(value: object) -> dict[str, bytes]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(
        isinstance(at, str) and isinstance(raw, bytes) and len(raw) <= 1 << 20 for at, raw in value.items()
    ):
        raise RequestError(
            Code.BAD_REQUEST, "layouts: a map from the block's index (text) to its layout (bytes, at most 1 MiB)"
        )
    return value


@verb("complete_store")
def complete_store(session: Session, fields: Fields, request_id: int) -> Message:
    """The reserved slots are written (``ok``), or are given up."""
    stored = session.server.store.complete_store(
        session, fields.numbers("reservations"), success=fields.flag("ok", True)
    )
    return {"stored": stored}
