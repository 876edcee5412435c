"""What an operator can ask the daemon: look, remove, drain, resize, end."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from omlxd.fields import Fields
from omlxd.protocol import Code, Message, RequestError
from omlxd.storage import upkeep
from omlxd.storage.tiers import UnknownId
from omlxd.verbs import verb

if TYPE_CHECKING:
    from omlxd.namespaces import NamespaceInfo
    from omlxd.session import Session

MAX_LISTED = 10_000


@verb("stats")
def stats(session: Session, fields: Fields, request_id: int) -> Message:
    """Everything that ``omlxd status`` shows."""
    return dict(session.server.reporter.stats())


@verb("list")
def list_blocks(session: Session, fields: Fields, request_id: int) -> Message:
    """Blocks of a namespace, tier or key prefix; ``limit`` bounds the answer, ``total`` says how many there are."""
    server = session.server
    namespaces = chosen_ids(session, fields)
    tier = fields.choice("tier", ("any", "ram", "ssd"), "any")
    prefix = fields.text("prefix", "", longest=72)
    if any(c not in "0123456789abcdefABCDEF" for c in prefix):
        raise RequestError(Code.BAD_REQUEST, f"prefix is {prefix!r}; hexadecimal digits are needed")
    limit = fields.integer("limit", 1, MAX_LISTED, 1000)
    rows, total = upkeep.listing(
        server.store,
        namespaces=namespaces,
        tier=tier,
        prefix=prefix.lower(),
        limit=limit,
    )
    held = server.pins.holding()
    for row in rows if held else ():
        key = row["key"]
        assert isinstance(key, bytes)
        row["pins"] = held[key]
    return {"blocks": rows, "total": total, "models": {info.id: info.model for info in server.namespaces}}


@verb("leases")
def leases(session: Session, fields: Fields, request_id: int) -> Message:
    """Who holds what: one row for each lease."""
    now = session.server.store.now()
    rows = [
        {
            "lease": load.id,
            "client": other.name,
            "pid": other.peer.pid,
            "session": other.number,
            "blocks": len(load.blocks),
            "bytes": load.nbytes,
            "seconds": now - load.since,
            "revoked": load.revoked,
        }
        for other in session.server.sessions.values()
        for load in session.server.store.leases_of(other)
    ]
    return {"leases": rows}


@verb("revoke")
def revoke(session: Session, fields: Fields, request_id: int) -> Message:
    """End a lease of any client (``lease``: its number in ``leases``); its client is told, and its views end."""
    store = session.server.store
    lease_id = fields.integer("lease", 0, 1 << 63)
    try:
        owner = store.revoke(lease_id)
    except UnknownId as error:
        raise RequestError(Code.UNKNOWN_LEASE, str(error)) from None
    for other in session.server.sessions.values():
        if other is owner:
            other.tell({"revoked": [lease_id]})
    return {"lease": lease_id, "seconds": store.settings.seize_seconds}


@verb("remove")
async def remove(session: Session, fields: Fields, request_id: int) -> Message:
    """Remove blocks by key from both tiers; leased ones become misses at once, their memory follows."""
    removed = await upkeep.remove(session.server.store, fields.keys())
    return {"removed": removed}


@verb("clear")
async def clear(session: Session, fields: Fields, request_id: int) -> Message:
    """Remove blocks: of one model or namespace, of retired ones, unused for ``older_than`` seconds, of one tier; else all."""
    namespaces = chosen_ids(session, fields)
    tier = fields.choice("tier", ("all", "ram", "ssd"), "all")
    if fields.flag("retired"):
        retired = frozenset(info.id for info in session.server.namespaces if info.retired)
        namespaces = retired if namespaces is None else namespaces & retired
    selection = upkeep.Selection(namespaces, fields.number("older_than") if "older_than" in fields else None)
    done = await upkeep.clear(session.server.store, selection, tier)
    return {
        "ram_blocks": done.ram_blocks,
        "ram_bytes": done.ram_bytes,
        "ssd_blocks": done.ssd_blocks,
        "ssd_bytes": done.ssd_bytes,
    }


@verb("flush")
async def flush(session: Session, fields: Fields, request_id: int) -> Message:
    """Write all dirty blocks to the SSD; parts tell the bytes to go."""
    spiller = session.server.store.spiller
    if spiller is None:
        raise RequestError(
            Code.SSD_UNAVAILABLE, "there is no SSD tier to flush to: [ssd] size is 0, or the store could not be opened"
        )
    before = spiller.counts["spilled"]
    await spiller.drain(lambda left: session.more(request_id, {"dirty_bytes": left}))
    return {
        "dirty_bytes": spiller.dirty_bytes,
        "spilled": spiller.counts["spilled"] - before,
        "parked": spiller.parked_blocks,
    }


@verb("resize")
def resize(session: Session, fields: Fields, request_id: int) -> Message:
    """Change the RAM budget (bytes) until the next restart; ``over`` says how much still has to leave."""
    store = session.server.store
    page = store.ram.arena.page_bytes
    over = store.resize_ram(fields.integer("ram_bytes", page, 1 << 50))
    return {"ram_budget": store.ram.arena.budget, "over": over}


@verb("shutdown")
async def shutdown(session: Session, fields: Fields, request_id: int) -> None:
    """Drain and end; parts tell the bytes to go, the connection's end says that it is done."""
    server = session.server
    spiller = server.store.spiller
    session.more(request_id, {"dirty_bytes": spiller.dirty_bytes if spiller is not None else 0, "pid": server.pid})
    server.on_shutdown()
    while not session.closed:
        await asyncio.sleep(0.1)
        left = spiller.dirty_bytes if spiller is not None else 0
        session.more(request_id, {"dirty_bytes": left, "at": time.time()})


def chosen_ids(session: Session, fields: Fields) -> frozenset[bytes] | None:
    """Ids of what ``namespace`` names; None where a request has none."""
    if "namespace" not in fields:
        return None
    return frozenset(info.id for info in named_namespaces(session, fields))


def named_namespaces(session: Session, fields: Fields) -> list[NamespaceInfo]:
    """What ``namespace`` names: all of a model's (each of its KV groups has one), or one by the first digits of its id.

    Raises RequestError: there is none, or the digits are those of several.
    """
    text = fields.text("namespace")
    found = session.server.namespaces.find(text)
    if not found:
        known = ", ".join(sorted({info.model for info in session.server.namespaces})) or "none"
        raise RequestError(Code.NOT_FOUND, f"no namespace is named {text!r}; known models: {known}")
    if len(found) > 1 and any(info.model != text for info in found):
        ids = ", ".join(f"{info.id.hex()[:12]} ({info.model})" for info in found)
        raise RequestError(Code.REFUSED, f"{len(found)} namespaces' ids begin with {text!r}: give more digits: {ids}")
    return found
