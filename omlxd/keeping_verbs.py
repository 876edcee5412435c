"""What an operator can ask beyond looking and removing: pins, events, recording, retirement, the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omlxd.fields import Fields
from omlxd.followers import MAX_FOLLOWERS
from omlxd.operator_verbs import chosen_ids, named_namespaces
from omlxd.pins import MAX_TTL_SECONDS, chain_to
from omlxd.protocol import Code, Message, RequestError
from omlxd.verbs import verb

if TYPE_CHECKING:
    from omlxd.session import Session

DEFAULT_TTL_SECONDS = 3_600.0
MAX_RECORDERS = 4
MAX_RECORD_SECONDS = 366 * 86_400.0


@verb("pin")
async def pin(session: Session, fields: Fields, request_id: int) -> Message:
    """Keep the chain that ends with ``key`` in RAM for ``ttl`` seconds."""
    keys = fields.keys(most=1)
    ttl = fields.number("ttl") or DEFAULT_TTL_SECONDS
    if len(keys) != 1 or not 0 < ttl <= MAX_TTL_SECONDS:
        raise RequestError(Code.BAD_REQUEST, f"pin takes one key and a ttl of at most {MAX_TTL_SECONDS:.0f} seconds")
    made = await session.server.pins.pin(keys[0], ttl)
    return {"pin": made.id, "blocks": len(made.load.blocks), "bytes": made.load.nbytes, "ttl": ttl}


@verb("unpin")
def unpin(session: Session, fields: Fields, request_id: int) -> Message:
    """End the pins that hold ``keys``; without it, all."""
    pins = session.server.pins
    if "keys" not in fields:
        return {"unpinned": pins.unpin(None)}
    keys = fields.keys()
    return {"unpinned": sum(pins.unpin(key) for key in keys)}


@verb("warm")
def warm(session: Session, fields: Fields, request_id: int) -> Message:
    """Start bringing the chains that end with ``keys`` from the SSD; how many of their blocks are in RAM before that."""
    store = session.server.store
    chains = [chain_to(store, key) for key in fields.keys(most=1000)]
    asked = {key for chain in chains for key in chain}
    in_ram = sum(key in store.ram.blocks and store.ram.blocks[key].chunk.ref_cnt >= 0 for key in asked)
    started = sum(store.prefetch(chain, block_tokens=1) for chain in chains)
    return {"started": started, "blocks": len(asked), "in_ram": in_ram}


@verb("peek")
async def peek(session: Session, fields: Fields, request_id: int) -> Message:
    """One block's payload inline, by its key alone."""
    keys = fields.keys(most=1)
    if len(keys) != 1:
        raise RequestError(Code.BAD_REQUEST, "peek takes one key")
    server = session.server
    server.refuse_when_closing()
    nbytes = server.store.nbytes_of(keys[0])
    limit = server.settings.max_frame - 1024
    if nbytes is None:
        raise RequestError(Code.NOT_FOUND, f"{keys[0].hex()[:16]} is in neither tier")
    if nbytes > limit:
        raise RequestError(Code.TOO_LARGE, f"the block has {nbytes} bytes; inline at most {limit} go")
    return {"payload": await server.store.get(keys[0], timeout=fields.seconds("timeout", 30.0), counted=False)}


@verb("subscribe")
def subscribe(session: Session, fields: Fields, request_id: int) -> None:
    """Follow what is stored, removed and retired; the answer never ends."""
    subscriptions = session.server.subscriptions
    if len(subscriptions) >= MAX_FOLLOWERS:
        raise RequestError(Code.TOO_MANY, f"{MAX_FOLLOWERS} connections follow already; that is the most")
    subscriptions.add(session, request_id, chosen_ids(session, fields))


@verb("record")
def record(session: Session, fields: Fields, request_id: int) -> None:
    """Follow what engines ask and store; the answer ends after ``seconds``, without it never."""
    recorder = session.server.recorder
    if len(recorder) >= MAX_RECORDERS:
        raise RequestError(Code.TOO_MANY, f"{MAX_RECORDERS} connections record already; that is the most")
    seconds = fields.number("seconds")
    seconds = None if seconds is None else min(seconds, MAX_RECORD_SECONDS)
    recorder.add(session, request_id, chosen_ids(session, fields), seconds=seconds)


@verb("retire")
def retire(session: Session, fields: Fields, request_id: int) -> Message:
    """Let the blocks of ``namespace`` leave first."""
    chosen = named_namespaces(session, fields)
    for namespace in chosen:
        session.server.retire(namespace, "an operator said so")
    return {"namespaces": [namespace.id for namespace in chosen], "model": chosen[0].model}


@verb("reload")
def reload(session: Session, fields: Fields, request_id: int) -> Message:
    """Read the configuration again now."""
    live = session.server.live
    if live is None:
        raise RequestError(Code.REFUSED, "this daemon was started without a configuration file to read again")
    return live.reload().as_dict()


@verb("settings")
def settings(session: Session, fields: Fields, request_id: int) -> Message:
    """The configuration in effect, with origins."""
    live = session.server.live
    if live is None:
        raise RequestError(Code.REFUSED, "this daemon was started without a configuration")
    return {"values": {key: {"value": value, "origin": live.config.origin(key)} for key, value in live.config.values()}}
