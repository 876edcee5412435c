"""What an operator can ask of the SSD tier: keep the limit now, check everything, make the file smaller, export, import."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from omlxd.fields import Fields
from omlxd.operator_verbs import named_namespaces
from omlxd.protocol import KEY_BYTES, Code, Message, RequestError
from omlxd.storage.ssd import ArchiveBroken, SsdError
from omlxd.storage.ssd_archive import ArchivedNamespace, check_archive, read_archive
from omlxd.storage.ssd_records import EncodedBlock
from omlxd.storage.ssd_verify import VerifyReport
from omlxd.verbs import verb

if TYPE_CHECKING:
    from omlxd.session import Session
    from omlxd.storage.spill import Spiller
    from omlxd.storage.ssd import SsdTier
    from omlxd.storage.tiers import Store

PART_SECONDS = 0.25
"""Between two parts that tell how far something is."""
HOLES_ENOUGH = 64
"""A file that is larger than its live pages by less than 1/64 need not be copied to become smaller."""


@verb("gc")
async def gc(session: Session, fields: Fields, request_id: int) -> Message:
    """Keep the limit and give free pages back now; with ``dry_run`` only tell what would leave."""
    ssd, spiller = _ssd(session)
    answer = collected(ssd)
    if fields.flag("dry_run"):
        return {**answer, "dry_run": True}
    ssd.collect()
    await spiller.commit_pending()
    return {**answer, "dry_run": False, "used_after": ssd.used_bytes, "state": str(ssd.state)}


def collected(ssd: SsdTier) -> dict[str, object]:
    """What ``gc`` would do now. Sizes in bytes; namespaces, and the models that they are of, by id."""
    forecast = ssd.forecast()
    models = {space.id: str(space.descriptor.get("model", "")) for space in ssd.namespaces()}
    return {
        "limit": ssd.limit,
        "used": ssd.used_bytes,
        "blocks": forecast.blocks,
        "stored_bytes": forecast.stored_bytes,
        "returned_bytes": forecast.returned_bytes,
        "namespaces": dict(forecast.by_namespace),
        "models": {space: models.get(space, "") for space in forecast.by_namespace},
    }


@verb("verify")
async def verify(session: Session, fields: Fields, request_id: int) -> Message:
    """Read every record behind ``after`` and check it; ``bytes_per_second`` bounds the pace. Parts tell how far it is."""
    ssd, spiller = _ssd(session)
    after = fields.blob("after", longest=KEY_BYTES) if "after" in fields else b""
    rate = fields.number("bytes_per_second") or 0.0
    tell = _Parts(session, request_id)
    total = len(ssd)

    def progress(report: VerifyReport) -> bool:
        tell(lambda: {**progress_of(report), "total": total})
        return not session.closed

    report = await asyncio.get_running_loop().run_in_executor(
        None, lambda: ssd.verify(progress=progress, after=after, bytes_per_second=rate)
    )
    for key, reason in report.damaged:
        _damaged(session.server.store, key, reason)
    await spiller.commit_pending()
    return verified(report, total)


def progress_of(report: VerifyReport) -> dict[str, object]:
    """How far a check is."""
    return {"blocks": report.blocks, "bytes": report.stored_bytes, "after": report.resume_after}


def verified(report: VerifyReport, total: int) -> dict[str, object]:
    """What a check has found; ``after`` is empty when all records were seen."""
    return {
        **progress_of(report),
        "total": total,
        "damaged": [{"key": key, "reason": reason} for key, reason in report.damaged],
        "trouble": report.trouble,
    }


@verb("compact")
async def compact(session: Session, fields: Fields, request_id: int) -> Message:
    """Give free pages back; copy the file where holes do not suffice, or with ``rewrite``."""
    ssd, spiller = _ssd(session)
    before = ssd.used_bytes
    ssd.collect()
    await spiller.commit_pending()
    copied = fields.flag("rewrite") or wants_rewrite(ssd)
    if copied:
        try:
            await spiller.rewrite()
        except SsdError as error:
            raise RequestError(Code.SSD_UNAVAILABLE, f"the store was not rewritten: {error}") from None
    return {"before": before, "after": ssd.used_bytes, "rewritten": copied}


def wants_rewrite(ssd: SsdTier) -> bool:
    """Does the file take clearly more than its live pages, although its free ones were given back?"""
    return ssd.file_bytes - ssd.live_bytes > max(1 << 20, ssd.live_bytes // HOLES_ENOUGH)


@verb("export")
async def export(session: Session, fields: Fields, request_id: int) -> Message:
    """Write the blocks of a model or of a ``namespace``, or the chains that end with ``keys``, into the archive ``file``."""
    ssd, spiller = _ssd(session)
    file = _file(session, fields)
    await spiller.drain()
    if "namespace" in fields:
        keys = [key for space in named_namespaces(session, fields) for key in keys_of(ssd, space.id)]
    else:
        keys = list(dict.fromkeys(key for last in fields.keys(most=1000) for key in ssd.chain(last)))
    if not keys:
        raise RequestError(Code.NOT_FOUND, "there are no such blocks on the SSD")
    tell = _Parts(session, request_id)
    try:
        blocks = await asyncio.get_running_loop().run_in_executor(
            None, lambda: ssd.export(keys, file, lambda done: tell(lambda: {"blocks": done, "total": len(keys)}))
        )
    except OSError as error:
        raise RequestError(Code.REFUSED, f"{file} could not be written: {error.strerror or error}") from None
    return {"blocks": blocks, "total": len(keys), "bytes": file.stat().st_size, "file": str(file)}


def keys_of(ssd: SsdTier, namespace: bytes) -> list[bytes]:
    """All blocks of a namespace, heads before tails: so an import never meets a block before its parent."""
    mine = [entry for entry in ssd.entries.values() if entry.namespace == namespace]
    mine.sort(key=lambda entry: entry.position)
    return [entry.key for entry in mine]


@verb("import")
async def import_archive(session: Session, fields: Fields, request_id: int) -> Message:
    """Take in the archive ``file``; nothing of it when it is not whole."""
    ssd, spiller = _ssd(session)
    file = _file(session, fields)
    loop = asyncio.get_running_loop()
    try:
        total = await loop.run_in_executor(None, check_archive, file)
        stored = present = 0
        groups = in_groups(file, ssd.group_bytes)
        left_out: set[bytes] = set()
        while (group := await loop.run_in_executor(None, next, groups, None)) is not None:
            for space in group.namespaces:
                _register(session, space)
            fresh = [block for block in group.blocks if block.key not in ssd]
            present += len(group.blocks) - len(fresh)
            wanted = [block for block in fresh if block.meta.parent not in left_out]
            stored += await spiller.take_in(wanted)
            # There was no room for what these continue: they would take others' room for nothing.
            left_out.update(block.key for block in fresh if block.key not in ssd)
            session.more(request_id, {"blocks": stored + present, "total": total})
    except ArchiveBroken as error:
        raise RequestError(Code.REFUSED, str(error)) from None
    except SsdError as error:
        raise RequestError(Code.SSD_UNAVAILABLE, str(error)) from None
    except OSError as error:
        raise RequestError(Code.REFUSED, f"{file} could not be read: {error.strerror or error}") from None
    return {"blocks": stored, "present": present, "declined": total - stored - present, "total": total}


class Group:
    """Part of an archive: some blocks, and the namespaces that are named before them."""

    def __init__(self) -> None:
        self.namespaces: list[ArchivedNamespace] = []
        self.blocks: list[EncodedBlock] = []


def in_groups(file: Path, nbytes: int) -> Iterator[Group]:
    """The entries of a checked archive, about ``nbytes`` stored bytes at a time."""
    group, size = Group(), 0
    for entry in read_archive(file):
        if isinstance(entry, ArchivedNamespace):
            group.namespaces.append(entry)
            continue
        if size and size + entry.stored_bytes > nbytes:
            yield group
            group, size = Group(), 0
        group.blocks.append(entry)
        size += entry.stored_bytes
    yield group


def _register(session: Session, space: ArchivedNamespace) -> None:
    info = session.server.register_namespace(dict(space.descriptor))
    if info.id != space.id:
        raise ArchiveBroken(f"the archive's namespace {space.id.hex()[:12]} is not the one that it describes")


def _ssd(session: Session) -> tuple[SsdTier, Spiller]:
    store = session.server.store
    session.server.refuse_when_closing()
    if store.ssd is None or store.spiller is None:
        why = session.server.reporter.about.no_ssd or "[ssd] size is 0"
        raise RequestError(Code.SSD_UNAVAILABLE, f"there is no SSD tier: {why}")
    return store.ssd, store.spiller


def _file(session: Session, fields: Fields) -> Path:
    """The archive. Only the daemon's own user may name one: the daemon reads and writes it with that user's rights."""
    if session.peer.uid not in (os.getuid(), 0):
        raise RequestError(Code.REFUSED, "archives are for the user that the daemon runs as")
    file = Path(fields.text("file"))
    if not file.is_absolute():
        raise RequestError(Code.BAD_REQUEST, f"file is {str(file)!r}; an absolute path is needed")
    return file


def _damaged(store: Store, key: bytes, reason: str) -> None:
    """The record of ``key`` is no good: it leaves the SSD, and is written again where RAM still has the block."""
    ssd, spiller = store.ssd, store.spiller
    entry = ssd.meta(key) if ssd is not None else None
    if ssd is None or spiller is None or entry is None:
        return
    store.journal.tell("removed", "ssd", entry, "damaged")
    ssd.damaged(key, reason)
    block = store.ram.blocks.get(key)
    if block is not None and block.chunk.ref_cnt >= 0:
        block.clean = False
        spiller.add(block)


class _Parts:
    """Parts of an answer, sent from a worker's thread, a few in a second."""

    def __init__(self, session: Session, request_id: int) -> None:
        self._session = session
        self._request_id = request_id
        self._loop = asyncio.get_running_loop()
        self._told = time.monotonic()

    def __call__(self, part: Callable[[], Message]) -> None:
        now = time.monotonic()
        if now - self._told >= PART_SECONDS:
            self._told = now
            self._loop.call_soon_threadsafe(self._send, part())

    def _send(self, part: Message) -> None:
        if not self._session.closed:
            self._session.more(self._request_id, part)
