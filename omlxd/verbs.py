"""What an engine can ask the daemon.

A verb takes the session, the request's fields and its id. It returns the answer, a coroutine that gives it, or None
when it answers by itself (in parts). Refusals are raised as RequestError. The operator's verbs are in
``operator_verbs.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from omlxd.fields import Fields
from omlxd.operations import CHAINS, DEFAULT_LOAD_SECONDS, DEFAULT_STORE_SECONDS
from omlxd.protocol import KEY_BYTES, MIN_VERSION, VERSION, Code, Message, RequestError
from omlxd.storage.blocks import BlockMeta
from omlxd.storage.loads import Part
from omlxd.storage.ram import RamBlock

if TYPE_CHECKING:
    from omlxd.namespaces import NamespaceInfo
    from omlxd.server import Server
    from omlxd.session import Session

log = logging.getLogger(__name__)

Answer: TypeAlias = Message | Coroutine[object, object, Message | None] | None
Verb: TypeAlias = "Callable[[Session, Fields, int], Answer]"

VERBS: dict[str, Verb] = {}

MAX_LEASES = 4096
FDS_AT_HELLO = 32
"""So many descriptors go with one frame."""


def verb(name: str) -> Callable[[Verb], Verb]:
    """Register a function as the verb ``name``."""

    def register(function: Verb) -> Verb:
        VERBS[name] = function
        return function

    return register


@verb("hello")
def hello(session: Session, fields: Fields, request_id: int) -> None:
    """Agree on a version; say who is who, what the limits are, and which segments there are."""
    versions = fields.numbers("versions", most=2)
    if len(versions) != 2 or versions[0] > VERSION or versions[1] < MIN_VERSION:
        raise RequestError(
            Code.BAD_VERSION,
            f"the client speaks protocol {versions}, this daemon {MIN_VERSION} to {VERSION}: update the older one",
        )
    if "client" in fields:
        session.name = fields.text("client", longest=200)
    session.greeted()
    log.debug("%s has come", session)
    server = session.server
    answer: Message = {
        "version": min(VERSION, versions[1]),
        "boot": server.boot,
        "pid": server.pid,
        "max_frame": server.settings.max_frame,
        "max_reserve": server.store.settings.max_reserved_bytes,
        "page": server.store.ram.arena.page_bytes,
        "capabilities": ["prefetch", "touch", "deadline", "revoke", CHAINS],
    }
    # Others come with the first answer that refers to them.
    session.ok_with_segments(request_id, answer, sorted(server.store.ram.arena.segments)[:FDS_AT_HELLO])
    return


@verb("namespace")
def namespace(session: Session, fields: Fields, request_id: int) -> Message:
    """Register a namespace on this connection; later requests name it by the number in the answer."""
    if len(session.namespaces) >= session.server.settings.max_namespaces:
        raise RequestError(Code.TOO_MANY, f"{len(session.namespaces)} namespaces on one connection are the most")
    path = fields.text("path") if "path" in fields else None
    info = session.server.register_namespace(fields.raw("descriptor"), path)
    if info not in session.namespaces:
        session.namespaces.append(info)
    return {"ns": session.namespaces.index(info), "id": info.id}


@verb("lookup")
def lookup(session: Session, fields: Fields, request_id: int) -> Answer:
    """Where each key's block is, a byte each; with ``prefix`` up to the first miss."""
    info = session.namespace(fields)
    keys = fields.keys()
    prefix = fields.flag("prefix")
    if to_ask_for := session.server.store.to_ask_for(keys, prefix=prefix):
        return _find_and_look_up(session, fields, info, keys, prefix, to_ask_for)
    return _look_up(session, fields, info, keys, prefix)


async def _find_and_look_up(
    session: Session, fields: Fields, info: NamespaceInfo, keys: list[bytes], prefix: bool, to_ask_for: list[bytes]
) -> Message:
    await session.server.store.find(to_ask_for)
    return _look_up(session, fields, info, keys, prefix)


def _look_up(session: Session, fields: Fields, info: NamespaceInfo, keys: list[bytes], prefix: bool) -> Message:
    store = session.server.store
    where = store.lookup(keys, prefix=prefix)
    if prefix and keys:
        found = len(where) - where.endswith(b"\0")
        store.counts[info.id, "misses"] += len(keys) - found
        session.looked_up = keys[-1]
        if session.server.recorder.on:
            session.server.recorder.looked_up(session, info, fields.raw("keys"), found)
    if fields.flag("prefetch"):
        store.prefetch(keys, block_tokens=info.block_tokens)
    return {"where": where}


@verb("load")
def load(session: Session, fields: Fields, request_id: int) -> None:
    """Lease a prefix. Answers in parts, head to tail, as blocks become readable."""
    server = session.server
    info = session.namespace(fields)
    keys = fields.keys()
    mode = fields.choice("mode", ("wait", "best_effort"), "wait")
    timeout = fields.seconds("timeout", DEFAULT_LOAD_SECONDS)
    prefill_tokens_per_s = fields.number("prefill_tokens_per_s")
    server.refuse_when_closing()
    if server.store.lease_count(session) >= MAX_LEASES:
        raise RequestError(Code.TOO_MANY, f"{MAX_LEASES} leases are open on this connection: release some")
    known = 0

    def emit(part: Part) -> None:
        nonlocal known
        body: Message = {"lease": part.lease, "slots": [_slot(block) for block in part.blocks]}
        layouts = {str(known + at): b.meta.layout for at, b in enumerate(part.blocks) if b.meta.layout is not None}
        if layouts:
            body["layouts"] = layouts
        known += len(part.blocks)
        if part.last:
            body["stopped"] = part.stopped
            if server.recorder.on:
                server.recorder.loaded(
                    session,
                    info,
                    fields.raw("keys"),
                    known,
                    block_bytes=part.blocks[0].meta.nbytes if part.blocks else None,
                    prefill_tokens_per_s=prefill_tokens_per_s,
                )
            session.ok(request_id, body, part.blocks)
        else:
            session.more(request_id, body, part.blocks)

    server.store.load(
        session,
        keys,
        block_tokens=info.block_tokens,
        timeout=timeout if mode == "wait" else None,
        emit=emit,
        prefill_tokens_per_s=prefill_tokens_per_s,
        # An engine that looks first and loads the same chain then has missed what it lacks once, not twice.
        misses_of=info.id if keys and keys[-1] != session.looked_up else None,
    )


def _slot(block: RamBlock) -> tuple[int, int, int]:
    assert block.extent is not None
    return (block.extent.segment, block.extent.offset, block.meta.nbytes)


@verb("release")
def release(session: Session, fields: Fields, request_id: int) -> Message:
    """End a lease."""
    session.server.store.release(session, fields.integer("lease", 0, 1 << 63))
    return {}


@verb("touch")
def touch(session: Session, fields: Fields, request_id: int) -> Message:
    """The engine used its own copy of these blocks, head to tail."""
    info = session.namespace(fields)
    session.server.store.touch(fields.keys(), block_tokens=info.block_tokens)
    if session.server.recorder.on:
        session.server.recorder.touched(session, info, fields.raw("keys"))
    return {}


@verb("prefetch")
def prefetch(session: Session, fields: Fields, request_id: int) -> Message:
    """Start bringing a prefix from the SSD."""
    info = session.namespace(fields)
    return {"started": session.server.store.prefetch(fields.keys(), block_tokens=info.block_tokens)}


def _inline_limit(server: Server) -> int:
    """Payload bytes that fit a frame, either way."""
    return server.settings.max_frame - 1024


@verb("get")
async def get(session: Session, fields: Fields, request_id: int) -> Message:
    """One block's payload inline, or None."""
    info = session.namespace(fields)
    keys = fields.keys(most=1)
    if len(keys) != 1:
        raise RequestError(Code.BAD_REQUEST, "get takes one key")
    server = session.server
    server.refuse_when_closing()
    nbytes = server.store.nbytes_of(keys[0])
    limit = _inline_limit(server)
    if nbytes is not None and nbytes > limit:
        raise RequestError(Code.TOO_LARGE, f"the block has {nbytes} bytes; inline at most {limit} go: use load")
    payload = await server.store.get(keys[0], timeout=fields.seconds("timeout", DEFAULT_LOAD_SECONDS))
    if server.recorder.on:
        size = None if payload is None else len(payload)
        server.recorder.loaded(session, info, keys[0], int(payload is not None), block_bytes=size)
    return {"payload": payload}


@verb("put")
async def put(session: Session, fields: Fields, request_id: int) -> Message:
    """Store one block whose payload is in the request."""
    server = session.server
    info = session.namespace(fields)
    keys = fields.keys(most=1)
    payload = fields.blob("payload", longest=_inline_limit(server))
    if len(keys) != 1 or not payload:
        raise RequestError(Code.BAD_REQUEST, "put takes one key and a payload of at least one byte")
    parent = fields.blob("parent", longest=KEY_BYTES) if "parent" in fields else None
    if parent is not None and len(parent) != KEY_BYTES:
        raise RequestError(Code.BAD_REQUEST, f"parent has {len(parent)} bytes; a key has {KEY_BYTES}")
    position = fields.integer("position", 0, 1 << 40, 0)
    if (position == 0) != (parent is None):
        raise RequestError(Code.BAD_REQUEST, "a head (position 0) has no parent, every other block has one")
    server.refuse_when_closing()
    own = fields.blob("layout", longest=1 << 20) if "layout" in fields else None
    meta = BlockMeta(keys[0], info.id, len(payload), parent, position, own)
    owner = object()
    offer = await server.store.prepare_store(
        owner,
        [] if parent is None else [parent],
        [meta],
        block_tokens=info.block_tokens,
        timeout=fields.seconds("timeout", DEFAULT_STORE_SECONDS),
    )
    if server.recorder.on:
        chain = [keys[0]] if parent is None else [parent, keys[0]]
        server.recorder.stored(session, info, b"".join(chain), len(chain) - 1, [len(payload)])
    for one in offer.reserved:
        np.copyto(np.frombuffer(server.store.ram.view(one.block), np.uint8), np.frombuffer(payload, np.uint8))
    stored = server.store.complete_store(owner, [one.reservation for one in offer.reserved], success=True)
    server.store.owner_gone(owner, may_still_write=False)
    return {"stored": stored, "present": offer.present, "declined": dict(offer.declined)}
