"""What ``omlxd explain`` asks: the namespaces, what became of blocks, and what follows one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omlxd.fields import Fields
from omlxd.operations import MISS, PENDING, RAM, REMOTE, SSD
from omlxd.protocol import Message
from omlxd.storage.blocks import Described
from omlxd.verbs import verb

if TYPE_CHECKING:
    from omlxd.session import Session

HERE = {RAM: "ram", SSD: "ssd", REMOTE: "remote", PENDING: "pending"}


@verb("namespaces")
def namespaces(session: Session, fields: Fields, request_id: int) -> Message:
    """Every namespace that is known: its id and its descriptor."""
    return {
        "namespaces": [
            {"id": info.id, "descriptor": dict(info.descriptor), "retired": info.retired}
            for info in session.server.namespaces
        ]
    }


@verb("fates")
async def fates(session: Session, fields: Fields, request_id: int) -> Message:
    """Of each of ``keys`` where it is (ram, ssd, remote, pending), or why and since when it is not."""
    server = session.server
    keys = fields.keys()
    await server.store.find(server.store.to_ask_for(keys))
    answer: list[tuple[str, str, float | None]] = []
    for key, code in zip(keys, server.store.lookup(keys, prefix=False), strict=True):
        departure = server.history.get(key)
        if code != MISS:
            answer.append((HERE[code], "", None))
        elif departure is not None:
            answer.append((departure.kind, departure.cause, departure.at))
        else:
            answer.append(("never", "", None))
    return {"fates": answer}


@verb("following")
def following(session: Session, fields: Fields, request_id: int) -> Message:
    """How many blocks of the namespace with the id ``namespace`` come directly after ``parent``; without it, how many are heads."""
    store = session.server.store
    namespace = fields.blob("namespace", longest=32)
    parent = fields.blob("parent", longest=64) if "parent" in fields else None
    blocks: list[Described] = [block.meta for block in store.ram.blocks.values()]
    if store.ssd is not None:
        blocks += store.ssd.entries.values()
    heads = parent is None
    found = {
        block.key
        for block in blocks
        if block.namespace == namespace and (block.position == 0 if heads else block.parent == parent)
    }
    return {"blocks": len(found)}
